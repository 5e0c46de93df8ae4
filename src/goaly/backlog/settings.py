"""How many groups make a training step, and how far generation may run ahead of training."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BacklogSettings:
    """Admission, order and packing of groups on their way from the prompt to the trainer."""

    groups_per_step: int = 8
    """Groups (prompts) that one training step consumes."""
    group_size: int = 8
    """Samples of one prompt."""
    max_staleness: int = 8
    """Policy versions by which generation may run ahead of training; 0 is synchronous, 1 is one step off-policy."""
    window: int = 8
    """Tickets that may be trained ahead of the oldest one still under way, itself counted; 1 is strict FIFO. Adds at
    most ceil((window - 1) / groups_per_step) to the age of what is trained."""
    row_length: int = 1024
    """Tokens in a packed row. A sequence is never split, so it bounds prompt and response together."""

    @property
    def max_age(self) -> int:
        """The greatest age, in policy versions, that a trained token can have."""
        if self.max_staleness == 0:
            return 0
        return self.max_staleness + -(-(self.window - 1) // self.groups_per_step)

    def problems(self, prefix: str) -> list[str]:
        """What can't work, a line each. `prefix` is the section's dotted path with its dot, such as `backlog.`."""
        least = {"groups_per_step": 1, "group_size": 1, "max_staleness": 0, "window": 1, "row_length": 2}
        return [
            f"{prefix}{key}={getattr(self, key)}: must be at least {bound}"
            for key, bound in least.items()
            if getattr(self, key) < bound
        ]
