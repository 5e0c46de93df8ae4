"""The layout of a rank's tensors, read off DTensors: which rectangles of which tensors it holds.

For FSDP over TP on one dim a rank holds FSDP's chunk of the TP shard; with uneven sizes, reading `_StridedShard` from
left to right would give other rectangles than torch's (weights-11).
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from math import prod

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, _StridedShard
from torch.distributed.tensor.placement_types import Shard as ShardPlacement

from goaly.base.errors import WeightsError
from goaly.weights.layout import Extent, Layout, Rectangle, Shard, region, tile, view


def owner(tensor: torch.Tensor) -> torch.Tensor:
    """The object that holds this rank's part of the tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of the tensor that this rank holds, without a gradient."""
    return owner(tensor).detach()


def copy_whole(whole: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy this rank's part of a whole tensor into its tensor."""
    for shard in layout_of({"": tensor}):
        view({"": local(tensor)}, shard).copy_(region(whole, shard.offset, shard.shape))


def layout_of(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """The rectangles of these tensors that this rank holds, without empty ones."""
    shards: list[Shard] = []
    for name, tensor in tensors.items():
        mesh, coordinate, placements = (), (), ()
        if isinstance(tensor, DTensor):
            mesh, placements = tuple(tensor.device_mesh.shape), tensor.placements
            coordinate = tensor.device_mesh.get_coordinate()
            if coordinate is None:
                continue
        held = shards_of(name, tensor.dtype, tuple(tensor.shape), mesh, coordinate, placements)
        expected, found = sum(shard.elements for shard in held), owner(tensor).numel()
        if expected != found:
            raise WeightsError(f"`{name}`: {placements} say {expected} elements, this rank holds {found}")
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
    held = [np.arange(size) for size in global_shape]  # by dim, the indices that this rank has after each axis
    for axis in _in_order(name, mesh_shape, placements):
        ranks, rank, placement = mesh_shape[axis], coordinate[axis], placements[axis]
        assert isinstance(placement, ShardPlacement | _StridedShard)
        strides = [held[placement.dim]]
        if isinstance(placement, _StridedShard) and not _is_outer(axis, mesh_shape, placements):
            factor = int(placement.split_factor)
            strides = [_chunk(strides[0], factor, number) for number in range(factor)]
        held[placement.dim] = np.concatenate([_chunk(stride, ranks, rank) for stride in strides])
    shards = [
        Shard(
            name=name,
            dtype=dtype,
            global_shape=global_shape,
            offset=tuple(offset for offset, _, _ in rectangle),
            shape=tuple(length for _, length, _ in rectangle),
            start=tuple(start for _, _, start in rectangle),
        )
        for rectangle in product(*map(_runs, held))
    ]
    return tuple(shards)


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


def _chunk(indices: np.ndarray, count: int, number: int) -> np.ndarray:
    """One of `count` chunks of these indices as `torch.chunk` makes them: equal, the last ones shorter or empty."""
    size = -(-len(indices) // count)
    return indices[number * size : (number + 1) * size]


def _runs(indices: np.ndarray) -> list[tuple[int, int, int]]:
    """Each run of consecutive indices as (global offset, length, local offset)."""
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    edges = [0, *breaks.tolist(), len(indices)]
    return [(int(indices[begin]), end - begin, begin) for begin, end in pairwise(edges) if begin < end]


def gpu_of(tensors: Mapping[str, torch.Tensor]) -> torch.device | None:
    """The GPU that holds some of them, if any."""
    return next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
