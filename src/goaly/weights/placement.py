"""How a rank's tensors are placed: reads layouts off tensors and DTensors.

Kept apart from `layout.py`, so that the weight store, which only compares layouts, starts without DTensor.

Invariants
    WA-1  The rectangles of all ranks of a mesh are what torch itself puts there, for any mix of sharded and replicated
          axes, uneven and strided ones (FSDP over TP on one dim) included.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, _StridedShard
from torch.distributed.tensor.placement_types import Shard as ShardPlacement

from goaly.errors import WeightsError
from goaly.weights.layout import Extent, Layout, Shard

Run = tuple[int, int]
"""A stretch of indices of one dim: where it begins, and its length."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of the tensor that this rank holds, without a gradient."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local()


def layout_of(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """The rectangles of these tensors that this rank holds; those without elements are left out."""
    shards: list[Shard] = []
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            coordinate = tensor.device_mesh.get_coordinate()
            if coordinate is None:
                continue
            held = shards_of(
                name, tensor.dtype, tuple(tensor.shape), tuple(tensor.device_mesh.shape), coordinate, tensor.placements
            )
            expected, found = sum(shard.elements for shard in held), local(tensor).numel()
            if expected != found:
                raise WeightsError(f"`{name}`: {tensor.placements} say {expected} elements, this rank holds {found}")
        else:
            held = shards_of(name, tensor.dtype, tuple(tensor.shape), (), (), ())
        shards.extend(held)
    return tuple(shards)


def shards_of(
    name: str,
    dtype: torch.dtype,
    global_shape: Extent,
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> Layout:
    """The rectangles that the rank at this mesh coordinate holds of a tensor with these placements."""
    runs: list[list[Run]] = [[(0, size)] for size in global_shape]
    for ranks, rank, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, _StridedShard):
            strides = _chunks(runs[placement.dim], placement.split_factor)
            runs[placement.dim] = _joined(run for stride in strides for run in _chunks(stride, ranks)[rank])
        elif isinstance(placement, ShardPlacement):
            runs[placement.dim] = _chunks(runs[placement.dim], ranks)[rank]
        elif not isinstance(placement, Replicate):
            raise WeightsError(f"`{name}` is placed as {placement}; weights must be sharded or replicated")
    placed = [_placed(dim_runs) for dim_runs in runs]
    shards = [
        Shard(
            name=name,
            dtype=dtype,
            global_shape=global_shape,
            offset=tuple(offset for offset, _, _ in rectangle),
            shape=tuple(length for _, length, _ in rectangle),
            start=tuple(start for _, _, start in rectangle),
        )
        for rectangle in product(*placed)
    ]
    return tuple(shard for shard in shards if shard.elements)


def _chunks(runs: Sequence[Run], count: int) -> list[list[Run]]:
    """The runs' indices in `count` chunks, as `torch.chunk` divides them: equal, the last ones shorter or empty."""
    total = sum(length for _, length in runs)
    size = -(-total // count)
    return [_taken(runs, min(i * size, total), min((i + 1) * size, total)) for i in range(count)]


def _taken(runs: Sequence[Run], begin: int, end: int) -> list[Run]:
    """The runs from their `begin`-th to before their `end`-th index."""
    taken, position = [], 0
    for offset, length in runs:
        first, last = max(begin, position), min(end, position + length)
        if first < last:
            taken.append((offset + first - position, last - first))
        position += length
    return taken


def _joined(runs: Iterable[Run]) -> list[Run]:
    """The same indices, with runs that touch made one."""
    joined: list[Run] = []
    for offset, length in runs:
        if joined and sum(joined[-1]) == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((offset, length))
    return joined


def _placed(runs: Sequence[Run]) -> list[tuple[int, int, int]]:
    """Each run as (global offset, length, where it begins locally)."""
    placed, start = [], 0
    for offset, length in runs:
        placed.append((offset, length, start))
        start += length
    return placed
