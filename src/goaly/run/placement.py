"""Which processes a run has, and which host, GPU and cores each gets. Pure functions of the settings and the cluster.

Invariants
    PL-1  Every rank is placed once. The ranks of a mesh are in order, with equally many on each of its hosts.
    PL-2  No GPU is given to two ranks of a role, nor to two roles, unless one of them has `share_with`.
    PL-3  The ranks of a tensor-parallel group are on one host, unless `tp_across_hosts` is set.
    PL-4  A placement that does not fit is refused with one line for each problem, which names the settings.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from goaly.errors import ConfigError
from goaly.run.cluster import POOL, Cluster, Gpu, Host
from goaly.run.config import RunConfig
from goaly.run.settings import COMPUTING, ROLES, HostSettings, RolePlacement
from goaly.train.settings import CriticSettings, ReferenceSettings, TrainerSettings

RANKS = {
    "trainer": "trainer.fsdp * trainer.tp",
    "reference": "reference.fsdp * reference.tp",
    "critic": "critic.fsdp * critic.tp",
    "generator": "generator.replicas * generator.tp",
}

IMPORTS = {
    "hub": ("goaly.weights.store", "goaly.backlog.queue", "goaly.reward.pool"),
    "trainer": ("goaly.train.trainer", "goaly.train.rank", "goaly.train.parallel", "goaly.losses.objective"),
    "reference": ("goaly.train.reference", "goaly.train.parallel"),
    "critic": ("goaly.train.critic", "goaly.train.critic_engine", "goaly.train.parallel"),
    "generator": ("goaly.generate.generator", "goaly.generate.engine", "goaly.weights.subscriber"),
    "rollout": ("goaly.rollout.worker",),
}
"""The modules that the actors of a role import. Their processes start with these imports, before actors are spawned."""


Free = list[list[Gpu]]
"""For each host, the GPUs that are free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """A mesh of processes, which are spawned together."""

    name: str
    role: str
    count: int = 1
    threads: int = 1
    group: int = 1
    """Ranks of a tensor-parallel group, which have consecutive numbers."""


def processes(config: RunConfig) -> Iterator[Processes]:
    """All processes that the run starts with. Those that take longest to start come first."""
    generator, trainer, reference, critic = config.generator, config.trainer, config.reference, config.critic
    for replica in range(generator.replicas):
        tp, threads = generator.tp, generator.threads
        yield Processes(name=f"generator-{replica}", role="generator", count=tp, threads=threads, group=tp)
    yield _ranks("trainer", trainer)
    if config.uses_reference:
        yield _ranks("reference", reference)
    if critic is not None:
        yield _ranks("critic", critic)
    yield Processes(name="hub", role="hub")
    for worker in range(config.rollout.workers):
        yield Processes(name=f"rollout-{worker}", role="rollout")


