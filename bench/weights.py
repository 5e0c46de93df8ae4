"""What an update of the weights costs, against plain copies of the same bytes by as many processes and threads.

    python -m bench.weights [--gb X] [--src fsdp=2] [--dst tp=2,replicas=2] [--transport shm|rdma] [--json FILE]

Trainer ranks and reader ranks are processes of their own, over a real store. Each update, in turns: all trainer ranks
stage (`stage`), then copy the same bytes within their memory (`memcpy`); all readers pull, then copy theirs; all
readers apply, in both modes. Then one update as in a run, readers following the staging bucket by bucket:
`announced_to_applied` is from the start of the staging to the last reader's apply, `committed_to_applied` from its end.
With `rdma` the readers count as being on another host, and read over Monarch's RDMABuffer, TCP where there is no such
hardware; beside it the same bytes are read with RDMABuffer alone and over a plain socket. Where TorchStore is
installed, the same state dict goes through it, too: `over_torchstore` is its put and get over `stage` and `pull`. All
are medians.
"""

import argparse
import asyncio
import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from monarch.actor import Actor, concurrent_endpoint, this_host
from monarch.spmd import setup_torch_elastic_env_async
from rich.console import Console
from rich.table import Table
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from goaly.weights import torchstore
from goaly.weights.placement import local
from goaly.weights.publisher import Publisher
from goaly.weights.settings import WeightSettings
from goaly.weights.store import WeightStore
from goaly.weights.subscriber import Subscriber

ROWS, COLUMNS = 2048, 1024
WARM_UPDATES = 1
LEAD_SECONDS = 0.02
"""All ranks of a measurement begin this long after it is announced to them, at the same moment."""
ELSEWHERE = "another host"
CHUNK, IN_FLIGHT = 8 << 20, 4


