"""Ranks that are not there: a process that is one rank of many, and which of the others hold the same as it does.

A fake rank has a process of its own, whose process group ends with it, and takes no memory for the tensors.
"""

import multiprocessing
import resource
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from goaly.base.errors import portable
from goaly.weights.dtensor_layout import shards_of

MODULES = [
    "goaly.train.train_engine",
    "goaly.numerics.bitwise_operations",
    "goaly.plan.flash_shapes",
    "goaly.generate.divided_model",
]
"""The imports of fake ranks, which one process does for all."""

KIB = 1024

Found = TypeVar("Found")


def as_fake_rank(work: Callable[..., Found], *arguments: Any, rank: int, ranks: int) -> Found:
    """The result of `work` in a process that is one of `ranks` ranks, the others of which are not there. A dry run asks
    for the same several times, and gets what was found before."""
    key = repr((work.__module__, work.__name__, arguments, rank, ranks))
    if key not in _KNOWN:
        # torch keeps plans for meshes that are equal but for their groups, so a second group would find the first's.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(MODULES)
        with ProcessPoolExecutor(1, mp_context=context) as process:
            _KNOWN[key] = process.submit(_as_rank, work, arguments, rank, ranks).result()
    return _KNOWN[key][0]


_KNOWN: dict[str, tuple[Any, int]] = {}
"""Results, and the most memory that their processes had."""


def most_process_bytes() -> int:
    """The most memory that a fake rank had so far."""
    return max(process_bytes for _, process_bytes in _KNOWN.values())


def tie(model: Any) -> None:
    """Give a tied output projection the weight of the embedding: dividing a model parts them until `init_weights`."""
    if model.enable_weight_tying:
        model.lm_head.weight = model.tok_embeddings.weight


def alike(tensors: Iterable[torch.Tensor], dims: Any, ranks: range) -> tuple[tuple[int, ...], ...]:
    """The ranks in groups that have parts of the same shapes of these tensors, which are sharded over the meshes of
    torchtitan's `dims`; without any, all ranks have all of each tensor."""
    if dims is None:
        return (tuple(ranks),)
    kinds = {
        (tuple(one.shape), one.device_mesh.mesh_dim_names, tuple(one.device_mesh.shape), one.placements)
        for one in tensors
        if isinstance(one, DTensor)
    }
    places = {rank: _place(dims, rank) for rank in ranks}
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    known: dict[Any, tuple[Any, ...]] = {}
    for rank, place in places.items():
        held = []
        for kind in kinds:
            shape, axes, sizes, placements = kind
            coordinate = tuple(place[axis] for axis in axes or ())
            if (kind, coordinate) not in known:
                parts = shards_of("", torch.float32, shape, sizes, coordinate, placements)
                known[kind, coordinate] = tuple(sorted(part.shape for part in parts))
            held.append(known[kind, coordinate])
        groups[tuple(held)].append(rank)
    return tuple(map(tuple, groups.values()))


def _place(dims: Any, rank: int) -> dict[str, int]:
    """The rank's coordinate on each axis of the meshes."""
    found = {}
    for mesh in (dims._global_meshes["dense"], dims._global_meshes["sparse"]):
        (coordinate,) = (mesh.mesh == rank).nonzero().tolist()
        found |= dict(zip(mesh.mesh_dim_names, coordinate, strict=True))
    return found


def _as_rank(work: Callable[..., Found], arguments: tuple[Any, ...], rank: int, ranks: int) -> tuple[Found, int]:
    try:
        with _fake_group(rank, ranks):
            found = work(*arguments)
    except Exception as error:
        raise portable(error) from error
    return found, KIB * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextmanager
def _fake_group(rank: int, ranks: int) -> Any:
    """A process group of this size in which collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
