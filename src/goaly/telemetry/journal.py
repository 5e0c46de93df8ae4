"""The rollout journal: one JSON line a trajectory, for people who want to read what the policy wrote.

    ticket, prompt_id, sample   which sample of which admitted group
    environment, outcome        where it was sampled, how it ended
    reward, rewards             the sum, and [position, reward] of every token that was credited
    length, trained             token counts
    versions                    [policy version, tokens] runs over the whole sequence; -1 where the policy did not write
    turns                       [author, start, stop]
    prompt, response            as text
    tokens, logprobs            as sampled; only where the settings ask for them

Several workers may share one file; it may be appended to after a crash (see `lines.py`).
"""

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from goaly.telemetry.lines import LineFile

if TYPE_CHECKING:
    from goaly.trajectory import Trajectory


class Journal:
    """Writes trajectories to a journal file; with no path, nowhere."""

    def __init__(self, path: str | Path | None, *, tokens: bool = False):
        self._lines = LineFile(path) if path is not None else None
        self._tokens = tokens

    def write(self, trajectory: "Trajectory", *, ticket: int, prompt: str, response: str, **facts: Any) -> None:
        """Append one trajectory with its texts and whatever else is known about it."""
        if self._lines is not None:
            entry = journal_entry(trajectory, ticket=ticket, prompt=prompt, response=response, tokens=self._tokens)
            self._lines.write(entry | facts)

    def close(self) -> None:
        """Take no more trajectories."""
        if self._lines is not None:
            self._lines.close()


def journal_entry(
    trajectory: "Trajectory", *, ticket: int, prompt: str, response: str, tokens: bool = False
) -> dict[str, Any]:
    """The journal's line of a trajectory."""
    rewards = trajectory.tokens["rewards"].tolist()
    entry = {
        "ticket": ticket,
        "prompt_id": trajectory.prompt_id,
        "sample": trajectory.sample_index,
        "environment": trajectory.environment,
        "outcome": str(trajectory.outcome),
        "reward": trajectory.reward,
        "rewards": [[position, reward] for position, reward in enumerate(rewards) if reward],
        "length": len(trajectory),
        "trained": trajectory.trained_tokens,
        "versions": run_lengths(trajectory.tokens["sampler_versions"].tolist()),
        "turns": [[turn.author, turn.start, turn.stop] for turn in trajectory.turns],
        "prompt": prompt,
        "response": response,
    }
    if tokens:
        entry["tokens"] = trajectory.tokens["tokens"].tolist()
        entry["logprobs"] = trajectory.tokens["sampler_logprobs"].tolist()
    return entry


def run_lengths(values: Iterable[int]) -> list[list[int]]:
    """`[value, count]` of every stretch of equal values."""
    return [[value, sum(1 for _ in same)] for value, same in groupby(values)]
