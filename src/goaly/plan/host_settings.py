"""Hosts, GPUs and CPU cores of the actors of a run."""

from collections.abc import Iterator
from dataclasses import field
from typing import Literal

from goaly.base.config.settings import AtLeastOne, NonNegativeInt, PositiveFloat, PositiveInt, Section, Settings

ROLES = ("hub", "trainer", "reference", "critic", "generator", "rollout")
COMPUTING = ("trainer", "reference", "critic", "generator")
"""Roles whose ranks have a GPU each, if the hosts have GPUs."""


class RolePlacement(Settings):
    """Hosts and GPUs of a role that computes: each rank has one GPU, if the hosts have GPUs."""

    hosts: PositiveInt | None = None
    """Number of hosts, which get equal parts of the ranks, in order. null: all hosts of the role's own mesh, if
    `hosts.job` has one; else as few hosts as have enough free GPUs (one host, without GPUs). Set it to spread a role
    over more hosts than it needs."""
    gpus: PositiveInt | None = None
    """GPUs, and so ranks, of the role on each of these hosts. null: its ranks divided by its hosts. Set it, or `hosts`,
    to check that a run fits the cluster that was sized for it."""
    share_with: Literal["trainer", "reference", "critic", "generator"] | None = None
    """A role whose GPUs this role uses too: each of its ranks shares a GPU with one rank of the other role, and both
    must fit into its memory. null: GPUs of its own. Set it if there are fewer GPUs than ranks."""
    tp_across_hosts: bool = False
    """Allow a tensor-parallel group to have ranks on several hosts. Its ranks exchange activations at every layer: set
    it only if the network between hosts is as fast as that between GPUs of one host, or if no host can hold the
    model."""


class WorkerPlacement(Settings):
    """Hosts of the rollout workers, which need no GPU."""

    hosts: PositiveInt | None = None
    """Number of hosts, over which the workers are spread evenly. null: all hosts of their mesh."""


class ImaginedCluster(Settings):
    """A cluster of equal hosts, for which a dry run plans the placement."""

    hosts: PositiveInt = 1
    """Number of hosts."""
    meshes: dict[str, PositiveInt] = field(default_factory=dict)
    """Number of hosts of each mesh of `hosts.job`, instead of `hosts`, such as
    `{trainer: 2, generator: 2, hub: 1, rollout: 1}`. Set it for a job with a mesh for each role."""
    gpus: NonNegativeInt = 0
    """GPUs of each host."""
    gpu_gib: PositiveFloat | None = None
    """Memory of each GPU in GiB; null: memory of GPUs is not checked."""
    host_gib: PositiveFloat | None = None
    """Memory of each host in GiB, without that of GPUs; null: memory of hosts is not checked."""
    cores: PositiveInt | None = None
    """CPU cores of each host; null: unknown, and no process is bound to the cores near its GPU."""
    numa: PositiveInt = 1
    """NUMA nodes of each host, with equal shares of its cores and GPUs."""

    def _problems(self, at: Section) -> Iterator[str]:
        if self.cores is not None and self.cores < self.numa:
            yield f"{at.numa}: must be at most {at.cores}"
        for mesh in self.meshes:
            if mesh not in (*ROLES, "hosts"):
                yield f"{at}meshes.{mesh}: must be a role ({', '.join(ROLES)}) or hosts"


class HostSettings(Settings):
    """Hosts, GPUs and CPU cores of each role."""

    job: str = "local"
    """Source of the hosts: "local" (this machine), or "package.module:function", a function that returns a Monarch job
    (Slurm, Kubernetes, SSH, ...) with a mesh `hosts` for all roles, or a mesh for each role of the run: hub, trainer,
    generator, rollout, reference, critic. A role without a mesh of its own uses `hosts`."""
    trainer: RolePlacement = field(default_factory=RolePlacement)
    """Placement of the trainer's ranks."""
    reference: RolePlacement = field(default_factory=RolePlacement)
    """Placement of the reference model's ranks."""
    critic: RolePlacement = field(default_factory=RolePlacement)
    """Placement of the critic's ranks."""
    generator: RolePlacement = field(default_factory=RolePlacement)
    """Placement of the generators' ranks: replica by replica, `generator.tp` ranks each."""
    rollout: WorkerPlacement = field(default_factory=WorkerPlacement)
    """Placement of the rollout workers."""
    bind: dict[str, list[int]] = field(default_factory=dict)
    """CPU cores of the processes of each role, such as `{trainer: [0], generator: [1]}`. A role that is not named uses
    all cores, or, on hosts with several NUMA nodes, those of its GPU's node."""
    fork: bool = True
    """Start the processes of this machine as forks of one that has imported their modules: a process then starts in a
    second instead of ten. Only on machines without GPUs. Set it to false if a library does not survive a fork."""
    imagine: ImaginedCluster | None = None
    """For `--dry-run`: a cluster for which the placement is planned, such as `{hosts: 4, gpus: 8}`; null is this
    machine. Whether it has GPUs also decides which settings can work. Other runs use the hosts of `job`."""
    silent_seconds: AtLeastOne | None = 60.0
    """Seconds without an answer to the controller's heartbeat after which a process counts as lost. It is killed if it
    is on this host, and what follows is the same as after any death. Only a process that is stopped, swapped out or
    stuck in native code does not answer. A starting process has ten minutes for its first answer, unless it is stopped
    on this host. Raise it if machines stall for longer; null waits for every process that exists."""
    stuck_seconds: AtLeastOne | None = 1500.0
    """Seconds without progress after which a process that is working logs where it is stuck, and ends; what follows is
    the same as after any death. Progress is a step of a generator, a microbatch, a copied bucket of weights, or the end
    of any other call, such as a load or a save. Raise it if one of these takes longer, such as the save of a very large
    model to a slow disk; null waits for ever."""

    @property
    def device(self) -> Literal["cpu", "cuda"] | None:
        """The device of ranks on the imagined hosts; None: what this machine has, or the hosts of `job`."""
        if self.imagine is None:
            return None
        return "cuda" if self.imagine.gpus else "cpu"

    def of(self, role: str) -> RolePlacement:
        """The placement of a role that computes."""
        return getattr(self, role)

    def _problems(self, at: Section) -> Iterator[str]:
        if self.job != "local" and ":" not in self.job:
            yield f'{at.job}: must be "local" or "package.module:function"'
        for role in self.bind:
            if role not in ROLES:
                yield f"{at}bind.{role}: unknown role; roles are {', '.join(ROLES)}"
        for role in COMPUTING:
            seen = [role]
            while (lender := self.of(seen[-1]).share_with) in COMPUTING and lender not in seen:
                seen.append(lender)
            if lender == role:
                asked = self.of(role).share_with
                yield f"{at}{role}.share_with={asked}: must be a role with GPUs of its own, not {role}'s"
