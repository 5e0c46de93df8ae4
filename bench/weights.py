"""Measures updates of the weights against plain copies of the same bytes by as many processes and threads.

    python -m bench.weights [--gb X[,Y…] | --model NAME] [--src fsdp=2] [--dst tp=2,replicas=2]
                            [--transport …] [--json FILE]

With `--gb` the weights are matrices of one shape in float32, with `--model` a known model's parameters in bfloat16.

Each trainer rank and each reader rank is a process, over a real store. Every update has these parts, in turn: all
trainer ranks stage (`stage`), then copy the same bytes within their memory (`memcpy`); all readers pull, then copy
theirs; all readers apply. Then follows an update as in a run, whose readers wait for the version:
`publish_to_applied` is the time from the start of the staging to the last reader's apply, `committed_to_applied` the
time from the end of the staging. All numbers are medians.

With `--transport rdma` the readers count as processes of another host and pull over Monarch's RDMABuffer, or TCP
without such hardware. In alternation, the same bytes are read with RDMABuffer alone.

`--transport torchstore` alternates an update over shared memory with TorchStore's put and get of the same state dict:
`update` is the time from the start of the publish to the last reader's apply, `blocked` its part in which trainer or
reader can't work (the publish and the apply), `torchstore` the slowest rank's put plus the slowest reader's get.
TorchStore must be installed. `--keys N` divides the same bytes into at least N matrices.

A reader of a matrix's columns copies a piece of each row, which is slower than a plain copy, the more so the shorter
the rows are. `--row-kib` is the rows' length: 8 for an 8B model's attention output in bfloat16, 4 for a 0.6B model's.
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from monarch.actor import this_host
from rich.console import Console
from rich.table import Table

from bench.weights_rank import Rank
from goaly.models.architecture import Parameter
from goaly.models.catalog import MODELS
from goaly.run.rendezvous import rendezvous
from goaly.weights import torchstore
from goaly.weights.settings import WeightSettings
from goaly.weights.store import WeightStore

ELEMENTS = 1 << 21
"""Elements of a matrix; fewer if that would make fewer than `--keys` matrices."""
WARM_UPDATES = 1
LEAD_SECONDS = 0.02
"""All ranks of a measurement begin at the same moment, this long after the call."""
ELSEWHERE = "another host"


class Bench:
    """The processes, and their measurements."""

    def __init__(self, trainer: Any, replicas: list[Any], store_mesh: Any, host: str | None = None):
        self._trainer = trainer
        self._replicas = replicas
        self._store_mesh = store_mesh
        self._host = host
        self.taken: dict[str, list[float]] = {}

    async def open(self) -> None:
        """Connect all ranks to a new store."""
        settings = WeightSettings()
        store = self._store_mesh.spawn("store", WeightStore, settings)
        await self._trainer.write_to.call(store, settings)
        await asyncio.gather(*(replica.read_from.call(store, settings, self._host) for replica in self._replicas))

    async def close(self) -> None:
        """Disconnect all ranks."""
        await asyncio.gather(*(mesh.leave.call() for mesh in (*self._replicas, self._trainer)))

    async def updates(self, count: int) -> None:
        """Measure this many updates."""
        for version in range(2 * (count + WARM_UPDATES)):
            taken = await (self._in_turns(version) if version % 2 else self._as_in_a_run(version))
            if version >= 2 * WARM_UPDATES:
                self._note(**taken)

    async def _in_turns(self, version: int) -> dict[str, float]:
        staged = max(seconds for seconds, _ in await self._all([self._trainer], "publish", version))
        stage_memcpy = max(await self._all([self._trainer], "memcpy"))
        await asyncio.gather(*(replica.lease.call() for replica in self._replicas))
        return {
            "stage": staged,
            "stage_memcpy": stage_memcpy,
            "pull": max(await self._all(self._replicas, "pull")),
            "pull_memcpy": max(await self._all(self._replicas, "memcpy")),
            "stall": max(await self._all(self._replicas, "apply")),
            "stall_memcpy": max(await self._all(self._replicas, "memcpy")),
        }

    async def _as_in_a_run(self, version: int) -> dict[str, float]:
        following = asyncio.gather(*(replica.follow.call() for replica in self._replicas))
        at = time.monotonic() + LEAD_SECONDS
        ends = [end for _, end in (await self._trainer.publish.call(version, at)).values()]
        applied = max(end for values in await following for end in values.values())
        return {"publish_to_applied": applied - at, "committed_to_applied": applied - max(ends)}

    async def beside_rdmabuffer(self, count: int) -> float:
        """Alternate a pull with reads of the same bytes by RDMABuffer alone; a reader's bytes."""
        readers = [replica.slice(procs=rank) for replica in self._replicas for rank in range(len(replica))]
        fetched, served = 0, []
        for version in range(count + WARM_UPDATES):
            await self._all([self._trainer], "publish", version)
            await asyncio.gather(*(replica.lease.call() for replica in self._replicas))
            pulled = max(await self._all(self._replicas, "pull"))
            if not served:
                fetched = max(await asyncio.gather(*(reader.fetched_bytes.call_one() for reader in readers)))
                served = list((await self._trainer.serve.call(fetched)).values())
            pairs = [(reader, served[number % len(served)]) for number, reader in enumerate(readers)]
            at = time.monotonic() + LEAD_SECONDS
            alone = max(await asyncio.gather(*(r.read_buffers.call_one(held, fetched, at) for r, held in pairs)))
            if version >= WARM_UPDATES:
                self._note(pull=pulled, rdmabuffer=alone)
        return fetched

    async def beside_torchstore(self, count: int) -> None:
        """Alternate an update with the same state dict through TorchStore."""
        for version in range(count + WARM_UPDATES):
            put = max(await self._all([self._trainer], "put"))
            got = max(await self._all(self._replicas, "get"))
            staged = max(seconds for seconds, _ in await self._all([self._trainer], "publish", version))
            taken = await self._all(self._replicas, "take")
            update = staged + max(whole for whole, _ in taken)
            blocked = staged + max(stall for _, stall in taken)
            if version >= WARM_UPDATES:
                self._note(update=update, blocked=blocked, torchstore=put + got)

    def ratio(self, name: str, over: str) -> float:
        """The median ratio of two measurements that were taken in turn."""
        return median(a / b for a, b in zip(self.taken[name], self.taken[over], strict=False))

    def _note(self, **seconds: float) -> None:
        for name, taken in seconds.items():
            self.taken.setdefault(name, []).append(taken)

    async def _all(self, meshes: list[Any], endpoint: str, *args: Any) -> list[Any]:
        at = time.monotonic() + LEAD_SECONDS
        answers = await asyncio.gather(*(getattr(mesh, endpoint).call(*args, at) for mesh in meshes))
        return [value for values in answers for value in values.values()]


