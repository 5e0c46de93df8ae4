"""How many processes run episodes, how many episodes each runs at once, and for how long."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """The rollout workers."""

    workers: int = 1
    """Processes that run episodes."""
    concurrency: int = 1024
    """Most episodes that one worker runs at once; more wait their turn."""
    episode_seconds: float | None = 3600.0
    """Longest time for one episode, from its start to its trajectory; null sets no limit. An episode that takes longer
    is cancelled and its group fails (`episode_timeout`); in an evaluation its reward is 0. Raise it for agents that
    work for hours: groups that fail for their length are missing from what is trained."""
    group_seconds: float | None = None
    """Longest time for all episodes of a group, from the start of the first; null sets no limit of its own. A group
    that takes longer fails (`group_timeout`). Set it where a late group costs more, by holding up the batches behind
    it, than it teaches."""
    blocked_seconds: float | None = 600.0
    """Longest time for which an episode may block its worker's event loop, and with it all other episodes there; then
    the worker logs what blocks it and exits. Null sets no limit. Rather than raise it, move what blocks into
    `asyncio.to_thread`."""

    def problems(self, prefix: str) -> list[str]:
        """What can't work, a line each. `prefix` is the section's dotted path with its dot, such as `rollout.`."""
        counts = [
            f"{prefix}{key}={getattr(self, key)}: must be at least 1"
            for key in ("workers", "concurrency")
            if getattr(self, key) < 1
        ]
        limits = {key: getattr(self, key) for key in ("episode_seconds", "group_seconds", "blocked_seconds")}
        return counts + [
            f"{prefix}{key}={limit}: must be a time above 0, or null for no limit"
            for key, limit in limits.items()
            if limit is not None and not 0 < limit < float("inf")
        ]
