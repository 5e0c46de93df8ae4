"""Episodes as text for the terminal: a table of many, and one turn by turn.

A policy can write anything. Text that is shown has no control characters but line breaks and tabs, and none that change
its direction.

Shape suffixes: T tokens of a trajectory, N tokens of a turn.
"""

from collections.abc import Iterator, Sequence
from unicodedata import category

from goaly.journal.logged_episodes import LoggedEpisode, ReadEpisode
from goaly.journal.notes import notes_by_turn
from goaly.journal.turn_tree import TreeTurn, turns_of
from goaly.prompts.tokenizer import ChatTokenizer

HEADINGS = ("episode", "state", "step", "prompt", "source", "reward", "advantage", "turns", "calls", "tokens")
HEADINGS += ("versions", "stale")
LEFT = ("episode", "state", "prompt", "source", "token", "text")
"""Columns that are aligned to the left."""
NOTHING = "-"
TEXT_WIDTH = 24
"""Characters of a token's or an id's text in a table."""
COLUMNS = {"advantages": "advantage", "reference_logprobs": "reference", "values": "value", "returns": "return"}
"""Headings of the columns that later stages add."""
REPLACEMENT = "\ufffd"
"""Decoding gives it for bytes that are no character."""
MOST_BYTES = 4
"""A character has at most this many bytes in UTF-8, and this many tokens."""


def table(episodes: Sequence[LoggedEpisode]) -> str:
    """A line for each episode; the reasons of rejections and failures are behind the last column."""
    lines = _aligned(HEADINGS, [_cells(one) for one in episodes])
    whys = ["", *(f"  {one_line(one.why)}" if one.why else "" for one in episodes)]
    return "".join(f"{line}{why}".rstrip() + "\n" for line, why in zip(lines, whys, strict=True))


def _cells(one: LoggedEpisode) -> tuple[str, ...]:
    turns = f"{one.turns} in {one.trajectories}" if one.trajectories > 1 else str(one.turns)
    tokens = f"{one.trained}/{one.tokens}"
    return (
        one.id,
        one.state,
        _number(one.step),
        _short(one.prompt_id),
        _short(one.source),
        _number(one.reward),
        _number(one.advantage, sign="+"),
        turns if one.trajectories else NOTHING,
        str(one.calls or NOTHING),
        tokens if one.trajectories else NOTHING,
        _range(one.versions),
        _range(one.staleness),
    )


def shown(episode: ReadEpisode, chat: ChatTokenizer, *, tokens: bool = False) -> str:
    """An episode as text: what became of it, its tree if it has branches, and its turns."""
    return "".join(f"{line}\n" for line in _shown(episode, chat, tokens))


def facts_of(one: LoggedEpisode) -> str:
    """The outcome of an episode, or of a ticket without one, in a line or several."""
    what = f"{'episode' if one.sample is not None else 'ticket'} {one.id}: {one.state}"
    what += f" ({one_line(one.why)})" if one.why else ""
    what += f", step {one.step}" if one.step is not None else ""
    where = f", environment {one_line(one.environment)}" if one.environment else ""
    lines = [what, f"prompt {one_line(one.prompt_id)}, source {one_line(one.source)}{where}"]
    if one.trajectories:
        many = f"{one.trajectories} trajectories" if one.trajectories > 1 else "1 trajectory"
        lines.append(f"{many} ({one_line(one.outcome)}), {one.turns} turns, {one.tokens} tokens, {one.trained} trained")
        lines.append(
            f"reward {_number(one.reward)}, advantage {_number(one.advantage, sign='+')}, "
            f"policy versions {_range(one.versions)}, staleness {_range(one.staleness)}"
        )
    return "\n".join(lines)


def _shown(episode: ReadEpisode, chat: ChatTokenizer, tokens: bool) -> Iterator[str]:
    yield facts_of(episode.facts)
    prompt = episode.prompt
    if prompt is not None and prompt.answer is not None:
        yield f"expected answer: {one_line(prompt.answer)}"
    if prompt is not None and prompt.tools:
        names = (str(tool.get("function", tool).get("name", "?")) for tool in prompt.tools)
        yield f"tools offered: {one_line(', '.join(names))}"
    turns = turns_of(episode.trajectories)
    texts = [pieces(chat, one.tokens["tokens"].tolist()) for one in episode.trajectories]
    if len(episode.trajectories) > 1:
        yield ""
        yield from _tree(episode, turns)
    notes = notes_by_turn(episode.trajectories, turns)
    for turn in turns:
        yield ""
        yield f"--- {heading(episode, turn)}"
        its_texts = texts[turn.trajectory][turn.span]
        if tokens:
            yield from _token_table(episode, turn, its_texts)
        else:
            yield safe("".join(its_texts))
        for note in notes.get(turn.number, ()):
            yield safe(f">>> {note}")


def _tree(
    episode: ReadEpisode, turns: Sequence[TreeTurn], parent: int | None = None, indent: str = ""
) -> Iterator[str]:
    """The turns from this one on, each branch deeper than the turns before it."""
    below = [turn for turn in turns if turn.parent == parent]
    while len(below) == 1:
        yield f"{indent}{heading(episode, below[0])}"
        below = [turn for turn in turns if turn.parent == below[0].number]
    for place, turn in enumerate(below):
        last = place == len(below) - 1
        yield f"{indent}{'└─ ' if last else '├─ '}{heading(episode, turn)}"
        yield from _tree(episode, turns, turn.number, indent + ("   " if last else "│  "))


