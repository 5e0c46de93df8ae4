"""Where a reader's weights go: spare memory that is filled while the engine works, and how it becomes the parameters'.

In mode "copy" each parameter has a spare of its size, which `apply` copies into it. In mode "flip" `apply` makes the
spare the parameter's memory, and what the parameter had becomes the spare: that takes no time for any size, but only
who reads the parameter anew at each use sees it. A parameter of which somebody holds another view is therefore copied
in either mode.

Invariants
    WD-1  Names of one and the same memory (tied weights) stay so, and are filled once.
    WD-2  Between two `apply` the parameters don't change, and memory that they have is not written; nor is memory that
          a GPU still works with: it goes on after `apply` has returned.
    WD-3  What is filled is all of a parameter, each element once, or the reader is refused.
"""

import logging
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from goaly.weights.buckets import Needs, needs_of
from goaly.weights.layout import Layout, Shard, view
from goaly.weights.mapping import Naming, renamed
from goaly.weights.placement import check_filled, layout_of

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Memory:
    """One parameter's memory: everyone who is known to have it, and its spare."""

    name: str
    owners: list[torch.Tensor]
    spare: torch.Tensor
    flips: bool = False
    shards: list[Shard] = field(default_factory=list)


class Destination:
    """The live parameters of one rank, and spares for the next version."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        mode: str,
        live: Mapping[str, torch.Tensor] | None = None,
        naming: Naming | None = None,
    ):
        """`tensors` say what this rank has; `live` are the objects that the model computes with.

        Without `live` they are the tensors, or what DTensors have as their local part. The tensors have the writers'
        names, or are made of tensors of theirs as `naming` says; one that is made of nothing stays as it is.
        """
        self._layouts: dict[str, Layout] = {
            name: renamed(layout_of({name: tensor}), naming or {}) for name, tensor in tensors.items()
        }
        self._live = {name: _held(tensor) for name, tensor in tensors.items()} if live is None else dict(live)
        self._mode = mode
        self._memories: list[_Memory] = []
        self._side = 0
        self._applied: torch.cuda.Event | None = None
        self.layout: Layout = ()
        """What has to be filled, once `allocate` was called."""

    def allocate(self, published: Container[str]) -> None:
        """Make the spares; of the names of one memory, the one that is published is filled."""
        by_name: dict[str, _Memory] = {}
        for names in _by_memory(self._live):
            moved = [name for name in names if self._layouts[name]]
            if not moved:
                continue
            name = next((name for name in moved if self._layouts[name][0].name in published), moved[0])
            owners = list({id(self._live[name]): self._live[name] for name in names}.values())
            with torch.inference_mode(False):
                spare = torch.empty_like(_plain(owners[0])).zero_()  # its pages are in place now
            by_name[name] = _Memory(name, owners, spare)
        self.layout = tuple(shard for name in by_name for shard in self._layouts[name])
        for shard in self.layout:
            by_name[shard.tensor or shard.name].shards.append(shard)
        check_filled({name: self._live[name] for name in by_name}, self.layout)  # WD-3
        self._memories = list(by_name.values())
        if self._mode == "flip":
            for memory in self._memories:
                memory.flips = _only_owned_by(memory.owners)
            copied = [memory.name for memory in self._memories if not memory.flips]
            if copied:
                logger.warning("%d parameters are copied, others hold views of them: %s", len(copied), copied[:5])

    @property
    def needs(self) -> Needs:
        """What fills it, whichever of the names of one memory turn out to be published."""
        return needs_of(tuple(shard for layout in self._layouts.values() for shard in layout))

    @property
    def side(self) -> int:
        """Which of the two sets of memory the spares are now; `targets` differ between the two."""
        return self._side

    @property
    def flips(self) -> bool:
        """Whether no parameter needs a copy to be applied."""
        return all(memory.flips for memory in self._memories)

    def targets(self) -> list[torch.Tensor]:
        """Where each shard of the layout goes in the spares."""
        return [view({memory.name: memory.spare}, shard) for memory in self._memories for shard in memory.shards]

    def settle(self) -> None:
        """Wait until the spares can be written: the GPU has done all that was asked of it before `apply` (WD-2)."""
        if self._applied is not None:
            self._applied.synchronize()

    def apply(self) -> None:
        """Give the parameters what the spares hold. On a GPU, in the order of the calling thread's stream."""
        copied = [memory for memory in self._memories if not memory.flips]
        with torch.no_grad():
            if copied:
                torch._foreach_copy_([_plain(memory.owners[0]) for memory in copied], [one.spare for one in copied])
            for memory in self._memories:
                if memory.flips:
                    before = _plain(memory.owners[0])
                    for owner in memory.owners:
                        owner.data = memory.spare  # WD-1
                    memory.spare = before
        device = next((memory.spare.device for memory in self._memories if memory.spare.is_cuda), None)
        if device is not None:
            self._applied = torch.cuda.Event()
            self._applied.record(torch.cuda.current_stream(device))
        self._side ^= self._mode == "flip"


def _held(tensor: torch.Tensor) -> torch.Tensor:
    """The object that has this rank's part of the tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()


def _by_memory(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """The names, those of one and the same memory together, in order."""
    groups: dict[object, list[str]] = {}
    for name, held in tensors.items():
        key = (held.data_ptr(), held.shape, held.stride(), held.dtype, held.device) if held.numel() else name
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def _only_owned_by(owners: list[torch.Tensor]) -> bool:
    """Whether these are the only tensors over their memory, and have all of it."""
    alone = torch.empty(1)
    first = owners[0]
    whole = first.untyped_storage().nbytes() == first.nbytes
    return whole and _uses(first) == _uses(alone) + len(owners) - 1


def _uses(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
