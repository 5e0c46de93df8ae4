"""Who judges a finished sequence, for how long, and what its group makes of the reward."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSettings:
    """The verifier and the child processes that run it."""

    verifier: str = "goaly.prompts.tasks.arithmetic:verify"
    """Function that scores one response, as `package.module:function`; it takes a Prompt and the response's text."""
    placement: Literal["worker", "hub"] = "worker"
    """Who owns the processes: each rollout worker its own, with no message between actors for a score (0.5 ms and
    more), or the hub one pool that all workers share, for verifiers that hold much memory."""
    workers: int = 1
    """Child processes that run the verifier, in each place."""
    time_limit_seconds: float = 10.0
    """Longest time for one score; the child that exceeds it is killed and replaced."""
    on_time_limit: Literal["zero", "fail"] = "zero"
    """What a score that ran out of time becomes: reward 0, or the failure of its group."""

    def problems(self, prefix: str) -> list[str]:
        """What can't work, a line each. `prefix` is the section's dotted path with its dot, such as `reward.`."""
        found = []
        module, _, function = self.verifier.partition(":")
        if not module or not function or not all(part.isidentifier() for part in [*module.split("."), function]):
            found.append(f"{prefix}verifier={self.verifier}: must be package.module:function")
        if self.workers < 1:
            found.append(f"{prefix}workers={self.workers}: must be at least 1")
        if not 0 < self.time_limit_seconds < float("inf"):
            found.append(f"{prefix}time_limit_seconds={self.time_limit_seconds}: must be a time above 0")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSettings:
    """How the rewards of a group become the advantages of its samples."""

    name: str = "group"
    """`group`: (reward - mean) / (std + epsilon) over the group; `group_mean`: reward - mean."""
    epsilon: float = 1e-6
    """Added to the group's standard deviation."""

    def problems(self, prefix: str) -> list[str]:
        """What can't work, a line each. `prefix` is the section's dotted path with its dot, such as `advantages.`."""
        found = []
        if self.name not in ADVANTAGE_NAMES:
            found.append(f"{prefix}name={self.name}: must be one of {', '.join(ADVANTAGE_NAMES)}")
        if self.epsilon < 0:
            found.append(f"{prefix}epsilon={self.epsilon}: must be at least 0")
        return found


ADVANTAGE_NAMES = ("group", "group_mean")
