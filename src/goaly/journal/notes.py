"""Notes of an episode's script, such as the commands of a coding agent, as text behind the answers they are about."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from goaly.journal.turn_tree import TreeTurn
from goaly.trajectory import POLICY, Trajectory

PATCH = "patch"
"""The key of a note that has a change of files, in the form of `git diff`."""
OUTSIDE = ("kind", "tool", "after")
"""Keys that are no facts of their own."""
SHORT = 60
"""Characters of a word that stands on a note's first line."""


def notes_by_turn(trajectories: Sequence[Trajectory], turns: Sequence[TreeTurn]) -> dict[int, list[str]]:
    """The notes of an episode, by the number of the turn that each is shown behind. Those of an episode with several
    trajectories are all at its end: its answers were not given one after the other."""
    answers = [turn.number for turn in turns if turn.author == POLICY]
    placed: dict[int, list[str]] = {}
    for note in notes_of(trajectories):
        after = note.get("after", 0)
        if len(trajectories) > 1 or after > len(answers):
            number = turns[-1].number
        else:
            number = answers[after - 1] if after else turns[0].number
        placed.setdefault(number, []).append(note_text(note))
    return placed


def notes_of(trajectories: Sequence[Trajectory]) -> Iterator[Mapping[str, Any]]:
    """The notes of an episode, in order."""
    return (note for one in trajectories for note in one.notes)


def patches_of(trajectories: Sequence[Trajectory]) -> list[str]:
    """The changes of files that an episode ended with."""
    return [note[PATCH] for note in notes_of(trajectories) if note.get(PATCH)]


def note_text(note: Mapping[str, Any]) -> str:
    """A note as text: its short facts on the first line, then each longer one below its name."""
    facts = {key: value for key, value in note.items() if key not in OUTSIDE}
    short = {key: value for key, value in facts.items() if not isinstance(value, Mapping | list) and _is_short(value)}
    name = str(note.get("tool") or note.get("kind") or "note")
    first = " | ".join([name, *(_fact(key, value) for key, value in short.items() if value != "")])
    long = [_block(key, value) for key, value in facts.items() if key not in short]
    return "\n".join([first, *long])


def _is_short(value: Any) -> bool:
    return not isinstance(value, str) or (len(value.split()) <= 1 and value == value.strip() and len(value) <= SHORT)


def _fact(key: str, value: Any) -> str:
    if key == "seconds":
        return f"{value:.4g} s"
    return f"{key.replace('_', ' ')} {value}"


def _block(key: str, value: Any) -> str:
    if isinstance(value, Mapping):
        lines = [f"{name} {one}" for name, one in value.items()]
    elif isinstance(value, str):
        lines = value.rstrip("\n").split("\n")
    else:
        lines = [str(one) for one in value]
    return "\n".join([f"  {key.replace('_', ' ')}:", *(f"    {line}" for line in lines)])