def _ranks(role: str, settings: TrainerSettings | ReferenceSettings | CriticSettings) -> Processes:
    return Processes(name=role, role=role, count=settings.ranks, threads=settings.threads, group=settings.tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of one rank."""

    host: str

    gpu: Gpu | None
    """The GPU that it computes on; None where it has none."""

    visible: tuple[str, ...] | None
    """The GPUs that its process sees, as CUDA_VISIBLE_DEVICES names them; None on a host without GPUs."""

    cores: tuple[int, ...] | None
    """The cores that it may use; None for every core."""


ANYWHERE = Place(host="", gpu=None, visible=None, cores=None)
"""The place of a process that needs no GPU or cores of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The places of a mesh of processes."""

    seats: range
    """Positions in the role's mesh of hosts, with equally many ranks on each."""

    ranks: tuple[Place, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    """The hosts of a mesh of processes, by position, and a GPU for each of its ranks if there are GPUs."""

    seats: range
    gpus: tuple[Gpu | None, ...]


def place(
    processes: Sequence[Processes], settings: HostSettings, cluster: Cluster, gib: Mapping[str, float] | None = None
) -> dict[str, Placed]:
    """The places of every mesh of processes, by name. ConfigError with a line for each problem (PL-4).

    `gib` has the GPU memory that a rank of each role needs at least. It is checked if a GPU's memory is known.
    """
    planner = _Planner(processes, settings, cluster, gib or {})
    placed = planner.place_all()
    if planner.problems:
        raise ConfigError(planner.problems)
    return placed


class _Planner:
    def __init__(
        self, processes: Sequence[Processes], settings: HostSettings, cluster: Cluster, gib: Mapping[str, float]
    ):
        self.problems: list[str] = []
        self._settings = settings
        self._cluster = cluster
        self._gib = gib
        self._meshes: dict[str, list[Processes]] = {}
        for each in processes:
            self._meshes.setdefault(each.role, []).append(each)
        self._free: Free = [list(host.gpus) for host in cluster.hosts]
        self._drawn: dict[str, list[_Draw]] = {}

    def place_all(self) -> dict[str, Placed]:
        """The placement of everything that fits. `problems` has a line for each thing that does not."""
        for role in COMPUTING:
            if role not in self._meshes and self._settings.of(role) != RolePlacement():
                self.problems.append(f"hosts.{role}: has no effect, the run has no {role}")
        for role in sorted(self._meshes, key=lambda role: (self._lenders(role), ROLES.index(role))):
            problem = self._draw(role) if role in COMPUTING else self._seat(role)
            if problem is not None:
                self.problems.append(problem)
        self.problems += [*self._memory_problems(), *self._core_problems()]
        return {
            each.name: Placed(seats=draw.seats, ranks=tuple(self._places(each, draw)))
            for role, draws in self._drawn.items()
            for each, draw in zip(self._meshes[role], draws, strict=True)
        }

    def _lenders(self, role: str) -> int:
        """How many roles must be placed before this one, which shares their GPUs."""
        lender = self._settings.of(role).share_with if role in COMPUTING else None
        return 0 if lender is None else 1 + self._lenders(lender)

    def _seat(self, role: str) -> str | None:
        """Place a role without GPUs on hosts in turns; returns the problem if there is one."""
        seats, meshes = self._cluster.seats(role), self._meshes[role]
        across = self._settings.rollout.hosts if role == "rollout" else None
        if not seats:
            return self._no_hosts(role)
        if across is not None and across > len(seats):
            return f"hosts.rollout.hosts={across}: must be at most {len(seats)}, the hosts there are"
        turns = [index % (across or len(seats)) for index in range(len(meshes))]
        self._drawn[role] = [
            _Draw(seats=range(turn, turn + 1), gpus=(None,) * each.count)
            for turn, each in zip(turns, meshes, strict=True)
        ]
        return None

    def _draw(self, role: str) -> str | None:
        """Place a role with GPUs; returns the problem if there is one."""
        seats, lender = self._cluster.seats(role), self._settings.of(role).share_with
        uses_gpus = any(self._cluster.hosts[seat].gpus for seat in seats)
        if not seats:
            return self._no_hosts(role)
        if lender is not None and lender not in self._drawn:
            absent = lender not in self._meshes
            return f"hosts.{role}.share_with={lender}: must be a role of the run" if absent else None
        if (problem := self._misstated(role, uses_gpus=uses_gpus)) is not None:
            return problem
        free = (self._free if lender is None else self._lent(lender)) if uses_gpus else None
        draws = self._fit(role, free)
        if draws is None:
            return self._does_not_fit(role, free or [])
        self._drawn[role] = draws
        return None

    def _misstated(self, role: str, *, uses_gpus: bool) -> str | None:
        """The problem with a role's numbers, whatever is free; None: they are fine."""
        setting, meshes, seats = self._settings.of(role), self._meshes[role], self._cluster.seats(role)
        ranks, group, hosts = self._ranks(role), meshes[0].group, self._hosts(role)
        is_ranks, key = f"{RANKS[role]}={ranks}", f"hosts.{role}"
        if setting.gpus is not None and not uses_gpus:
            return f"{key}.gpus={setting.gpus}: must be null, the hosts have no GPUs"
        if setting.gpus is not None and hosts is not None and ranks != hosts * setting.gpus:
            if setting.hosts is None:
                return f"{key}.gpus={setting.gpus}: must divide {is_ranks}"
            return f"{key}: hosts={hosts} * gpus={setting.gpus} must be {is_ranks}"
        if hosts is not None and hosts > len(seats):
            stated = f"hosts={hosts}" if setting.hosts is not None else f"gpus={setting.gpus}"
            return f"{key}.{stated}: needs {hosts} hosts, there are {len(seats)}"
        parts = [range(1)] if hosts is None else _parts(meshes, 0, hosts)
        if not parts:
            if setting.hosts is None:
                return f"{key}.hosts=null: must be a divisor of {is_ranks}, the mesh {role} has {hosts} hosts"
            return f"{key}.hosts={hosts}: must divide {is_ranks}"
        most = max(len(self._cluster.hosts[seat].gpus) for seat in seats) if uses_gpus else group
        together = [min(group, most), meshes[0].count // len(parts[0]), *([setting.gpus] if setting.gpus else [])]
        for count in together:
            if count % group and not (setting.tp_across_hosts and group % count == 0):  # PL-3
                way = "be a multiple of it" if setting.tp_across_hosts else f"set {key}.tp_across_hosts=true"
                return f"{role}.tp={group}: must divide {count}, the ranks on a host, to be within one, or {way}"
        return None

    def _ranks(self, role: str) -> int:
        return sum(each.count for each in self._meshes[role])

    def _hosts(self, role: str) -> int | None:
        """How many hosts a role must have; None: as many as the free GPUs allow."""
        setting, ranks = self._settings.of(role), self._ranks(role)
        if setting.hosts is not None or setting.gpus is not None:
            return setting.hosts or -(-ranks // (setting.gpus or ranks))
        if role not in self._cluster.meshes:
            return None
        return min(len(self._cluster.seats(role)), ranks // self._meshes[role][0].group)

    def _lent(self, lender: str) -> Free:
        """The GPUs of another role, by host, in the order of its ranks."""
        lent: Free = [[] for _ in self._cluster.hosts]
        for draw in self._drawn[lender]:
            for seat, gpu in zip(self._seats_of_ranks(draw), draw.gpus, strict=True):
                if gpu is not None:
                    lent[self._cluster.seats(lender)[seat]].append(gpu)
        return lent

    def _fit(self, role: str, free: Free | None) -> list[_Draw] | None:
        """Places for all meshes of a role, taken from the free GPUs. Takes none and returns None if they do not fit."""
        meshes, count, hosts = self._meshes[role], len(self._cluster.seats(role)), self._hosts(role)
        if hosts is not None:
            for first in range(count - hosts + 1):
                if draws := self._take(role, meshes, _parts(meshes, first, hosts), free):
                    return draws
            return None
        taken: list[_Draw] = []
        left = None if free is None else [list(gpus) for gpus in free]
        for each in meshes:
            windows = (range(first, first + n) for n in range(1, count + 1) for first in range(count - n + 1))
            draws = next(filter(None, (self._take(role, [each], [window], left) for window in windows)), None)
            if draws is None:
                return None
            taken += draws
        if free is not None and left is not None:
            free[:] = left
        return taken

    def _take(
        self, role: str, meshes: Sequence[Processes], parts: Sequence[range], free: Free | None
    ) -> list[_Draw] | None:
        """Places for each of these meshes on its part of the hosts. Takes none and returns None if they do not fit."""
        left = None if free is None else [list(gpus) for gpus in free]
        hosts, across = self._cluster.seats(role), self._settings.of(role).tp_across_hosts
        taken = []
        for each, part in zip(meshes, parts, strict=True):
            per_host, rest = divmod(each.count, len(part))
            if rest or (per_host % each.group and not across):  # PL-1, PL-3
                return None
            gpus: list[Gpu | None] = []
            for seat in part:
                if left is None:
                    gpus += [None] * per_host
                    continue
                host = hosts[seat]
                given, left[host] = left[host][:per_host], left[host][per_host:]  # PL-2
                if len(given) < per_host:
                    return None
                gpus += given
            taken.append(_Draw(seats=part, gpus=tuple(gpus)))
        if free is not None and left is not None:
            free[:] = left
        return taken

    def _seats_of_ranks(self, draw: _Draw) -> list[int]:
        per_host = len(draw.gpus) // len(draw.seats)
        return [seat for seat in draw.seats for _ in range(per_host)]  # PL-1

    def _places(self, each: Processes, draw: _Draw) -> Iterator[Place]:
        hosts, seats = self._cluster.seats(each.role), self._seats_of_ranks(draw)
        for seat, gpu in zip(seats, draw.gpus, strict=True):
            host = self._cluster.hosts[hosts[seat]]
            # vLLM's ranks access each other's GPUs; all other ranks see only their own.
            peers = (
                [gpu] if each.role != "generator" else [g for s, g in zip(seats, draw.gpus, strict=True) if s == seat]
            )
            visible = tuple(peer.name for peer in peers if peer is not None) if host.gpus else None
            yield Place(host=host.name, gpu=gpu, visible=visible, cores=self._cores(each.role, host, gpu))

    def _cores(self, role: str, host: Host, gpu: Gpu | None) -> tuple[int, ...] | None:
        if role in self._settings.bind:
            return tuple(self._settings.bind[role])
        return host.nodes.get(gpu.node) if gpu is not None and gpu.node is not None and len(host.nodes) > 1 else None

    def _no_hosts(self, role: str) -> str:
        meshes = ", ".join(self._cluster.meshes)
        return f"hosts.job={self._settings.job}: must have a mesh named {role} or {POOL}, it has {meshes}"

    def _does_not_fit(self, role: str, free: Free) -> str:
        setting, ranks, hosts = self._settings.of(role), self._ranks(role), self._hosts(role)
        seats = dict.fromkeys(self._cluster.seats(role))
        there = ", ".join(f"{len(free[host])} on {self._cluster.hosts[host].name}" for host in seats if free[host])
        share = f", {ranks / hosts:g} on each of {hosts} hosts in a row" if hosts is not None else ""
        needs = f"{RANKS[role]}={ranks}: needs {ranks} GPUs{share}"
        if setting.share_with is not None:
            return f"hosts.{role}.share_with={setting.share_with}: {needs}, {setting.share_with} has {there or 'none'}"
        return f"{needs}, free are {there or 'none'}; use fewer, or share with a role by hosts.{role}.share_with"

    def _memory_problems(self) -> Iterator[str]:
        users: dict[tuple[int, str], list[str]] = {}
        known: dict[tuple[int, str], Gpu] = {}
        for role, draws in self._drawn.items():
            for draw in draws:
                for seat, gpu in zip(self._seats_of_ranks(draw), draw.gpus, strict=True):
                    if gpu is not None and gpu.gib is not None:
                        device = (self._cluster.seats(role)[seat], gpu.name)
                        known[device] = gpu
                        users.setdefault(device, []).append(role)
        told = set()
        for (host, name), roles in users.items():
            needed, has = sum(self._gib.get(role, 0.0) for role in roles), known[host, name].gib or 0.0
            if needed <= has or tuple(roles) in told:
                continue
            told.add(tuple(roles))
            where = f"GPU {name} of {self._cluster.hosts[host].name} has {has:.1f} GiB"
            if len(roles) == 1:
                yield f"{RANKS[roles[0]]}={self._ranks(roles[0])}: a rank needs {needed:.1f} GiB at least, {where}"
            else:
                parts = " + ".join(f"{self._gib.get(role, 0.0):.1f} of {role}" for role in roles)
                borrower = roles[-1]
                key = f"hosts.{borrower}.share_with={self._settings.of(borrower).share_with}"
                yield f"{key}: together they need {needed:.1f} GiB at least ({parts}), {where}"

    def _core_problems(self) -> Iterator[str]:
        for role, draws in self._drawn.items():
            bound = self._settings.bind.get(role, [])
            for index in dict.fromkeys(self._cluster.seats(role)[seat] for draw in draws for seat in draw.seats):
                host = self._cluster.hosts[index]
                if missing := [core for core in bound if host.cores and core not in host.cores]:
                    yield f"hosts.bind.{role}={bound}: {host.name} has no core {missing[0]} for this run"
                    break


def _parts(meshes: Sequence[Processes], first: int, hosts: int) -> list[range]:
    """The part of so many hosts that each mesh gets, as even as possible; empty if the ranks cannot be divided."""
    if len(meshes) >= hosts and len(meshes) > 1:
        seats = [first + index * hosts // len(meshes) for index in range(len(meshes))]
        return [range(seat, seat + 1) for seat in seats]
    span, rest = divmod(hosts, len(meshes))
    if rest or meshes[0].count % span:
        return []
    return [range(first + index * span, first + (index + 1) * span) for index in range(len(meshes))]
