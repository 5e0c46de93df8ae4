"""Where the actors of a run live."""

from dataclasses import dataclass, field

ROLES = ("hub", "trainer", "reference", "critic", "generator", "rollout")


@dataclass(kw_only=True)
class HostSettings:
    """Which hosts each role runs on."""

    job: str = "local"
    """Where hosts come from: "local" (this machine), or "package.module:function", a function that returns a Monarch
    job (Slurm, Kubernetes, SSH, ...) with a host mesh for each role: hub, trainer, generator, rollout, and
    reference and critic where the run has them."""

    bind: dict[str, list[int]] = field(default_factory=dict)
    """CPU cores that the processes of a role may use, by role, such as `{trainer: [0], generator: [1]}`. A role that is
    not named may use every core."""

    silent_seconds: float | None = 60.0
    """How long a process may leave the controller's heartbeat unanswered, in seconds, before it counts as lost: it is
    killed if it is on this host, and then replaced (a generator) or the end of the run. Only a process that is stopped,
    swapped out or stuck in native code falls silent; one that starts has ten minutes until its first answer. Raise it
    where machines stall for longer; null never gives up a process that still exists."""

    def problems(self, prefix: str) -> list[str]:
        """One line for each setting that can't work."""
        problems = []
        if self.silent_seconds is not None and self.silent_seconds < 1:
            problems.append(f"{prefix}silent_seconds={self.silent_seconds:g}: must be at least 1, or null for no limit")
        if self.job != "local" and ":" not in self.job:
            problems.append(f'{prefix}job={self.job}: must be "local" or "package.module:function"')
        for role in self.bind:
            if role not in ROLES:
                problems.append(f"{prefix}bind.{role}: no such role; roles are {', '.join(ROLES)}")
        return problems
