"""The memory of each host: what all its processes together need there, and whether the host has it.

Beside what ranks always hold (`rank_memory.py`) a reader of weights needs room to fetch them from other hosts, a
generator builds a layer at a time when it loads a model, and the trainer's first rank gathers a file when it saves one.
Files of models that are read are mapped: the system drops those pages when it needs them, so they are not counted.

A host whose memory is known and does not suffice is refused, in one line that says what needs most.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from goaly.base.safetensors_file import MAX_FILE_BYTES
from goaly.models.catalog import shape_of
from goaly.plan.cluster import Cluster
from goaly.plan.placement import Place, Placed, processes
from goaly.plan.rank_memory import DTYPE_BYTES, GIB, RankMemory, transferred_bytes
from goaly.plan.run_config import RunConfig
from goaly.weights.settings import IN_FLIGHT

SHOWN = 4
"""Purposes that a refusal names."""
WOULD_HELP = {
    "prefetch": "weights.spare=device or a larger generator.tp",
    "checkpoint": "the trainer on more hosts",
    "earlier": "a smaller backlog.max_staleness",
    "ring": "fewer weights.slots or the trainer on more hosts",
    "samples": "a smaller backlog.max_staleness",
    "KV": "a smaller generator.kv_cache_gib",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The memory of one host."""

    name: str
    gib: float | None
    """All that it has; None: unknown."""
    parts: Mapping[str, float]
    """The bytes that all ranks of a role there need for a purpose, most first."""

    @property
    def needed_gib(self) -> float:
        """The sum."""
        return sum(self.parts.values()) / GIB

    @property
    def fits(self) -> bool:
        """Whether it has that, as far as the plan knows."""
        return self.gib is None or self.needed_gib <= self.gib

    def __str__(self) -> str:
        """Its needs, beside all that it has."""
        has = "unchecked" if self.gib is None else f"of {self.gib:.1f}"
        return f"{self.needed_gib:.1f} GiB ({has}): {_shown(self.parts)}"


def host_memory(
    config: RunConfig,
    memory: Mapping[str, tuple[RankMemory, ...]],
    places: Mapping[str, Placed],
    cluster: Cluster,
) -> list[HostMemory]:
    """By host of the cluster, the memory that the run needs there."""
    needed: list[Counter[str]] = [Counter() for _ in cluster.hosts]
    writers = Counter(place.host_index for place in places["trainer"].ranks) if "trainer" in places else Counter()
    roles = {each.name: each.role for each in processes(config)}
    for name, rank, place in _placed_ranks(places):
        role, host = roles[name], needed[place.host_index]
        one = next((one for one in memory.get(role, ()) if rank in one.ranks), None)
        if one is None:
            continue
        parts = Counter(one.on_host)
        if place.gpu is None:
            parts.update(one.on_device)
        if role == "generator" or (role == "reference" and config.reference.refresh_every is not None):
            elsewhere = writers.total() - writers[place.host_index]
            parts.update(_fetching(config, one, elsewhere, writers.total()))
        if role == "generator":
            later = sum(size for part, size in parts.items() if part != "weights")  # what it does not hold yet
            parts["load"] = max(0.0, _largest_layer(config) - later)
        if (name, rank) == ("trainer", 0):
            parts["save"] = _saved(config)
        for part, size in parts.items():
            host[f"{role} {part}"] += size
    return [
        HostMemory(name=host.name, gib=host.gib, parts=dict(parts.most_common()))
        for host, parts in zip(cluster.hosts, needed, strict=True)
    ]


def problems(hosts: list[HostMemory], *, imagined: bool) -> Iterator[str]:
    """One line for each host whose memory does not suffice; equal hosts share one."""
    told = set()
    for host in hosts:
        if host.fits or (kind := (host.gib, tuple(host.parts.items()))) in told:
            continue
        told.add(kind)
        key = f"hosts.imagine.host_gib={host.gib:g}" if imagined else f"host {host.name} has {host.gib:.1f} GiB"
        most = next(iter(host.parts)).split(" ")[-1]
        help_ = f"; {WOULD_HELP[most]} would take less" if most in WOULD_HELP else ""
        yield (
            f"{key}: must be at least {host.needed_gib:.1f}, the GiB of memory that the processes on {host.name} need "
            f"({_shown(host.parts)}){help_}"
        )


def lines(hosts: list[HostMemory]) -> Iterator[str]:
    """A line for each host, or for several in a row that need the same."""
    alike: dict[str, list[str]] = defaultdict(list)
    for host in hosts:
        alike[str(host)].append(host.name)
    for text, names in alike.items():
        yield f"memory of {names[0]}{f' and {len(names) - 1} others like it' if len(names) > 1 else ''}: {text}"
    if any(host.gib is None for host in hosts):
        yield "hosts.imagine.host_gib=null: memory of hosts is not checked"


def _placed_ranks(places: Mapping[str, Placed]) -> Iterator[tuple[str, int, Place]]:
    return ((name, rank, place) for name, placed in places.items() for rank, place in enumerate(placed.ranks))


def _fetching(config: RunConfig, one: RankMemory, elsewhere: int, writers: int) -> dict[str, float]:
    """The memory in which a rank receives weights from trainer ranks on other hosts: a few buckets for each of them."""
    weights = config.weights
    if weights.transport == "torchstore":
        return {"landing": _published(config, one)}
    elsewhere = writers if weights.transport == "rdma" else elsewhere
    return {"landing": IN_FLIGHT * weights.bucket_bytes * elsewhere} if elsewhere else {}


def _published(config: RunConfig, one: RankMemory) -> float:
    """The bytes of all published weights that a rank needs."""
    return one.fetched * transferred_bytes(config) / DTYPE_BYTES[config.model.dtype]


def _largest_layer(config: RunConfig) -> float:
    """The bytes of the largest layer of the model's folder."""
    layers: Counter[str] = Counter()
    for parameter in shape_of(config.model).parameters():
        layers[".".join(parameter.name.split(".")[:2])] += parameter.elements
    return DTYPE_BYTES[config.model.dtype] * max(layers.values())


def _saved(config: RunConfig) -> float:
    """The bytes of a file and a block, with which a model is saved."""
    shape = shape_of(config.model)
    if config.trainer.lora is not None and config.trainer.lora.save == "adapter":
        return 4 * config.trainer.lora.elements(shape)
    return min(MAX_FILE_BYTES, 4 * shape.elements) + 4 * _largest_layer(config) / DTYPE_BYTES[config.model.dtype]


def _shown(parts: Mapping[str, float]) -> str:
    most = [(part, size) for part, size in parts.items() if size >= GIB / 100][:SHOWN]
    rest = sum(parts.values()) - sum(size for _, size in most)
    shown = [f"{part} {size / GIB:.1f}" for part, size in most]
    return ", ".join([*shown, f"rest {rest / GIB:.1f}"])