async def measure(parameters: tuple[Parameter, ...], dtype: torch.dtype, given: argparse.Namespace) -> dict[str, Any]:
    """All measurements with these weights, by name: milliseconds and ratios."""
    (axis, ranks), tp, replicas = next(iter(given.src.items())), given.dst["tp"], given.dst["replicas"]
    sizes = [ranks, *([tp] * replicas)]
    meshes = [this_host().spawn_procs(per_host={"procs": size}, bootstrap=_one_thread) for size in sizes]
    hub = this_host().spawn_procs(per_host={"procs": 1}, bootstrap=_one_thread)
    for mesh in meshes:
        await rendezvous(mesh, "ranks")
    trainer, *readers = (mesh.spawn(f"rank_{number}", Rank) for number, mesh in enumerate(meshes))
    held = await asyncio.gather(
        trainer.hold.call(axis, parameters, dtype), *(one.hold.call("tp", parameters, dtype) for one in readers)
    )
    bench = Bench(trainer, readers, hub, ELSEWHERE if given.transport == "rdma" else None)
    numbers: dict[str, Any] = {
        "gb": sum(parameter.elements for parameter in parameters) * dtype.itemsize / 1e9,
        "keys": len(parameters),
        "reader_bytes": max(held[1].values()),
    }
    match given.transport:
        case "torchstore":
            numbers |= await _beside_torchstore(bench, meshes[0], given.updates)
        case "rdma":
            numbers |= await _beside_rdmabuffer(bench, given.updates, numbers["reader_bytes"])
        case _:
            numbers |= await _beside_copies(bench, given.updates)
    await asyncio.gather(*(mesh.stop() for mesh in (*meshes, hub)))
    return {f"{name}_ms": 1e3 * median(taken) for name, taken in bench.taken.items()} | numbers


async def _beside_copies(bench: Bench, count: int) -> dict[str, float]:
    await bench.open()
    await bench.updates(count)
    await bench.close()
    return {
        "stage_over_memcpy": bench.ratio("stage", "stage_memcpy"),
        "pull_over_memcpy": bench.ratio("pull", "pull_memcpy"),
        "stall_over_memcpy": bench.ratio("stall", "stall_memcpy"),
    }


