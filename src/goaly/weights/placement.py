"""Reads layouts off a rank's tensors and DTensors.

This is not part of `layout.py`, so that the weight store, which only compares layouts, starts without DTensor.

Invariants
    WA-1  The rectangles of all ranks of a mesh are those that torch itself places there, for any mix of sharded and
          replicated axes, also uneven and strided ones. For FSDP over TP on one dim that is FSDP's chunk of the TP
          shard; with uneven sizes, reading `_StridedShard` from left to right would give other rectangles.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import prod

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, _StridedShard
from torch.distributed.tensor.placement_types import Shard as ShardPlacement

from goaly.errors import WeightsError
from goaly.weights.layout import Layout, Shard
from goaly.weights.rectangle import Extent, Rectangle, tile

Run = tuple[int, int]
"""Consecutive indices of one dim: the first one, and how many."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of the tensor that this rank holds, without a gradient."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local()


def layout_of(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """The rectangles of these tensors that this rank holds, without empty ones."""
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


def check_filled(tensors: Mapping[str, torch.Tensor], layout: Layout) -> None:
    """Raise unless the layout has each element of the local tensors that it names exactly once."""
    places: dict[str, list[Rectangle]] = {}
    for shard in layout:
        places.setdefault(shard.tensor or shard.name, []).append(shard.place)
    for name, rectangles in places.items():
        if name not in tensors:
            raise WeightsError(f"`{name}` is in the layout, this rank has no such tensor")
        shape = tuple(local(tensors[name]).shape)
        if not tile(tuple(rectangles), shape):
            shown = ", ".join(f"{lengths} at {start}" for start, lengths in rectangles[:4])
            raise WeightsError(f"`{name}` has shape {shape} here, which the layout doesn't cover once: {shown}")


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
    for axis in _in_order(name, mesh_shape, placements):
        ranks, rank, placement = mesh_shape[axis], coordinate[axis], placements[axis]
        # pyrefly: ignore[missing-attribute]
        strides = [runs[placement.dim]]
        if isinstance(placement, _StridedShard) and not _is_outer(axis, mesh_shape, placements):
            # pyrefly: ignore[bad-argument-type]
            strides = _chunks(runs[placement.dim], placement.split_factor)
        # pyrefly: ignore[missing-attribute]
        runs[placement.dim] = _joined(run for stride in strides for run in _chunks(stride, ranks)[rank])
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


def _in_order(name: str, mesh_shape: Sequence[int], placements: Sequence[Placement]) -> list[int]:
    """The axes that shard, in the order in which they divide the tensor: an outer axis after the axes within it."""
    axes = [axis for axis, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    for axis in axes:
        if not isinstance(placements[axis], ShardPlacement | _StridedShard):
            raise WeightsError(f"`{name}` is placed as {placements[axis]}; weights must be sharded or replicated")
    outer = [axis for axis in axes if _is_outer(axis, mesh_shape, placements)]
    return [axis for axis in axes if axis not in outer] + outer[::-1]


def _is_outer(axis: int, mesh_shape: Sequence[int], placements: Sequence[Placement]) -> bool:
    """Whether the axis divides the shards of all later axes of a dim, as FSDP divides those of tensor parallelism."""
    placement = placements[axis]
    if not isinstance(placement, _StridedShard):
        return False
    later = zip(mesh_shape[axis + 1 :], placements[axis + 1 :], strict=True)
    return placement.split_factor == prod(
        ranks for ranks, other in later if getattr(other, "dim", None) == placement.dim
    )


def _chunks(runs: Sequence[Run], count: int) -> list[list[Run]]:
    """The runs' indices in `count` chunks as `torch.chunk` makes them: equal, the last ones shorter or empty."""
    total = sum(length for _, length in runs)
    size = -(-total // count)
    return [_taken(runs, min(i * size, total), min((i + 1) * size, total)) for i in range(count)]


def _taken(runs: Sequence[Run], begin: int, end: int) -> list[Run]:
    """The runs' indices number `begin` to `end - 1`."""
    taken, position = [], 0
    for offset, length in runs:
        first, last = max(begin, position), min(end, position + length)
        if first < last:
            taken.append((offset + first - position, last - first))
        position += length
    return taken


def _joined(runs: Iterable[Run]) -> list[Run]:
    """The same indices, with adjacent runs joined."""
    joined: list[Run] = []
    for offset, length in runs:
        if joined and sum(joined[-1]) == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((offset, length))
    return joined


def _placed(runs: Sequence[Run]) -> list[tuple[int, int, int]]:
    """Each run as (global offset, length, local offset)."""
    placed, start = [], 0
    for offset, length in runs:
        placed.append((offset, length, start))
        start += length
    return placed