def heading(episode: ReadEpisode, turn: TreeTurn) -> str:
    """Number, author and facts of a turn."""
    return " | ".join(_parts(episode, turn))


def _parts(episode: ReadEpisode, turn: TreeTurn) -> Iterator[str]:
    tokens_N = episode.trajectories[turn.trajectory].tokens[turn.span]
    trained_N = tokens_N["trained"]
    count, trained = len(trained_N), int(trained_N.sum())
    place = "" if turn.number == 1 else " (new root)" if turn.parent is None else f" (after {turn.parent})"
    yield f"turn {turn.number}{'' if turn.parent == turn.number - 1 else place}"
    yield turn.author
    of_them = "all" if trained == count else str(trained)
    how = f"{of_them} trained" if trained else "masked"
    yield f"{count} token{'' if count == 1 else 's'}, {how}"
    if trained:
        versions = tokens_N["sampler_versions"][trained_N]
        oldest, newest = int(versions.min()), int(versions.max())
        yield f"version {_range((oldest, newest))}"
        if (step := episode.facts.step) is not None:
            yield f"staleness {_range((step - 1 - newest, step - 1 - oldest))}"
        yield f"mean log-prob {tokens_N['sampler_logprobs'][trained_N].mean().item():.3f}"
        if (advantages_T := episode.columns[turn.trajectory].get("advantages")) is not None:
            values = advantages_T[turn.span][trained_N]
            yield f"advantage {_range((values.min().item(), values.max().item()), sign='+')}"
    if turn.turn.calls:
        yield f"calls {one_line(', '.join(turn.turn.calls))}"
    if turn.turn.malformed:
        yield f"malformed calls: {turn.turn.malformed}"
    if bool(tokens_N["rewards"].any()):
        yield f"reward {_number(tokens_N['rewards'].sum().item())}"


def _token_table(episode: ReadEpisode, turn: TreeTurn, texts: Sequence[str]) -> list[str]:
    """A line for each token of a turn."""
    one, step = episode.trajectories[turn.trajectory], episode.facts.step
    columns = {COLUMNS[key]: column for key, column in episode.columns[turn.trajectory].items()}
    headings = ("at", "token", "text", "log-prob", "version", "stale", "reward", *columns)
    rows = []
    for at, text in zip(range(turn.turn.start, turn.turn.stop), texts, strict=True):
        trained = bool(one.tokens["trained"][at])
        version = int(one.tokens["sampler_versions"][at])
        rows.append(
            (
                str(at),
                str(int(one.tokens["tokens"][at])),
                _short(text, quoted=True),
                _number(one.tokens["sampler_logprobs"][at].item()) if trained else NOTHING,
                str(version) if trained else NOTHING,
                str(step - 1 - version) if trained and step is not None else NOTHING,
                _number(one.tokens["rewards"][at].item() or None),
                *(_number(column[at].item()) if trained else NOTHING for column in columns.values()),
            )
        )
    return [line.rstrip() for line in _aligned(headings, rows)]


def _aligned(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The cells as lines, each column as wide as its widest cell."""
    widths = [max(len(row[place]) for row in (headings, *rows)) for place in range(len(headings))]
    return [
        "  ".join(
            cell.ljust(width) if heading in LEFT else cell.rjust(width)
            for heading, cell, width in zip(headings, row, widths, strict=True)
        )
        for row in (headings, *rows)
    ]


def _short(text: str, *, quoted: bool = False) -> str:
    shown = one_line(text)
    shown = shown if len(shown) <= TEXT_WIDTH else f"{shown[: TEXT_WIDTH - 1]}…"
    return f"'{shown}'" if quoted else shown


def _number(value: float | None, *, sign: str = "") -> str:
    if value is None:
        return NOTHING
    return f"{value:{sign}.4g}" if isinstance(value, float) else str(value)


def _range(values: tuple[float, float] | None, *, sign: str = "") -> str:
    if values is None:
        return NOTHING
    low, high = (_number(value, sign=sign) for value in values)
    return low if low == high else f"{low}..{high}"


def pieces(chat: ChatTokenizer, tokens: Sequence[int]) -> list[str]:
    """The text of each token. A character that several tokens make is in the last one of them."""
    texts = []
    begin = read = 0  # what is decoded is always the end of the text before, and the new tokens
    for end in range(1, len(tokens) + 1):
        before = chat.decode(tokens[begin:read], skip_special_tokens=False)
        text = chat.decode(tokens[begin:end], skip_special_tokens=False)
        if text.endswith(REPLACEMENT) and end - read < MOST_BYTES and end < len(tokens):
            texts.append("")
            continue
        texts.append(text[len(before) :])
        begin, read = read, end
    return texts


def safe(text: str) -> str:
    """The text with everything else than visible characters, line breaks and tabs as escapes."""
    return text if text.isprintable() else "".join(one if _is_safe(one) else _escape(one) for one in text)


def one_line(text: str) -> str:
    """The text with line breaks and tabs as escapes, too."""
    return safe(text).replace("\n", "\\n").replace("\t", "\\t")


def _is_safe(one: str) -> bool:
    return one in "\n\t" or (category(one)[0] != "C" and category(one) not in ("Zl", "Zp"))


def _escape(one: str) -> str:
    return one.encode("unicode_escape").decode()
