"""One process of `bench.weights`: a rank of the trainer or of a replica, which measures itself."""

import asyncio
import os
import time
from collections import deque
from importlib import import_module
from typing import Any

import torch
from monarch.actor import Actor, concurrent_endpoint
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, ones

from goaly.models.architecture import Parameter
from goaly.weights.dtensor_layout import local
from goaly.weights.publisher import Publisher
from goaly.weights.settings import WeightSettings
from goaly.weights.subscriber import Subscriber

CHUNK, IN_FLIGHT = 8 << 20, 4
"""Reads with RDMABuffer alone use buffers of this size, and this many at a time."""


class Rank(Actor):
    """One process of the trainer or of a replica."""

    def __init__(self) -> None:
        self._roles: list[Publisher | Subscriber] = []

    @concurrent_endpoint
    async def hold(self, axis: str, parameters: tuple[Parameter, ...], dtype: torch.dtype) -> int:
        """Hold these parameters, divided over the mesh by rows (fsdp) or as tensor parallelism does (tp); bytes."""
        torch.set_num_threads(1)
        self._rank, self._world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if not distributed.is_initialized():
            await asyncio.to_thread(distributed.init_process_group, "gloo")
        mesh = init_device_mesh("cpu", (self._world,))
        self._tensors: dict[str, torch.Tensor] = {}
        for parameter in parameters:
            dim = parameter.tp_dim if axis == "tp" else 0
            placement = Replicate() if dim is None else Shard(dim)
            self._tensors[parameter.name] = ones(
                *parameter.shape, dtype=dtype, device_mesh=mesh, placements=[placement]
            )
        parts = [local(tensor) for tensor in self._tensors.values()]
        self._copied = [(torch.zeros(part.shape, dtype=part.dtype), part) for part in parts]
        return sum(part.nbytes for part in parts)

    @concurrent_endpoint
    async def write_to(self, store: Any, settings: WeightSettings) -> None:
        """Become a writer."""
        self._publisher = Publisher(store, self._tensors, settings, rank=self._rank, world=self._world)
        self._roles.append(self._publisher)

    @concurrent_endpoint
    async def read_from(self, store: Any, settings: WeightSettings, host: str | None) -> None:
        """Become a reader; parameters are plain tensors, as an engine has them."""
        live = {name: torch.nn.Parameter(local(tensor).clone()) for name, tensor in self._tensors.items()}
        self._subscriber = Subscriber(store, self._tensors, f"reader{self._rank}", settings, live=live, host=host)
        self._roles.append(self._subscriber)
        await self._subscriber.join()
        self._version = -1

    @concurrent_endpoint
    async def leave(self) -> None:
        """Close the publisher or subscriber."""
        while self._roles:
            await self._roles.pop().close()

    @concurrent_endpoint
    async def publish(self, version: int, at: float) -> tuple[float, float]:
        """Stage at that moment; its seconds, and the time of its end."""
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
        """Fetch the leased version; seconds."""
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
        """Wait for, fetch and apply the next version, as a generator does; the time of its end."""
        self._version = await self._subscriber.newest(self._version)
        assert await self._subscriber.prefetch(self._version)
        self._subscriber.apply()
        return time.monotonic()

    @concurrent_endpoint
    async def take(self, at: float) -> tuple[float, float]:
        """Wait for, fetch and apply the next version; seconds, and those of the apply."""
        await _until(at)
        started = time.monotonic()
        self._version = await self._subscriber.newest(self._version)
        assert await self._subscriber.prefetch(self._version)
        fetched = time.monotonic()
        self._subscriber.apply()
        applied = time.monotonic()
        return applied - started, applied - fetched

    @concurrent_endpoint
    async def memcpy(self, at: float) -> float:
        """Copy as many bytes within this process, in a thread as the others; seconds."""
        await _until(at)

        def copy() -> float:
            started = time.monotonic()
            torch._foreach_copy_([target for target, _ in self._copied], [source for _, source in self._copied])
            return time.monotonic() - started

        return await asyncio.to_thread(copy)

    @concurrent_endpoint
    async def fetched_bytes(self) -> int:
        """Bytes that a pull over the network reads, in whole buckets."""
        # pyrefly: ignore[missing-attribute]
        return sum(buffer.nbytes for source in self._subscriber._sources for buffer in source._stretches.values())

    @concurrent_endpoint
    async def serve(self, size: int) -> list[Any]:
        """Serve that many bytes as RDMA buffers."""
        from monarch.rdma import RDMABuffer

        self._served = torch.ones(size, dtype=torch.uint8)
        chunks = [self._served[begin : begin + CHUNK] for begin in range(0, size, CHUNK)]
        return await asyncio.to_thread(lambda: [RDMABuffer(chunk) for chunk in chunks])

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


async def _until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.monotonic()))