async def _beside_rdmabuffer(bench: Bench, count: int, reader_bytes: int) -> dict[str, float]:
    await bench.open()
    fetched = await bench.beside_rdmabuffer(count)
    await bench.close()
    return {
        "fetched_over_needed": fetched / reader_bytes,
        "tcp_over_rdmabuffer": bench.ratio("pull", "rdmabuffer"),
    }


async def _beside_torchstore(bench: Bench, writers: Any, count: int) -> dict[str, float]:
    await torchstore.start(writers)
    await bench.open()
    await bench.beside_torchstore(count)
    await bench.close()
    await torchstore.close()
    return {f"torchstore_over_{name}": bench.ratio("torchstore", name) for name in ("update", "blocked")}


def _matrices(gb: float, keys: int, row_kib: int) -> tuple[Parameter, ...]:
    """Matrices of this size together; tensor parallelism divides them by rows and by columns in turn."""
    columns = row_kib * 256
    shape = [ELEMENTS // columns, columns]
    while (count := round(gb * 1e9 / (shape[0] * shape[1] * 4))) < keys and min(shape) > 8:
        shape[shape.index(max(shape))] //= 2
    rows, columns = shape
    return tuple(
        Parameter(name=f"layers.{number}.weight", shape=(rows, columns), tp_dim=number % 2)
        for number in range(max(2, count))
    )


def _one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"


def _axes(known: dict[str, int]) -> Callable[[str], dict[str, int]]:
    """A parser of `axis=size,…`; axes that are not given have these sizes."""

    def parse(text: str) -> dict[str, int]:
        given = {axis: int(size) for axis, _, size in (part.partition("=") for part in text.split(","))}
        if not given or not given.keys() <= known.keys() or min(given.values()) < 1:
            raise argparse.ArgumentTypeError(f"{text}: must be like {','.join(f'{a}=2' for a in known)}, sizes from 1")
        return given if known.keys() == {"fsdp", "tp"} else known | given

    return parse


def _sizes(text: str) -> list[float]:
    return [float(size) for size in text.split(",")]


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description="Weight updates against plain copies of the same bytes.")
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--gb", type=_sizes, default=[0.5], help="size of the weights in GB; several by commas")
    weights.add_argument("--model", choices=MODELS, help="the weights of this model")
    parser.add_argument("--keys", type=int, default=24, help="least number of tensors")
    parser.add_argument("--row-kib", type=int, default=8, help="length of a matrix's rows in KiB, a power of 2")
    parser.add_argument("--src", type=_axes({"fsdp": 1, "tp": 1}), default={"fsdp": 2}, help="trainer: fsdp=N or tp=N")
    parser.add_argument("--dst", type=_axes({"tp": 1, "replicas": 1}), default={"tp": 2, "replicas": 2})
    parser.add_argument("--transport", choices=("auto", "rdma", "torchstore"), default="auto")
    parser.add_argument("--updates", type=int, default=5, help="updates of which the median counts")
    parser.add_argument("--json", type=Path, help="write the result here, a record for each size")
    given = parser.parse_args()
    os.environ.setdefault("TORCHSTORE_LOG_LEVEL", "WARNING")  # it would print a line for each step, within the time
    if given.transport == "torchstore" and find_spec("torchstore") is None:
        print("--transport torchstore: skipped, the package torchstore is not installed")
        return

    if given.model is not None:
        weights_of_each = [(MODELS[given.model].parameters(), torch.bfloat16)]
    else:
        weights_of_each = [(_matrices(gb, given.keys, given.row_kib), torch.float32) for gb in given.gb]
    results: list[dict[str, Any]] = []

    async def each() -> None:
        for parameters, dtype in weights_of_each:
            results.append(await measure(parameters, dtype, given))
            if given.json is not None:
                given.json.write_text(json.dumps(results, indent=2) + "\n")

    asyncio.run(each())
    table = Table(title=f"{given.src} to {given.dst}, {given.transport}")
    table.add_column("")
    for result in results:
        table.add_column(f"{result['gb']:.3g} GB", justify="right")
    for name in results[0]:
        values = [result[name] for result in results]
        table.add_row(name, *(f"{value:.3f}" if isinstance(value, float) else str(value) for value in values))
    Console().print(table)


if __name__ == "__main__":
    main()
