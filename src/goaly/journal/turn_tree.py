"""The tree of an episode's turns, found again from its trajectories.

Trajectories of one episode begin with the same turns up to where they part. A turn that the policy wrote is trained in
one of them, and context in the others.

Each token of an episode is in one turn of its tree, but for those that a trajectory shares with another one. A turn
that is trained has the tokens of the trajectory that trains it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from goaly.trajectory import ENVIRONMENT, PROMPT, Trajectory, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeTurn:
    """A turn and its place in the tree."""

    number: int
    """Counted from 1, along the first trajectory, then along the rest of the second one, and so on."""
    parent: int | None
    """The number of the turn before it."""
    trajectory: int
    """Which trajectory has its tokens, counted from 0."""
    turn: Turn

    @property
    def author(self) -> str:
        """The author of the turn."""
        return self.turn.author

    @property
    def span(self) -> slice:
        """Its tokens in that trajectory."""
        return slice(self.turn.start, self.turn.stop)


def turns_of(trajectories: Sequence[Trajectory]) -> list[TreeTurn]:
    """The turns of an episode with these trajectories, each once."""
    turns: list[TreeTurn] = []
    following: dict[int | None, list[int]] = {}
    for place, one in enumerate(trajectories):
        parent: int | None = None
        for turn in _all_turns(one):
            known = [turns[number - 1] for number in following.get(parent, ())]
            same = next((each for each in known if _is_same(trajectories[each.trajectory], each.turn, one, turn)), None)
            if same is None:
                number = len(turns) + 1
                turns.append(TreeTurn(number=number, parent=parent, trajectory=place, turn=turn))
                following.setdefault(parent, []).append(number)
            else:
                number = same.number
                if _is_trained(one, turn):
                    turns[number - 1] = TreeTurn(number=number, parent=parent, trajectory=place, turn=turn)
            parent = number
    return turns


def _all_turns(one: Trajectory) -> Iterator[Turn]:
    """Its turns, and tokens before or between them, which an episode need not name."""
    stop = 0
    for turn in (*one.turns, Turn(author=ENVIRONMENT, start=len(one), stop=len(one))):
        if turn.start > stop:
            yield Turn(author=ENVIRONMENT if stop else PROMPT, start=stop, stop=turn.start)
        if turn.stop > turn.start or turn in one.turns:
            yield turn
        stop = turn.stop


def _is_same(one: Trajectory, turn: Turn, other: Trajectory, its: Turn) -> bool:
    """Whether two turns after equal ones are the same: of equal answers that are both trained, each is its own."""
    if turn.author != its.author or (_is_trained(one, turn) and _is_trained(other, its)):
        return False
    return torch.equal(one.tokens["tokens"][turn.start : turn.stop], other.tokens["tokens"][its.start : its.stop])


def _is_trained(one: Trajectory, turn: Turn) -> bool:
    return bool(one.tokens["trained"][turn.start : turn.stop].any())
