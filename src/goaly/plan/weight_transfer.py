"""Plans one update of a model's weights on paper: the bytes between each pair of ranks, and the least time.

    python -m goaly.plan.weight_transfer --model qwen3-235b-a22b --trainer fsdp=32,ep=8 --generator tp=8,replicas=4

It runs the real planner on shapes alone, with the buckets that writers cut for readers that joined in time. Reads from
another host are counted in whole buckets, copies within one in the rectangles that are needed. Trainer ranks are
numbered first, then generator ranks; each `--ranks-per-host` of them share a host. Times are lower bounds: every rank's
network card sends and receives at full speed at the same time, every rank copies within its host at the memory's
speed, and nothing else takes time.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

import torch

from goaly.base.errors import ConfigError
from goaly.models.catalog import MODELS
from goaly.plan.parallelism import Parallelism
from goaly.weights.buckets import cut, distinct, needs_of
from goaly.weights.layout import Layout
from goaly.weights.reshard_plan import Copy, plan, share
from goaly.weights.settings import MIB, WeightSettings

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """How many ranks share a host, and the speed between ranks."""

    ranks_per_host: int
    nic_gbps: float
    """Gigabits a second of one rank's network card, each way."""
    memory_gbps: float
    """Gigabits a second at which one rank copies within its host."""

    def host(self, rank: int) -> int:
        """The host of a rank, with trainer and generator ranks numbered together."""
        return rank // self.ranks_per_host

    def problems(self) -> list[str]:
        """The values that can't work, a line each."""
        sizes = {"ranks-per-host": self.ranks_per_host, "nic-gbps": self.nic_gbps, "memory-gbps": self.memory_gbps}
        return [f"--{name}={size:g}: must be above 0" for name, size in sizes.items() if size <= 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The reads of one generator rank from one trainer rank."""

    trainer: int
    generator: int
    in_host: bool
    bytes: int
    """Bytes that move: across hosts, those of whole buckets."""
    needed: int
    """Bytes among them that the generator needs."""
    messages: int
    """Buckets across hosts, rectangles to copy within one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Bytes of all ranks of one side."""

    total: int
    largest: int
    even: float
    """The mean of all ranks."""

    @property
    def imbalance(self) -> float:
        """The largest as a multiple of the mean."""
        return self.largest / self.even if self.even else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One update on paper."""

    model: str
    trainer: str
    generator: str
    dtype: str
    parameters: int
    tensors: int
    staged: Load
    sent: Load
    received: Load
    stage_seconds: float
    pull_seconds: float
    slowest: str
    """The rank and resource that take the longest."""
    read_over_needed: float
    """Bytes read across hosts, as a multiple of the needed ones."""
    links: list[Link]


def plan_transfer(
    model: str,
    trainer: Parallelism,
    generator: Parallelism,
    network: Network,
    dtype: str,
    bucket_bytes: int = WeightSettings().bucket_bytes,
) -> Update:
    """Plan one update of the model from the trainer's ranks to all replicas of the generator."""
    parameters = MODELS[model].parameters()
    layouts = [trainer.layout(parameters, rank, DTYPES[dtype]) for rank in range(trainer.ranks)]
    shares = share(layouts)
    replica_ranks = generator.fsdp * generator.tp
    destinations = [generator.layout(parameters, rank, DTYPES[dtype]) for rank in range(replica_ranks)]
    writers = _cut(shares, destinations, generator.replicas, network, bucket_bytes)
    layouts = [writer.layout for writer in writers]
    links: list[Link] = []
    for rank, destination in enumerate(destinations):
        copies = plan(layouts, destination)
        for replica in range(generator.replicas):  # all hold the same, so all have the same plan
            links.extend(_links(writers, copies, replica * replica_ranks + rank, network))
    staged = _load([sum(shard.bytes for shard in mine) for mine in shares])
    pull_seconds, slowest = _pull(links, network)
    read, needed = (sum(getattr(link, of) for link in links if not link.in_host) for of in ("bytes", "needed"))
    return Update(
        model=model,
        trainer=str(trainer),
        generator=str(generator),
        dtype=dtype,
        parameters=sum(parameter.elements for parameter in parameters),
        tensors=len(parameters),
        staged=staged,
        sent=_load(_sums(links, "trainer", trainer.ranks)),
        received=_load(_sums(links, "generator", generator.ranks)),
        stage_seconds=staged.largest * 8e-9 / network.memory_gbps,
        pull_seconds=pull_seconds,
        slowest=slowest,
        read_over_needed=read / needed if needed else 1.0,
        links=links,
    )


class _WriterBuckets:
    """One trainer rank's pieces, by bucket."""

    def __init__(self, layout: Layout, buckets: Sequence[range]):
        self.layout = layout
        self.bucket_of = {piece: number for number, bucket in enumerate(buckets) for piece in bucket}
        self.bytes = [sum(layout[piece].bytes for piece in bucket) for bucket in buckets]


def _cut(
    shares: Sequence[Layout], destinations: Sequence[Layout], replicas: int, network: Network, bucket_bytes: int
) -> list[_WriterBuckets]:
    """Each trainer rank's share, cut for the generator ranks on other hosts."""
    needs = [needs_of(destination) for destination in destinations]
    writers = []
    for trainer, layout in enumerate(shares):
        numbers = range(replicas * len(needs))
        elsewhere = {
            number % len(needs) for number in numbers if network.host(len(shares) + number) != network.host(trainer)
        }
        told = distinct(needs[rank] for rank in sorted(elsewhere))
        writers.append(_WriterBuckets(*cut(layout, bucket_bytes, told)))
    return writers


def _links(writers: Sequence[_WriterBuckets], copies: Sequence[Copy], generator: int, network: Network) -> list[Link]:
    """The links of one generator rank."""
    host = network.host(len(writers) + generator)
    by_trainer: dict[int, list[Copy]] = defaultdict(list)
    for copy in copies:
        by_trainer[copy.source].append(copy)
    links = []
    for trainer, mine in by_trainer.items():
        writer, in_host = writers[trainer], network.host(trainer) == host
        needed = sum(prod(copy.shape) * writer.layout[copy.source_shard].dtype.itemsize for copy in mine)
        buckets = {writer.bucket_of[copy.source_shard] for copy in mine}
        link = Link(
            trainer=trainer,
            generator=generator,
            in_host=in_host,
            bytes=needed if in_host else sum(writer.bytes[bucket] for bucket in buckets),
            needed=needed,
            messages=len(mine) if in_host else len(buckets),
        )
        links.append(link)
    return links


def _sums(links: Sequence[Link], side: str, ranks: int) -> list[int]:
    """Bytes of each rank of one side."""
    sums = [0] * ranks
    for link in links:
        sums[getattr(link, side)] += link.bytes
    return sums


def _load(sums: Sequence[int]) -> Load:
    return Load(total=sum(sums), largest=max(sums), even=sum(sums) / len(sums))


def _pull(links: Sequence[Link], network: Network) -> tuple[float, str]:
    """The time of the busiest rank for its bytes, and which rank that is."""
    busy: dict[tuple[str, int, str], float] = defaultdict(float)
    for link in links:
        seconds = link.bytes * 8e-9 / (network.memory_gbps if link.in_host else network.nic_gbps)
        if link.in_host:
            busy["generator", link.generator, "memory"] += seconds
        else:
            busy["trainer", link.trainer, "network card, out"] += seconds
            busy["generator", link.generator, "network card, in"] += seconds
    (side, rank, what), seconds = max(busy.items(), key=lambda one: one[1])
    return seconds, f"{side} rank {rank}'s {what}"


def report(update: Update) -> str:
    """The update as a table."""
    lines = [
        f"model      {update.model}: {update.parameters / 1e9:.1f} B parameters in {update.tensors} tensors, "
        f"{update.dtype}",
        f"trainer    {update.trainer}: {_loads(update.staged)} staged, {_loads(update.sent)} sent",
        f"generator  {update.generator}: {_loads(update.received)} received",
    ]
    for in_host, where in ((True, "in-host"), (False, "cross-host")):
        links = [link for link in update.links if link.in_host == in_host]
        if links:
            total, largest = sum(link.bytes for link in links), max(link.bytes for link in links)
            lines.append(
                f"{where:10s} {len(links)} links, {_size(total)}: {_size(total / len(links))} a link, "
                f"{_size(largest)} at most; {sum(link.messages for link in links):,} "
                + ("copies" if in_host else f"buckets, {update.read_over_needed:.2f} x what is needed")
            )
    lines.append(
        f"seconds    {update.stage_seconds:.3f} to stage, {update.pull_seconds:.3f} to pull ({update.slowest})"
    )
    return "\n".join(lines)


def _loads(load: Load) -> str:
    return f"{_size(load.largest)} a rank at most ({load.imbalance:.3f} x even)"


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


def parallelism(text: str) -> Parallelism:
    """Parse `fsdp=32,ep=8`; raises a ConfigError that names anything wrong."""
    known = tuple(Parallelism.__dataclass_fields__)
    sizes = {}
    for item in text.split(","):
        axis, _, size = item.strip().partition("=")
        if axis not in known or axis in sizes or not size.isdecimal():
            raise ConfigError([f"{item}: must be one of {', '.join(known)}, once, with a number, as in fsdp=32,ep=8"])
        sizes[axis] = int(size)
    return Parallelism(**sizes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, plan, print the table."""
    parser = argparse.ArgumentParser(prog="python -m goaly.plan.weight_transfer", description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, choices=sorted(MODELS))
    parser.add_argument(
        "--trainer", required=True, help="axes of its ranks, as fsdp=32,ep=8 or replicas=2,fsdp=16,tp=2"
    )
    parser.add_argument("--generator", required=True, help="axes of its ranks, as tp=8,replicas=4 or tp=8,ep=8")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES), help="what weights are sent as")
    parser.add_argument("--bucket-mib", type=float, default=WeightSettings().bucket_mib, help="weights.bucket_mib")
    parser.add_argument("--ranks-per-host", type=int, default=8)
    parser.add_argument("--nic-gbps", type=float, default=400.0, help="gigabits a second of a rank's network card")
    parser.add_argument("--memory-gbps", type=float, default=400.0, help="gigabits a second of a rank's copies in-host")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it, each link included")
    chosen = parser.parse_args(arguments)
    network = Network(ranks_per_host=chosen.ranks_per_host, nic_gbps=chosen.nic_gbps, memory_gbps=chosen.memory_gbps)
    try:
        trainer, generator = parallelism(chosen.trainer), parallelism(chosen.generator)
        parameters = MODELS[chosen.model].parameters()
        problems = [
            *trainer.problems("--trainer ", parameters),
            *generator.problems("--generator ", parameters),
            *network.problems(),
        ]
        if chosen.bucket_mib <= 0:
            problems.append(f"--bucket-mib={chosen.bucket_mib:g}: must be above 0")
        if problems:
            raise ConfigError(problems)
    except ConfigError as error:
        parser.error(str(error))
    update = plan_transfer(chosen.model, trainer, generator, network, chosen.dtype, int(chosen.bucket_mib * MIB))
    print(report(update))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(asdict(update), indent=1))


if __name__ == "__main__":
    main()
