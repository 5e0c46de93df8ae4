"""The rollout journal: a JSON line for each trajectory, with its text for readers.

    ticket, prompt_id, sample   the ticket of the group, the prompt, and the number of the sample
    environment, outcome        the environment, and how the episode ended
    reward, rewards             the sum, and [position, reward] of every token with a reward
    length, trained             token counts
    versions                    [policy version, tokens] runs over the whole sequence; -1 for tokens not sampled
    turns                       [author, start, stop]
    prompt, response            as text
    tokens, logprobs            as sampled; only with `telemetry.journal_tokens`

Several workers may share one file, and a restarted run may append to it (see `lines.py`).
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
        """Append one trajectory with its texts and further facts."""
        if self._lines is not None:
            entry = journal_entry(trajectory, ticket=ticket, prompt=prompt, response=response, tokens=self._tokens)
            self._lines.write(entry | facts)

    def close(self) -> None:
        """Close the file; later writes are ignored."""
        if self._lines is not None:
            self._lines.close()


def journal_entry(
    trajectory: "Trajectory", *, ticket: int, prompt: str, response: str, tokens: bool = False
) -> dict[str, Any]:
    """The journal entry of a trajectory."""
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
    """`[value, count]` of every run of equal values."""
    return [[value, sum(1 for _ in same)] for value, same in groupby(values)]
