"""Settings of the backlog: groups of a training step, staleness, order and packing."""

from collections.abc import Iterator
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from goaly.base.config.settings import AtLeastOne, NonNegativeInt, PositiveInt, Section, Settings


class BacklogSettings(Settings):
    """Admission, order and packing of groups on their way from the prompt to the trainer."""

    groups_per_step: PositiveInt = 8
    """Groups (prompts) that one training step consumes."""
    group_size: PositiveInt = 8
    """Samples of one prompt."""
    max_staleness: NonNegativeInt = 2
    """Policy versions by which generation may run ahead of training; 0 is synchronous, 1 is one step off-policy. Older
    data teaches less a step. Raise it, to 8 for instance, if the longest answers take several steps: the trainer waits
    for them otherwise (`docs/results/bounds.md`)."""
    order: Literal["windowed", "completion"] = "windowed"
    """`windowed` trains groups in the order of admission, except within `window`, so that their age is bounded;
    `completion` trains them as they finish: no group waits for a long one, but ages have no bound."""
    window: PositiveInt = 8
    """In windowed order, the number of tickets, from the oldest unfinished one on, that may be trained as they finish;
    1 is strict FIFO. It adds at most ceil((window - 1) / groups_per_step) to the age of a trained token."""
    length_correction: Literal["none", "inverse_propensity"] = "none"
    """In completion order, `inverse_propensity` multiplies each group's advantages by the share of groups of its length
    among the launched ones, divided by their share among those trained so far."""
    max_length_weight: AtLeastOne = 4.0
    """Upper bound of the weight that `length_correction` gives to a group; its inverse is the lower bound. Both apply
    before the batch's weights are scaled to a mean of 1."""
    dynamic_sampling: bool = False
    """Reject a group whose samples all have the same reward (`no_signal`) and start another. It needs an
    `advantages.name` that only compares rewards within a group. Rewards count as the verifier gave them, before
    `advantages.overlong` lowers them."""
    max_no_signal_share: Annotated[float, Gt(0), Lt(1)] = 0.95
    """Dynamic sampling ends the run with an error if a greater share of the recent groups had no signal. At 0.95, the
    run samples twenty groups for each one that it trains."""
    row_length: Annotated[int, Ge(2)] = 1024
    """Tokens of a packed row. A sequence is never split, so this bounds prompt and response together."""

    @property
    def max_age(self) -> int | None:
        """The greatest age, in policy versions, that a trained token can have; None where nothing bounds it."""
        if self.max_staleness == 0:
            return 0
        if self.order == "completion":
            return None
        return self.max_staleness + -(-(self.window - 1) // self.groups_per_step)

    def _problems(self, at: Section) -> Iterator[str]:
        if self.length_correction != "none" and self.order != "completion":
            yield (
                f"{at.length_correction}: must be none where {at}order is {self.order}, which leaves nothing to correct"
            )
        if self.order == "completion":
            yield from at.idle(f"{at}order is completion", "window")
        if self.length_correction == "none":
            yield from at.idle(f"{at}length_correction is none", "max_length_weight")
        if not self.dynamic_sampling:
            yield from at.idle(f"{at}dynamic_sampling is off", "max_no_signal_share")
        if self.dynamic_sampling and self.group_size < 2:
            yield f"{at.group_size}: must be at least 2 where {at}dynamic_sampling is on, or no group has a signal"
