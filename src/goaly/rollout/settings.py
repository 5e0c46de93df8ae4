"""How many processes run episodes, and how many episodes each runs at once."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """The rollout workers."""

    workers: int = 1
    """Processes that run episodes."""
    concurrency: int = 1024
    """Most episodes that one worker runs at once; more wait their turn."""

    def problems(self, prefix: str) -> list[str]:
        """What can't work, a line each. `prefix` is the section's dotted path with its dot, such as `rollout.`."""
        return [
            f"{prefix}{key}={getattr(self, key)}: must be at least 1"
            for key in ("workers", "concurrency")
            if getattr(self, key) < 1
        ]
