"""Which processes a run has, and which host, GPU and cores each gets. Pure functions of the settings and the cluster.

Every rank is placed once. The ranks of a mesh are in order, with equally many on each of its hosts. No GPU is given to
two ranks of a role, nor to two roles, unless one of them has `share_with`. The ranks of a tensor-parallel group are on
one host, unless `tp_across_hosts` is set. A placement that does not fit is refused with one line for each problem,
which names the settings. The roles of a GPU leave `HEADROOM` of its memory free.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from goaly.base.errors import ConfigError
from goaly.plan.cluster import POOL, Cluster, Gpu
from goaly.plan.host_settings import COMPUTING, ROLES, HostSettings, RolePlacement
from goaly.plan.run_config import RunConfig
from goaly.train.settings import AXES, CriticSettings, ReferenceSettings, TrainerSettings
from goaly.weights.settings import HEADROOM

RANKS = {role: " * ".join(f"{role}.{axis}" for axis in AXES) for role in COMPUTING} | {
    "generator": "generator.replicas * generator.tp"
}
"""The settings that make the ranks of each role."""

IMPORTS = {
    "hub": ("goaly.weights.store", "goaly.journal.logged_queue", "goaly.reward.pool_actor"),
    "trainer": (
        "goaly.train.trainer",
        "goaly.train.rank_thread",
        "goaly.train.parallel_model",
        "goaly.losses.objective",
    ),
    "reference": ("goaly.train.reference", "goaly.train.parallel_model"),
    "critic": ("goaly.train.critic", "goaly.train.value_head", "goaly.train.parallel_model"),
    "generator": ("goaly.generate.generator", "goaly.generate.vllm_engine", "goaly.weights.subscriber"),
    "rollout": ("goaly.rollout.rollout_worker",),
    "endpoint": ("goaly.rollout.rollout_worker", "goaly.agents.routes"),
}
"""The modules that the actors of a role import, and rollout workers with an endpoint. Their processes start with these
imports, before actors are spawned."""

Device = tuple[int, Gpu]
"""A GPU, and the index of its host in the cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """A mesh of processes, which are spawned together."""

    name: str
    role: str
    count: int = 1
    threads: int = 1
    group: int = 1
    """Ranks of a tensor-parallel group, which have consecutive numbers."""
    imports: str = ""
    """The key of the modules that they import (`IMPORTS`, `FORKED`); empty: their role is."""

    @property
    def libraries(self) -> str:
        """The key of what they import."""
        return self.imports or self.role


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
    imports = "" if config.rollout.endpoint is None else "endpoint"
    for worker in range(config.rollout.workers):
        yield Processes(name=f"rollout-{worker}", role="rollout", imports=imports)


