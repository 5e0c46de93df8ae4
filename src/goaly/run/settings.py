"""Where the actors of a run live."""

from dataclasses import dataclass, field

ROLES = ("hub", "trainer", "reference", "critic", "generator", "rollout")
COMPUTING = ("trainer", "reference", "critic", "generator")
"""Roles whose ranks take a GPU each where there are GPUs."""


@dataclass(kw_only=True)
class RolePlacement:
    """Where the ranks of a role that computes go: one GPU a rank, on machines that have GPUs."""

    hosts: int | None = None
    """On how many hosts, in equal parts: trainer ranks 0 to n - 1 on the first, and so on. null: all hosts of the
    role's own mesh, if `hosts.job` has one; else as few as have enough free GPUs, which is one without GPUs. Set it to
    spread a role over more hosts than it needs."""

    gpus: int | None = None
    """On each of these hosts, how many GPUs the role takes, which is how many ranks it has there. null: its ranks
    divided by its hosts. Set it, or `hosts`, to have a placement checked that a cluster was sized for."""

    share_with: str | None = None
    """A role whose GPUs this one uses too, such as `trainer`: each of its ranks then shares a GPU with one of the other
    role's, and both must fit into its memory. null: GPUs of its own. Set it where there are fewer GPUs than ranks."""

    tp_across_hosts: bool = False
    """Whether a tensor-parallel group may have ranks on several hosts. Its ranks exchange activations at every layer:
    set it only where hosts are joined as fast as GPUs of one host, or a model fits no host."""

    def problems(self, prefix: str) -> list[str]:
        """One line for each setting that can't work."""
        found = [
            f"{prefix}{name}={count}: must be at least 1"
            for name, count in (("hosts", self.hosts), ("gpus", self.gpus))
            if count is not None and count < 1
        ]
        if self.share_with is not None and self.share_with not in COMPUTING:
            found.append(f"{prefix}share_with={self.share_with}: must be a role with GPUs: {', '.join(COMPUTING)}")
        return found


@dataclass(kw_only=True)
class WorkerPlacement:
    """Where rollout workers go. They need no GPU."""

    hosts: int | None = None
    """On how many hosts they run, in turns. null: on all of their mesh."""

    def problems(self, prefix: str) -> list[str]:
        """One line for each setting that can't work."""
        if self.hosts is not None and self.hosts < 1:
            return [f"{prefix}hosts={self.hosts}: must be at least 1"]
        return []


@dataclass(kw_only=True)
class ImaginedCluster:
    """Hosts that a dry run places the run on, all alike."""

    hosts: int = 1
    """How many hosts."""

    meshes: dict[str, int] = field(default_factory=dict)
    """How many hosts each mesh of `hosts.job` has, instead of `hosts`, such as
    `{trainer: 2, generator: 2, hub: 1, rollout: 1}`. Set it for a job with a mesh for each role."""

    gpus: int = 0
    """GPUs of each host."""

    gpu_gib: float | None = None
    """Memory of each GPU in GiB; null leaves memory unchecked."""

    cores: int | None = None
    """CPU cores of each host; null: not known, then no process is bound to the cores near its GPU."""

    numa: int = 1
    """NUMA nodes of each host, with equal shares of its cores and GPUs."""

    def problems(self, prefix: str) -> list[str]:
        """One line for each setting that can't work."""
        counts = {"hosts": self.hosts, "numa": self.numa, "cores": self.cores}
        counts |= {f"meshes.{mesh}": hosts for mesh, hosts in self.meshes.items()}
        found = [
            f"{prefix}{key}={count}: must be at least 1"
            for key, count in counts.items()
            if count is not None and count < 1
        ]
        if self.gpu_gib is not None and self.gpu_gib <= 0:
            found.append(f"{prefix}gpu_gib={self.gpu_gib}: must be above 0")
        if self.gpus < 0:
            found.append(f"{prefix}gpus={self.gpus}: must be at least 0")
        if self.cores is not None and 0 < self.cores < self.numa:
            found.append(f"{prefix}numa={self.numa}: must be at most {prefix}cores={self.cores}")
        for mesh in self.meshes:
            if mesh not in (*ROLES, "hosts"):
                found.append(f"{prefix}meshes.{mesh}: must be a role ({', '.join(ROLES)}) or hosts")
        return found


@dataclass(kw_only=True)
class HostSettings:
    """Which hosts, GPUs and cores each role uses."""

    job: str = "local"
    """Where hosts come from: "local" (this machine), or "package.module:function", a function that returns a Monarch
    job (Slurm, Kubernetes, SSH, ...) with a mesh `hosts` for all roles, or a mesh for each role of the run: hub,
    trainer, generator, rollout, reference, critic. A role without a mesh of its own uses `hosts`."""

    trainer: RolePlacement = field(default_factory=RolePlacement)
    """Where the trainer's ranks go."""

    reference: RolePlacement = field(default_factory=RolePlacement)
    """Where the reference model's ranks go."""

    critic: RolePlacement = field(default_factory=RolePlacement)
    """Where the critic's ranks go."""

    generator: RolePlacement = field(default_factory=RolePlacement)
    """Where the generators' ranks go: replica by replica, `generator.tp` ranks each."""

    rollout: WorkerPlacement = field(default_factory=WorkerPlacement)
    """Where rollout workers go."""

    bind: dict[str, list[int]] = field(default_factory=dict)
    """CPU cores that the processes of a role may use, by role, such as `{trainer: [0], generator: [1]}`. A role that is
    not named may use every core, or, on hosts of several NUMA nodes, those of its GPU's node."""

    imagine: ImaginedCluster | None = None
    """For `--dry-run`: a cluster to place the run on, such as `{hosts: 4, gpus: 8}`. null: this machine. A run that is
    not dry uses the hosts that it gets."""

    def of(self, role: str) -> RolePlacement:
        """Where a role that computes goes."""
        return getattr(self, role)

    silent_seconds: float | None = 60.0
    """How long a process may leave the controller's heartbeat unanswered, in seconds, before it counts as lost: it is
    killed if it is on this host, and then replaced (a generator) or the end of the run. Only a process that is stopped,
    swapped out or stuck in native code falls silent. One that starts has ten minutes until its first answer, unless it
    is stopped on this host. Raise it where machines stall for longer; null never gives up a process that still
    exists."""

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
        for role in COMPUTING:
            seen = [role]
            while (lender := self.of(seen[-1]).share_with) in COMPUTING and lender not in seen:
                seen.append(lender)
            if lender == role:
                asked = self.of(role).share_with
                problems.append(f"{prefix}{role}.share_with={asked}: must be a role with GPUs of its own, not {role}'s")
        return problems
