"""Hosts with their GPUs, cores and NUMA nodes: those of this machine, or imagined ones for a dry run."""

import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from goaly.plan.host_settings import ImaginedCluster

POOL = "hosts"
"""The mesh of a job whose hosts are shared by all roles without a mesh of their own."""

QUERY = ("nvidia-smi", "--query-gpu=index,uuid,pci.bus_id,memory.total", "--format=csv,noheader,nounits")
QUERY_SECONDS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device of a host."""

    name: str
    """As in CUDA_VISIBLE_DEVICES: a number or a UUID."""

    node: int | None = None
    """The NUMA node that it is attached to; None: unknown."""

    gib: float | None = None
    """Its memory in GiB; None: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine."""

    name: str
    gpus: tuple[Gpu, ...] = ()
    nodes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Cores by NUMA node; empty if unknown."""
    gib: float | None = None
    """Its memory in GiB, without that of GPUs; None: unknown."""

    @property
    def cores(self) -> frozenset[int]:
        """All cores; empty if unknown."""
        return frozenset(core for cores in self.nodes.values() for core in cores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The hosts of a job."""

    hosts: tuple[Host, ...]

    meshes: Mapping[str, tuple[int, ...]]
    """For each mesh of the job, the index of the host at each position. Two positions may be the same host."""

    def seats(self, role: str) -> tuple[int, ...]:
        """The indices of the hosts that a role may use, in the order of its mesh."""
        return self.meshes.get(role, self.meshes.get(POOL, ()))


def one_host(host: Host) -> Cluster:
    """A cluster of this host alone."""
    return Cluster(hosts=(host,), meshes={POOL: (0,)})


def imagined(settings: ImaginedCluster) -> Cluster:
    """The cluster of `hosts.imagine`: equal hosts, and NUMA nodes with equal shares of GPUs and cores."""
    meshes = settings.meshes or {POOL: settings.hosts}
    cores = range(settings.cores or 0)
    bounds = [node * len(cores) // settings.numa for node in range(settings.numa + 1)]
    nodes = {node: tuple(cores[first:end]) for node, (first, end) in enumerate(pairwise(bounds))} if cores else {}
    gpus = tuple(
        Gpu(name=str(index), node=index * settings.numa // settings.gpus if nodes else None, gib=settings.gpu_gib)
        for index in range(settings.gpus)
    )
    hosts = tuple(
        Host(name=f"host-{index}", gpus=gpus, nodes=nodes, gib=settings.host_gib)
        for index in range(sum(meshes.values()))
    )
    numbers = iter(range(len(hosts)))
    return Cluster(hosts=hosts, meshes={mesh: tuple(next(numbers) for _ in range(n)) for mesh, n in meshes.items()})


def this_machine() -> Host:
    """This process's host, with the GPUs and cores that this process may use."""
    import torch

    count = torch.cuda.device_count()  # asks the driver's management library, so CUDA is not initialized
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in visible.split(",")][:count] if visible else [str(n) for n in range(count)]
    known = dict(_described(_nvidia_smi())) if count else {}
    return Host(
        name=socket.gethostname(),
        gpus=tuple(known.get(name, Gpu(name=name)) for name in names),
        nodes=numa_nodes(frozenset(os.sched_getaffinity(0))),
        gib=memory_gib(),
    )


def numa_nodes(allowed: frozenset[int], folder: Path = Path("/sys/devices/system/node")) -> dict[int, tuple[int, ...]]:
    """The allowed cores by NUMA node; all of them as node 0 if the system does not tell."""
    lists = {int(path.parent.name[len("node") :]): path.read_text() for path in folder.glob("node[0-9]*/cpulist")}
    nodes = {node: tuple(core for core in numbers(text) if core in allowed) for node, text in sorted(lists.items())}
    return {node: cores for node, cores in nodes.items() if cores} or {0: tuple(sorted(allowed))}


def memory_gib(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The memory that this process may use at most: its machine's, or less if a control group limits it; None if the
    system does not tell."""
    known = proc / "meminfo"
    if not known.is_file():
        return None
    least = int(known.read_text().partition("MemTotal:")[2].split()[0]) / (1 << 20)  # it counts in KiB
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        folder, limit = (groups, "memory.max") if not controllers else (groups / "memory", "memory.limit_in_bytes")
        if controllers and "memory" not in controllers.split(","):
            continue
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts) + 1):
            file = folder.joinpath(*parts[:depth], limit)
            if file.is_file() and (text := file.read_text().strip()).isdigit():
                least = min(least, int(text) / (1 << 30))
    return least


def numbers(text: str) -> list[int]:
    """The numbers of a list such as `0-3,8`."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _described(table: str, pci: Path = Path("/sys/bus/pci/devices")) -> Iterator[tuple[str, Gpu]]:
    """The GPUs in nvidia-smi's output, each by its number and by its UUID."""
    for line in table.splitlines():
        index, uuid, bus, mebibytes = (cell.strip() for cell in line.split(","))
        domain, _, rest = bus.lower().partition(":")
        address = f"{int(domain, 16):04x}:{rest}"  # as sysfs writes it
        node = pci / address / "numa_node"
        number = int(node.read_text()) if node.is_file() else -1  # -1: the system does not know
        gib = int(mebibytes) / 1024 if mebibytes.isdigit() else None
        for name in (index, uuid):
            yield name, Gpu(name=name, node=number if number >= 0 else None, gib=gib)


def _nvidia_smi() -> str:
    try:
        return subprocess.run(QUERY, capture_output=True, text=True, check=True, timeout=QUERY_SECONDS).stdout
    except (OSError, subprocess.SubprocessError):
        return ""  # GPUs work without it, but their memory and NUMA nodes are unknown
