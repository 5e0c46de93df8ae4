"""Episodes as one HTML page that needs no other file, no server and no network.

Text from a log cannot leave the page's data, which is JSON without `<`, `>` and `&`. The page's policy lets only its
own script run, and nothing load: not even a mistake in the script could send anything anywhere.
"""

import json
import math
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any

from goaly.journal.episode_text import COLUMNS, facts_of, heading, pieces, safe
from goaly.journal.export import run_lengths
from goaly.journal.logged_episodes import LoggedEpisode, ReadEpisode
from goaly.journal.notes import notes_by_turn
from goaly.journal.turn_tree import TreeTurn, turns_of
from goaly.prompts.tokenizer import ChatTokenizer

DIGITS = 6
"""Significant digits of log-probs and other values on a page."""


def page(
    run: str, episodes: Sequence[tuple[LoggedEpisode, ReadEpisode | None]], notes: Sequence[str], chat: ChatTokenizer
) -> str:
    """The page of these episodes; None for one without tokens in the log."""
    data = {"notes": [safe(note) for note in notes], "episodes": [_entry(one, read, chat) for one, read in episodes]}
    style, script = (_file(f"page.{kind}") for kind in ("css", "js"))
    parts = {
        "title": escape(safe(f"Episodes of {run}")),
        "policy": (
            f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; "
            "form-action 'none'"
        ),
        "style": style,
        "script": script,
        "data": _embedded(data),
    }
    first, *rest = _file("page.html").split("@")
    return first + "".join(parts[one] if at % 2 == 0 else one for at, one in enumerate(rest))


def _entry(one: LoggedEpisode, read: ReadEpisode | None, chat: ChatTokenizer) -> dict[str, Any]:
    facts = [facts_of(one)]
    if read is not None and read.prompt is not None and read.prompt.answer is not None:
        facts.append(safe(f"expected answer: {read.prompt.answer}"))
    texts = [] if read is None else [pieces(chat, each.tokens["tokens"].tolist()) for each in read.trajectories]
    turns = [] if read is None else turns_of(read.trajectories)
    notes = {} if read is None else notes_by_turn(read.trajectories, turns)
    return {
        "id": one.id,
        "state": one.state,
        "why": None if one.why is None else safe(one.why),
        "step": one.step,
        "prompt": safe(one.prompt_id),
        "source": safe(one.source),
        "reward": _finite(one.reward),
        "advantage": _finite(one.advantage),
        "trajectories": one.trajectories,
        "answers": one.turns,
        "tokens": one.tokens,
        "trained": one.trained,
        "versions": one.versions,
        "staleness": one.staleness,
        "facts": "\n".join(facts),
        "turns": []
        if read is None
        else [_turn(read, turn, texts[turn.trajectory], notes.get(turn.number, ())) for turn in turns],
    }


def _turn(read: ReadEpisode, turn: TreeTurn, texts: Sequence[str], notes: Sequence[str]) -> dict[str, Any]:
    tokens = read.trajectories[turn.trajectory].tokens[turn.span]
    columns: Mapping[str, Any] = read.columns[turn.trajectory]
    return {
        "number": turn.number,
        "parent": turn.parent,
        "author": turn.author,
        "heading": heading(read, turn),
        "start": turn.turn.start,
        "texts": [safe(text) for text in texts[turn.span]],
        "notes": [safe(note) for note in notes],
        "tokens": tokens["tokens"].tolist(),
        "logprobs": _values(tokens["sampler_logprobs"].tolist()),
        "trained": run_lengths(map(int, tokens["trained"].tolist())),
        "versions": run_lengths(tokens["sampler_versions"].tolist()),
        "rewards": run_lengths(_values(tokens["rewards"].tolist())),
        "columns": {COLUMNS[key]: run_lengths(_values(column[turn.span].tolist())) for key, column in columns.items()},
    }


def _values(numbers: Iterable[float]) -> list[Any]:
    return [_finite(value) for value in numbers]


def _finite(value: float | None) -> float | None:
    """The value in a few digits; None where JSON has no number for it."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}")


def _embedded(data: object) -> str:
    """The data as JSON that no HTML parser takes for anything else."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(content: str) -> str:
    return f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"


def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
