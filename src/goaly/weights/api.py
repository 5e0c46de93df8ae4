"""The weight path on its own: three functions over a store, for any SPMD program in Monarch's processes."""

import os
from collections.abc import Mapping

import torch

from goaly.weights.mapping import Naming
from goaly.weights.publisher import Publisher
from goaly.weights.settings import WeightSettings
from goaly.weights.store import WeightStore
from goaly.weights.subscriber import Subscriber


def publish(
    store: WeightStore,
    tensors: Mapping[str, torch.Tensor],
    *,
    rank: int | None = None,
    world: int | None = None,
    settings: WeightSettings | None = None,
    naming: Naming | None = None,
) -> Publisher:
    """This process as one writer rank of the store, until it is closed or ends; `async with` closes it.

    `tensors` are what it holds, DTensors or plain; what several ranks hold is staged by one of them. Rank and world are
    those of the environment (RANK and WORLD_SIZE) unless given. Where readers know them by other names, fused or
    split, `naming` says how (`mapping.py`).
    """
    return Publisher(
        store,
        _of_environment("RANK", 0) if rank is None else rank,
        _of_environment("WORLD_SIZE", 1) if world is None else world,
        tensors,
        settings or WeightSettings(),
        naming=naming,
    )


def subscribe(
    store: WeightStore,
    tensors: Mapping[str, torch.Tensor],
    *,
    reader: str | None = None,
    settings: WeightSettings | None = None,
    naming: Naming | None = None,
) -> Subscriber:
    """This process as a reader of the store, until it is closed or ends; `apply` writes these tensors."""
    return Subscriber(store, tensors, reader or f"process {os.getpid()}", settings, naming=naming)


async def pull_into(
    store: WeightStore,
    tensors: Mapping[str, torch.Tensor],
    *,
    after: int = -1,
    settings: WeightSettings | None = None,
    naming: Naming | None = None,
) -> int:
    """Wait for a version above `after`, write it into these tensors; the newest version there was then."""
    async with subscribe(store, tensors, settings=settings, naming=naming) as subscriber:
        while not await subscriber.prefetch(await subscriber.newest(after)):
            pass  # revoked: there is a newer one
        return subscriber.apply()


def _of_environment(name: str, otherwise: int) -> int:
    return int(os.environ.get(name, otherwise))
