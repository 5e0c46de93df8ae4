"""How many groups make a training step, and how far generation may run ahead of training."""

from dataclasses import dataclass
from typing import Literal

from goaly.configuration.schema import KnownWords


@dataclass(frozen=True, slots=True, kw_only=True)
class BacklogSettings(KnownWords):
    """Admission, order and packing of groups on their way from the prompt to the trainer."""

    groups_per_step: int = 8
    """Groups (prompts) that one training step consumes."""
    group_size: int = 8
    """Samples of one prompt."""
    max_staleness: int = 8
    """Policy versions by which generation may run ahead of training; 0 is synchronous, 1 is one step off-policy."""
    order: Literal["windowed", "completion"] = "windowed"
    """`windowed`: in the order of admission, but for `window`, so that age is bounded; `completion`: as groups finish,
    so that nothing waits for a long one, which is then trained late, and without a bound on its age."""
    window: int = 8
    """In windowed order, tickets that may be trained ahead of the oldest one still under way, itself counted; 1 is
    strict FIFO. Adds at most ceil((window - 1) / groups_per_step) to the age of what is trained."""
    length_correction: Literal["none", "inverse_propensity"] = "none"
    """In completion order, weigh each group's advantages by how much rarer groups of its length are among what was
    trained so far than among what was launched."""
    max_length_weight: float = 4.0
    """Greatest weight of a group that `length_correction` gives, and the inverse of the least, before the batch's
    weights are scaled to a mean of 1."""
    dynamic_sampling: bool = False
    """Whether a group whose samples all got the same reward is rejected (`no_signal`) and replaced by another. Needs an
    `advantages.name` that compares the rewards of a group alone; what shaping takes off later does not count."""
    max_no_signal_share: float = 0.95
    """Dynamic sampling ends the run with an error when more of the recent groups than this had no signal: at 0.95, a
    group trained costs twenty."""
    row_length: int = 1024
    """Tokens in a packed row. A sequence is never split, so it bounds prompt and response together."""

    @property
    def max_age(self) -> int | None:
        """The greatest age, in policy versions, that a trained token can have; None where nothing bounds it."""
        if self.max_staleness == 0:
            return 0
        if self.order == "completion":
            return None
        return self.max_staleness + -(-(self.window - 1) // self.groups_per_step)

    def problems(self, prefix: str) -> list[str]:
        """What can't work, a line each. `prefix` is the section's dotted path with its dot, such as `backlog.`."""
        least = {"groups_per_step": 1, "group_size": 1, "max_staleness": 0, "window": 1, "row_length": 2}
        found = [
            f"{prefix}{key}={getattr(self, key)}: must be at least {bound}"
            for key, bound in least.items()
            if getattr(self, key) < bound
        ]
        if self.length_correction != "none" and self.order != "completion":
            found.append(
                f"{prefix}length_correction={self.length_correction}: must be none where {prefix}order is "
                f"{self.order}, which leaves nothing to correct"
            )
        without_effect = {
            "window": (self.order == "completion", f"{prefix}order is completion"),
            "max_length_weight": (self.length_correction == "none", f"{prefix}length_correction is none"),
            "max_no_signal_share": (not self.dynamic_sampling, f"{prefix}dynamic_sampling is off"),
        }
        found += [
            f"{prefix}{key}={getattr(self, key)}: has no effect, {why}"
            for key, (idle, why) in without_effect.items()
            if idle and getattr(self, key) != self.__dataclass_fields__[key].default
        ]
        if not 1 <= self.max_length_weight < float("inf"):
            found.append(f"{prefix}max_length_weight={self.max_length_weight}: must be a number of at least 1")
        if not 0 < self.max_no_signal_share < 1:
            found.append(f"{prefix}max_no_signal_share={self.max_no_signal_share}: must be above 0 and below 1")
        if self.dynamic_sampling and self.group_size < 2:
            found.append(
                f"{prefix}group_size={self.group_size}: must be at least 2 where {prefix}dynamic_sampling is on, or no "
                "group has a signal"
            )
        return found