class Rank(Actor):
    """One process of the trainer or of a replica."""

    @concurrent_endpoint
    async def hold(self, axis: str, count: int) -> int:
        """Hold so many matrices, divided over the mesh by rows (fsdp) or by rows and columns in turn (tp); bytes."""
        torch.set_num_threads(1)
        self._rank, self._world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if not distributed.is_initialized():
            await asyncio.to_thread(distributed.init_process_group, "gloo")
        mesh = init_device_mesh("cpu", (self._world,))
        self._tensors: dict[str, torch.Tensor] = {}
        for number in range(count):
            dim = number % 2 if axis == "tp" else 0
            shape = [ROWS, COLUMNS]
            shape[dim] //= self._world
            part = torch.nn.Parameter(torch.full(shape, 1.0), requires_grad=False)
            self._tensors[f"layers.{number}.weight"] = DTensor.from_local(part, mesh, [Shard(dim)], run_check=False)
        parts = [local(tensor) for tensor in self._tensors.values()]
        self._copied = [(torch.zeros(part.shape), part) for part in parts]
        return sum(part.nbytes for part in parts)

    @concurrent_endpoint
    async def write_to(self, store: Any, settings: WeightSettings) -> None:
        """Become a writer."""
        self._publisher = Publisher(store, self._rank, self._world, self._tensors, settings)

    @concurrent_endpoint
    async def read_from(self, store: Any, settings: WeightSettings, host: str | None) -> None:
        """Become a reader; parameters are plain tensors, as an engine has them."""
        live = {name: torch.nn.Parameter(local(tensor).clone()) for name, tensor in self._tensors.items()}
        self._subscriber = Subscriber(store, self._tensors, f"reader{self._rank}", settings, live=live, host=host)
        self._version = -1

    @concurrent_endpoint
    async def publish(self, version: int, at: float) -> tuple[float, float]:
        """Stage at that moment; seconds, and when it ended."""
        await _until(at)
        started = time.monotonic()
        await self._publisher.publish(version)
        return time.monotonic() - started, time.monotonic()

    @concurrent_endpoint
    async def lease(self) -> None:
        """Wait for the next version."""
        self._version = await self._subscriber.newest(self._version)

    @concurrent_endpoint
    async def pull(self, at: float) -> float:
        """Fetch what was leased; seconds."""
        await _until(at)
        started = time.monotonic()
        assert await self._subscriber.prefetch(self._version)
        return time.monotonic() - started

    @concurrent_endpoint
    async def apply(self, at: float) -> float:
        """Put it in place; seconds."""
        await _until(at)
        started = time.monotonic()
        self._subscriber.apply()
        return time.monotonic() - started

    @concurrent_endpoint
    async def follow(self) -> float:
        """All of it, as a generator does; when it ended."""
        self._version = await self._subscriber.newest(self._version, early=True)
        assert await self._subscriber.prefetch(self._version)
        self._subscriber.apply()
        return time.monotonic()

    @concurrent_endpoint
    async def memcpy(self, at: float) -> float:
        """Copy as many bytes within this process, in a thread as the others do; seconds."""
        await _until(at)

        def copy() -> float:
            started = time.monotonic()
            torch._foreach_copy_([target for target, _ in self._copied], [source for _, source in self._copied])
            return time.monotonic() - started

        return await asyncio.to_thread(copy)

    @concurrent_endpoint
    async def fetched_bytes(self) -> int:
        """How many bytes a pull over the network reads: whole buckets, where only a part of the rows is needed."""
        subscriber = self._subscriber
        return sum(
            reached._stretches[1 + bucket].nbytes
            for reached, buckets in zip(subscriber._reached, subscriber._plan, strict=True)
            for bucket in buckets
        )

    @concurrent_endpoint
    async def serve(self, size: int) -> tuple[list[Any], int]:
        """Offer that many bytes as RDMA buffers, and on a socket; the buffers and the port."""
        from monarch.rdma import RDMABuffer

        self._served = torch.ones(size, dtype=torch.uint8)
        listening = socket.create_server(("127.0.0.1", 0))

        def send(connection: socket.socket) -> None:
            with connection:
                while connection.recv(1):
                    connection.sendall(memoryview(self._served.numpy()))

        def accept() -> None:
            while True:
                threading.Thread(target=send, args=(listening.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        chunks = [self._served[begin : begin + CHUNK] for begin in range(0, size, CHUNK)]
        return await asyncio.to_thread(lambda: [RDMABuffer(chunk) for chunk in chunks]), listening.getsockname()[1]

    @concurrent_endpoint
    async def read_buffers(self, buffers: list[Any], size: int, at: float) -> float:
        """Read them with RDMABuffer alone; seconds."""
        if not hasattr(self, "_landing"):
            self._landing = torch.zeros(size, dtype=torch.uint8)
        await _until(at)

        def read() -> float:
            started = time.monotonic()
            coming: deque[Any] = deque()
            for number, buffer in enumerate(buffers):
                coming.append(buffer.read_into(self._landing[number * CHUNK : (number + 1) * CHUNK]))
                if len(coming) == IN_FLIGHT:
                    coming.popleft().get()
            while coming:
                coming.popleft().get()
            return time.monotonic() - started

        return await asyncio.to_thread(read)

    @concurrent_endpoint
    async def put(self, at: float) -> float:
        """Put the tensors into TorchStore, as its users do; seconds."""
        await _until(at)
        started = time.monotonic()
        await import_module("torchstore").put_state_dict(self._tensors, "weights")
        return time.monotonic() - started

    @concurrent_endpoint
    async def get(self, at: float) -> float:
        """Fill the tensors from there; seconds."""
        await _until(at)
        started = time.monotonic()
        await import_module("torchstore").get_state_dict("weights", self._tensors)
        return time.monotonic() - started

    @concurrent_endpoint
    async def read_socket(self, port: int, at: float) -> float:
        """Read them over a socket; seconds."""
        if not hasattr(self, "_connection"):
            self._connection = socket.create_connection(("127.0.0.1", port))
        await _until(at)

        def read() -> float:
            started = time.monotonic()
            self._connection.sendall(b"!")
            left = memoryview(self._landing.numpy())
            while left:
                left = left[self._connection.recv_into(left) :]
            return time.monotonic() - started

        return await asyncio.to_thread(read)


async def _until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.monotonic()))


def _one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"