def _ranks(role: str, settings: TrainerSettings | ReferenceSettings | CriticSettings) -> Processes:
    return Processes(name=role, role=role, count=settings.ranks, threads=settings.threads, group=settings.tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of one rank."""

    host: str

    host_index: int
    """The index of the host in the cluster."""

    gpu: Gpu | None
    """The GPU that it computes on; None where it has none."""

    visible: tuple[str, ...] | None
    """The GPUs that its process sees, as CUDA_VISIBLE_DEVICES names them; None on a host without GPUs."""

    cores: tuple[int, ...] | None
    """The cores that it may use; None for every core."""


ANYWHERE = Place(host="", host_index=0, gpu=None, visible=None, cores=None)
"""The place of a process that needs no GPU or cores of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The places of a mesh of processes."""

    seats: range
    """Positions in the role's mesh of hosts, with equally many ranks on each."""

    ranks: tuple[Place, ...]


def place(
    processes: Sequence[Processes],
    settings: HostSettings,
    cluster: Cluster,
    gib: Mapping[str, float] | None = None,
    advice: Mapping[str, str] | None = None,
) -> dict[str, Placed]:
    """The places of every mesh of processes, by name. ConfigError with a line for each problem.

    `gib` has the GPU memory that a rank of each role needs at least. It is checked if a GPU's memory is known.
    `advice` says by role what would fit, if it does not.
    """
    return _Planner(processes, settings, cluster, gib or {}, advice or {}).place_all()


class _Planner:
    def __init__(
        self,
        processes: Sequence[Processes],
        settings: HostSettings,
        cluster: Cluster,
        gib: Mapping[str, float],
        advice: Mapping[str, str],
    ):
        self._settings = settings
        self._cluster = cluster
        self._gib = gib
        self._advice = advice
        self._meshes: dict[str, list[Processes]] = {}
        for each in processes:
            self._meshes.setdefault(each.role, []).append(each)
        self._free = [(index, gpu) for index, host in enumerate(cluster.hosts) for gpu in host.gpus]
        self._placed: dict[str, list[Placed]] = {}

    def place_all(self) -> dict[str, Placed]:
        """The placement of all processes; ConfigError if something does not fit."""
        problems = [
            f"hosts.{role}: has no effect, the run has no {role}"
            for role in COMPUTING
            if role not in self._meshes and self._settings.of(role) != RolePlacement()
        ]
        for role in sorted(self._meshes, key=lambda role: (self._lenders(role), ROLES.index(role))):
            if (problem := self._place(role)) is not None:
                problems.append(problem)
        problems += [*self._memory_problems(), *self._core_problems()]
        if problems:
            raise ConfigError(problems)
        return {
            each.name: placed
            for role, of_role in self._placed.items()
            for each, placed in zip(self._meshes[role], of_role, strict=True)
        }

    def _lenders(self, role: str) -> int:
        """How many roles must be placed before this one, which shares their GPUs."""
        lender = self._settings.of(role).share_with if role in COMPUTING else None
        return 0 if lender is None else 1 + self._lenders(lender)

    def _place(self, role: str) -> str | None:
        """Place a role; returns the problem if there is one."""
        if not self._cluster.seats(role):
            meshes = ", ".join(self._cluster.meshes)
            return f"hosts.job={self._settings.job}: must have a mesh named {role} or {POOL}, it has {meshes}"
        return self._place_on_gpus(role) if role in COMPUTING else self._place_in_turns(role)

    def _place_in_turns(self, role: str) -> str | None:
        """Place a role without GPUs on hosts in turns; returns the problem if there is one."""
        seats, meshes = self._cluster.seats(role), self._meshes[role]
        across = (self._settings.rollout.hosts if role == "rollout" else None) or len(seats)
        if across > len(seats):
            return f"hosts.rollout.hosts={across}: must be at most {len(seats)}, the hosts there are"
        turns = [range(index % across, index % across + 1) for index in range(len(meshes))]
        self._placed[role] = self._taken(role, meshes, turns, None) or []
        return None

    def _place_on_gpus(self, role: str) -> str | None:
        """Place a role with GPUs, if the hosts have any; returns the problem if there is one."""
        lender = self._settings.of(role).share_with
        uses_gpus = any(self._cluster.hosts[index].gpus for index in self._cluster.seats(role))
        if lender is not None and lender not in self._placed:
            absent = lender not in self._meshes
            return f"hosts.{role}.share_with={lender}: must be a role of the run" if absent else None
        if (problem := self._misstated(role, uses_gpus=uses_gpus)) is not None:
            return problem
        free = self._free if lender is None else _devices(self._placed[lender])
        placed = self._fit(role, free if uses_gpus else None)
        if placed is None:
            return self._does_not_fit(role, free)
        self._placed[role] = placed
        self._free = _without(self._free, placed)
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
            if count % group and not (setting.tp_across_hosts and group % count == 0):
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

    def _fit(self, role: str, free: Sequence[Device] | None) -> list[Placed] | None:
        """Places for all meshes of a role, on these GPUs if the hosts have any; None if they do not fit."""
        meshes, count, hosts = self._meshes[role], len(self._cluster.seats(role)), self._hosts(role)
        if hosts is not None:
            choices = (_parts(meshes, first, hosts) for first in range(count - hosts + 1))
            return next(filter(None, (self._taken(role, meshes, parts, free) for parts in choices)), None)
        windows = [range(first, first + n) for n in range(1, count + 1) for first in range(count - n + 1)]
        placed: list[Placed] = []
        for each in meshes:
            left = None if free is None else _without(free, placed)
            found = next(filter(None, (self._taken(role, [each], [window], left) for window in windows)), None)
            if found is None:
                return None
            placed += found
        return placed

    def _taken(
        self, role: str, meshes: Sequence[Processes], parts: Sequence[range], free: Sequence[Device] | None
    ) -> list[Placed] | None:
        """Places for each of these meshes on its part of the hosts; None if they do not fit."""
        hosts, placed = self._cluster.seats(role), []
        left = {host: iter([gpu for at, gpu in free or () if at == host]) for host in hosts}
        for each, part in zip(meshes, parts, strict=True):
            per_host, rest = divmod(each.count, len(part))
            if rest or (per_host % each.group and not self._settings.of(role).tp_across_hosts):
                return None
            ranks: list[Place] = []
            for host in (hosts[seat] for seat in part):
                gpus = [None] * per_host if free is None else list(islice(left[host], per_host))
                if len(gpus) < per_host:
                    return None
                ranks += self._places(role, host, gpus)
            placed.append(Placed(seats=part, ranks=tuple(ranks)))
        return placed

    def _places(self, role: str, index: int, gpus: Sequence[Gpu | None]) -> Iterator[Place]:
        """The places of ranks with these GPUs on one host."""
        host, bound = self._cluster.hosts[index], self._settings.bind.get(role)
        for gpu in gpus:
            near = None if gpu is None or gpu.node is None or len(host.nodes) < 2 else host.nodes.get(gpu.node)
            # vLLM's ranks access each other's GPUs; all other ranks see only their own.
            seen = tuple(peer.name for peer in (gpus if role == "generator" else [gpu]) if peer is not None)
            yield Place(
                host=host.name,
                host_index=index,
                gpu=gpu,
                visible=seen if host.gpus else None,
                cores=near if bound is None else tuple(bound),
            )

    def _does_not_fit(self, role: str, free: Sequence[Device]) -> str:
        setting, ranks, hosts = self._settings.of(role), self._ranks(role), self._hosts(role)
        counts = Counter(host for host, _ in free)
        seats = dict.fromkeys(self._cluster.seats(role))
        there = ", ".join(f"{counts[host]} on {self._cluster.hosts[host].name}" for host in seats if counts[host])
        share = f", {ranks / hosts:g} on each of {hosts} hosts in a row" if hosts is not None else ""
        needs = f"{RANKS[role]}={ranks}: needs {ranks} GPUs{share}"
        if setting.share_with is not None:
            return f"hosts.{role}.share_with={setting.share_with}: {needs}, {setting.share_with} has {there or 'none'}"
        return f"{needs}, free are {there or 'none'}; use fewer, or share with a role by hosts.{role}.share_with"

    def _memory_problems(self) -> Iterator[str]:
        users: dict[Device, list[str]] = {}
        for role, placed in self._placed.items():
            for device in _devices(placed):
                users.setdefault(device, []).append(role)
        told = set()
        for (host, gpu), roles in users.items():
            needed = sum(self._gib.get(role, 0.0) for role in roles)
            if gpu.gib is None or needed <= (1 - HEADROOM) * gpu.gib or tuple(roles) in told:
                continue
            told.add(tuple(roles))
            advice = "".join(f"; {self._advice[role]}" for role in roles if role in self._advice)
            free = f"{HEADROOM * gpu.gib:.1f} free for the libraries and their buffers"
            where = f"and {free}, GPU {gpu.name} of {self._cluster.hosts[host].name} has {gpu.gib:.1f} GiB{advice}"
            if len(roles) == 1:
                yield f"{RANKS[roles[0]]}={self._ranks(roles[0])}: a rank needs {needed:.1f} GiB {where}"
            else:
                parts = " + ".join(f"{self._gib.get(role, 0.0):.1f} of {role}" for role in roles)
                borrower = roles[-1]
                key = f"hosts.{borrower}.share_with={self._settings.of(borrower).share_with}"
                yield f"{key}: together they need {needed:.1f} GiB ({parts}) {where}"

    def _core_problems(self) -> Iterator[str]:
        for role, placed in self._placed.items():
            bound = self._settings.bind.get(role, [])
            for index in dict.fromkeys(place.host_index for each in placed for place in each.ranks):
                host = self._cluster.hosts[index]
                if missing := [core for core in bound if host.cores and core not in host.cores]:
                    yield f"hosts.bind.{role}={bound}: {host.name} has no core {missing[0]} for this run"
                    break


def _devices(placed: Iterable[Placed]) -> list[Device]:
    """The GPUs of these ranks, in their order."""
    return [(place.host_index, place.gpu) for each in placed for place in each.ranks if place.gpu is not None]


def _without(devices: Iterable[Device], placed: Iterable[Placed]) -> list[Device]:
    """The devices that these ranks do not use."""
    used = set(_devices(placed))
    return [device for device in devices if device not in used]


def _parts(meshes: Sequence[Processes], first: int, hosts: int) -> list[range]:
    """The hosts that each mesh gets, as even as possible; empty if the ranks cannot be divided."""
    if len(meshes) >= hosts and len(meshes) > 1:
        seats = [first + index * hosts // len(meshes) for index in range(len(meshes))]
        return [range(seat, seat + 1) for seat in seats]
    span, rest = divmod(hosts, len(meshes))
    if rest or meshes[0].count % span:
        return []
    return [range(first + index * span, first + (index + 1) * span) for index in range(len(meshes))]
