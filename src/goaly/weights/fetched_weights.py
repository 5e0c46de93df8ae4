"""Where a reader's weights go: spare memory that is filled while the engine works, then copied into the parameters.

Parameters keep their memory, so recorded CUDA graphs and other views of it see each version.

Invariants
    WD-1  Names that share memory (tied weights) keep sharing it, and it is filled once.
    WD-2  Between two `apply` neither the parameters nor their memory change, and no memory is written that a GPU still
          uses after `apply` has returned.
    WD-3  The layout fills each element of a parameter exactly once, or the reader is refused.
    WD-4  With `spare` "auto" the spares leave `HEADROOM` of the GPU's memory free, or are in the host's memory.
"""

import logging
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from goaly.weights.buckets import Needs, needs_of
from goaly.weights.digest import same
from goaly.weights.layout import Layout, view
from goaly.weights.naming import Naming, renamed
from goaly.weights.settings import HEADROOM
from goaly.weights.sharding import check_filled, layout_of, owner

logger = logging.getLogger(__name__)

GIB = 1 << 30


@dataclass(slots=True)
class _Memory:
    """One parameter's memory and its spare; `name` is the name under which it is published."""

    name: str
    live: torch.Tensor
    spare: torch.Tensor
    shards: Layout


class FetchedWeights:
    """The live parameters of one rank, and spares for the next version."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        live: Mapping[str, torch.Tensor] | None = None,
        naming: Naming | None = None,
        *,
        spare: Literal["auto", "device", "host"] = "device",
    ):
        """`tensors` describe what this rank holds; `live` are the objects that the model computes with.

        By default those are the tensors themselves, or the local parts of DTensors. The tensors have the published
        names, or are made of published tensors as `naming` says; a tensor without parts stays as it is. `spare` is
        where the spares are, as in `WeightSettings`.
        """
        self._layouts: dict[str, Layout] = {
            name: renamed(layout_of({name: tensor}), naming or {}) for name, tensor in tensors.items()
        }
        self._live = {name: owner(tensor) for name, tensor in tensors.items()} if live is None else dict(live)
        self._spare = spare
        self._memories: list[_Memory] = []
        self._applied: torch.cuda.Event | None = None
        self.layout: Layout = ()
        """The rectangles to fill; set by `allocate`."""

    def allocate(self, published: Container[str]) -> None:
        """Allocate the spares. If several names share memory, the one that is published is filled."""
        memories: list[_Memory] = []
        groups = [names for names in _by_memory(self._live) if any(self._layouts[name] for name in names)]
        on_host = self._spare == "host"
        if self._spare == "auto":
            on_host = not fit_on_device([self._live[names[0]] for names in groups])  # WD-4
        for names in groups:
            moved = [name for name in names if self._layouts[name]]
            name = next((name for name in moved if self._layouts[name][0].name in published), moved[0])
            with torch.inference_mode(False):
                live = self._live[names[0]]
                device = torch.device("cpu") if on_host else live.device
                spare = torch.empty_like(live.detach(), device=device, pin_memory=on_host and live.is_cuda)
                spare.zero_()  # has pages now
            memories.append(_Memory(name, live, spare, self._layouts[name]))
        self.layout = tuple(shard for memory in memories for shard in memory.shards)
        check_filled({memory.name: memory.live for memory in memories}, self.layout)  # WD-3
        self._memories = memories

    @property
    def needs(self) -> Needs:
        """The rectangles that may be needed, whichever of the names that share memory is published."""
        return needs_of(tuple(shard for layout in self._layouts.values() for shard in layout))

    def targets(self) -> list[torch.Tensor]:
        """The place of each shard of the layout in the spares."""
        return [view({memory.name: memory.spare}, shard) for memory in self._memories for shard in memory.shards]

    def settle(self) -> None:
        """Wait until the spares can be written: the GPU has finished all work from before `apply` (WD-2)."""
        if self._applied is not None:
            self._applied.synchronize()

    def free(self) -> None:
        """Let go of the spares, for good."""
        self._memories = []

    def apply(self) -> None:
        """Copy the spares into the parameters; on a GPU, in the calling thread's stream."""
        live = [memory.live for memory in self._memories]
        if live:
            with torch.no_grad():
                torch._foreach_copy_([one.detach() for one in live], [memory.spare for memory in self._memories])
        device = next((one.device for one in live if one.is_cuda), None)
        if device is not None:
            self._applied = torch.cuda.current_stream(device).record_event()

    def altered(self) -> str | None:
        """The first parameter that does not have the bits of its spare, which must not be filled anew meanwhile."""
        self.settle()
        return next((one.name for one in self._memories if not same(one.live.detach(), one.spare)), None)


def fit_on_device(live: list[torch.Tensor]) -> bool:
    """Whether a copy of these tensors leaves `HEADROOM` of their GPU's memory free; True without a GPU."""
    if not (on_gpu := [one for one in live if one.is_cuda]):
        return True
    free, whole = torch.cuda.mem_get_info(on_gpu[0].device)
    needed = sum(one.nbytes for one in on_gpu)
    fit = free - needed >= HEADROOM * whole
    where = "on the GPU" if fit else "in the host's memory"
    logger.info("fetched weights are kept %s: %.1f GiB, of %.1f GiB free there", where, needed / GIB, free / GIB)
    return fit


def _by_memory(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """The names in order, grouped by the memory that they share."""
    groups: dict[object, list[str]] = {}
    for name, held in tensors.items():
        key = (held.data_ptr(), held.shape, held.stride(), held.dtype, held.device) if held.numel() else name
        groups.setdefault(key, []).append(name)
    return list(groups.values())