class Bench:
    """The processes, and what they measured."""

    def __init__(self, trainer: Any, replicas: list[Any], store_mesh: Any, transport: str):
        self._trainer = trainer
        self._replicas = replicas
        self._store_mesh = store_mesh
        self._transport = transport
        self._stores = 0
        self.taken: dict[str, list[float]] = {}

    async def both(self, updates: int) -> None:
        """Measure both apply modes."""
        for mode in ("copy", "flip"):
            settings = WeightSettings(apply=mode)
            store = self._store_mesh.spawn(f"store_{mode}", WeightStore, settings)
            host = ELSEWHERE if self._transport == "rdma" else None
            await self._trainer.write_to.call(store, settings)
            await asyncio.gather(*(replica.read_from.call(store, settings, host) for replica in self._replicas))
            for version in range(2 * (updates + WARM_UPDATES)):
                taken = await (self._in_turns(version, mode) if version % 2 else self._as_in_a_run(version))
                if version >= 2 * WARM_UPDATES:
                    for name, seconds in taken.items():
                        self.taken.setdefault(name, []).append(seconds)

    async def _in_turns(self, version: int, mode: str) -> dict[str, float]:
        staged = max(seconds for seconds, _ in await self._all([self._trainer], "publish", version))
        stage_memcpy = max(await self._all([self._trainer], "memcpy"))
        await asyncio.gather(*(replica.lease.call() for replica in self._replicas))
        return {
            "stage": staged,
            "stage_memcpy": stage_memcpy,
            "pull": max(await self._all(self._replicas, "pull")),
            "pull_memcpy": max(await self._all(self._replicas, "memcpy")),
            f"stall_{mode}": max(await self._all(self._replicas, "apply")),
            "stall_memcpy": max(await self._all(self._replicas, "memcpy")),
        }

    async def _as_in_a_run(self, version: int) -> dict[str, float]:
        following = asyncio.gather(*(replica.follow.call() for replica in self._replicas))
        at = time.monotonic() + LEAD_SECONDS
        ends = [end for _, end in (await self._trainer.publish.call(version, at)).values()]
        applied = max(end for values in await following for end in values.values())
        return {"announced_to_applied": applied - at, "committed_to_applied": applied - max(ends)}

    async def network(self, updates: int) -> float:
        """Beside it: the same bytes with RDMABuffer alone, and over a socket. Fetched over needed bytes."""
        fetched = [size for replica in self._replicas for size in (await replica.fetched_bytes.call()).values()]
        size = max(fetched)
        served = list((await self._trainer.serve.call(size)).values())
        readers = [replica.slice(procs=rank) for replica in self._replicas for rank in range(len(replica))]
        for update in range(updates + WARM_UPDATES):
            at = time.monotonic() + LEAD_SECONDS
            sources = [served[number % len(served)] for number in range(len(readers))]
            pairs = list(zip(readers, sources, strict=True))
            alone = max(await asyncio.gather(*(r.read_buffers.call_one(s[0], size, at) for r, s in pairs)))
            at = time.monotonic() + LEAD_SECONDS
            plain = max(await asyncio.gather(*(r.read_socket.call_one(s[1], at) for r, s in pairs)))
            if update >= WARM_UPDATES:
                self.taken.setdefault("rdmabuffer", []).append(alone)
                self.taken.setdefault("socket", []).append(plain)
        return size

    async def torchstore(self, updates: int, writers: Any) -> None:
        """In turns with it: the same state dict through TorchStore, a volume in each trainer rank."""
        await torchstore.start(writers)
        for update in range(updates + WARM_UPDATES):
            put = max(await self._all([self._trainer], "put"))
            got = max(await self._all(self._replicas, "get"))
            ours = await self._in_turns(2 * (updates + WARM_UPDATES) + update, "flip")
            if update >= WARM_UPDATES:
                taken = {"torchstore": put + got, "stage_and_pull": ours["stage"] + ours["pull"]}
                for name, seconds in taken.items():
                    self.taken.setdefault(name, []).append(seconds)
        await torchstore.stop()

    async def _all(self, meshes: list[Any], endpoint: str, *args: Any) -> list[Any]:
        at = time.monotonic() + LEAD_SECONDS
        answers = await asyncio.gather(*(getattr(mesh, endpoint).call(*args, at) for mesh in meshes))
        return [value for values in answers for value in values.values()]


async def measure(gb: float, source: dict[str, int], destination: dict[str, int], transport: str, updates: int) -> Any:
    """Everything, by name: seconds, and ratios."""
    count = max(2, round(gb * 1e9 / (ROWS * COLUMNS * 4)))
    (axis, ranks), tp, replicas = next(iter(source.items())), destination["tp"], destination["replicas"]
    sizes = [ranks, *([tp] * replicas)]
    meshes = [this_host().spawn_procs(per_host={"procs": size}, bootstrap=_one_thread) for size in sizes]
    hub = this_host().spawn_procs(per_host={"procs": 1}, bootstrap=_one_thread)
    for mesh in meshes:
        await setup_torch_elastic_env_async(mesh)
    trainer, *readers = (mesh.spawn(f"rank_{number}", Rank) for number, mesh in enumerate(meshes))
    held = await asyncio.gather(trainer.hold.call(axis, count), *(one.hold.call("tp", count) for one in readers))
    bench = Bench(trainer, readers, hub, transport)
    await bench.both(updates)
    fetched = await bench.network(updates) if transport == "rdma" else None
    if find_spec("torchstore") is not None:
        await bench.torchstore(updates, meshes[0])
    numbers: dict[str, Any] = {f"{name}_ms": 1e3 * median(taken) for name, taken in bench.taken.items()}

    def ratio(name: str, over: str) -> float:
        return median(a / b for a, b in zip(bench.taken[name], bench.taken[over], strict=False))

    numbers |= {
        "gb": count * ROWS * COLUMNS * 4 / 1e9,
        "reader_bytes": max(held[1].values()),
        "stage_over_memcpy": ratio("stage", "stage_memcpy"),
        "pull_over_memcpy": ratio("pull", "pull_memcpy"),
        "stall_copy_over_memcpy": ratio("stall_copy", "stall_memcpy"),
    }
    if fetched is not None:
        numbers["fetched_over_needed"] = fetched / numbers["reader_bytes"]
        numbers["tcp_over_rdmabuffer"] = numbers["pull_ms"] / numbers["rdmabuffer_ms"]
        numbers["rdmabuffer_over_socket"] = numbers["rdmabuffer_ms"] / numbers["socket_ms"]
    if "torchstore" in bench.taken:
        numbers["over_torchstore"] = ratio("torchstore", "stage_and_pull")
    await asyncio.gather(*(mesh.stop() for mesh in (*meshes, hub)))
    return numbers


def _axes(known: dict[str, int]) -> Callable[[str], dict[str, int]]:
    """A parser of `axis=size,…`; what is not given has these sizes."""

    def parse(text: str) -> dict[str, int]:
        given = {axis: int(size) for axis, _, size in (part.partition("=") for part in text.split(","))}
        if not given or not given.keys() <= known.keys() or min(given.values()) < 1:
            raise argparse.ArgumentTypeError(f"{text}: must be like {','.join(f'{a}=2' for a in known)}, sizes from 1")
        return given if known.keys() == {"fsdp", "tp"} else known | given

    return parse


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description="Weight updates against plain copies of the same bytes.")
    parser.add_argument("--gb", type=float, default=0.5, help="size of the model in GB, float32")
    parser.add_argument("--src", type=_axes({"fsdp": 1, "tp": 1}), default={"fsdp": 2}, help="trainer: fsdp=N or tp=N")
    parser.add_argument("--dst", type=_axes({"tp": 1, "replicas": 1}), default={"tp": 2, "replicas": 2})
    parser.add_argument("--transport", choices=("shm", "rdma"), default="shm")
    parser.add_argument("--updates", type=int, default=5, help="updates of which the median counts")
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    numbers = asyncio.run(measure(arguments.gb, arguments.src, arguments.dst, arguments.transport, arguments.updates))
    table = Table(title=f"{numbers['gb']:.2f} GB, {arguments.src} to {arguments.dst}, {arguments.transport}")
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in numbers.items():
        table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    Console().print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(numbers, indent=2) + "\n")


if __name__ == "__main__":
    main()
