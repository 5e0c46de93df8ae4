"""A version that a reader has fetched: spare memory, filled while the engine works and then copied into the parameters.

Parameters keep their memory, so recorded CUDA graphs and other views of it see each version. Names that share memory
(tied weights) are filled once.
"""

import logging
from collections.abc import Container, Mapping
from typing import Literal

import torch

from goaly.weights.buckets import Needs, needs_of
from goaly.weights.digest import same
from goaly.weights.dtensor_layout import check_filled, layout_of, owner
from goaly.weights.layout import Layout, view
from goaly.weights.naming import Naming, renamed
from goaly.weights.settings import HEADROOM

logger = logging.getLogger(__name__)

GIB = 1 << 30


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
        self._layouts = {name: renamed(layout_of({name: tensor}), naming or {}) for name, tensor in tensors.items()}
        self._live = {name: owner(tensor) for name, tensor in tensors.items()} if live is None else dict(live)
        self._place = spare
        self._spares: dict[str, torch.Tensor] = {}
        """By the name under which it is filled, the spare of each parameter's memory."""
        self._applied: torch.cuda.Event | None = None
        self.layout: Layout = ()
        """The rectangles to fill; set by `allocate`."""

    def allocate(self, published: Container[str]) -> None:
        """Allocate the spares. If several names share memory, the one that is published is filled."""
        filled = []
        for names in _by_memory(self._live):
            if moved := [name for name in names if self._layouts[name]]:
                filled.append(next((name for name in moved if self._layouts[name][0].name in published), moved[0]))
        live = {name: self._live[name] for name in filled}
        on_host = self._place == "host" or (self._place == "auto" and not fit_on_device(list(live.values())))
        with torch.inference_mode(False):
            for name, one in live.items():
                device = torch.device("cpu") if on_host else one.device
                spare = torch.empty_like(one.detach(), device=device, pin_memory=on_host and one.is_cuda)
                self._spares[name] = spare.zero_()  # has pages now
        self.layout = tuple(shard for name in filled for shard in self._layouts[name])
        check_filled(live, self.layout)  # weights-11

    @property
    def needs(self) -> Needs:
        """The rectangles that may be needed, whichever of the names that share memory is published."""
        return needs_of(tuple(shard for layout in self._layouts.values() for shard in layout))

    def targets(self) -> list[torch.Tensor]:
        """The place of each shard of the layout in the spares."""
        return [view(self._spares, shard) for shard in self.layout] if self._spares else []

    def settle(self) -> None:
        """Wait until the spares can be written: the GPU has finished all work from before `apply` (weights-10)."""
        if self._applied is not None:
            self._applied.synchronize()

    def free(self) -> None:
        """Let go of the spares, for good."""
        self._spares = {}

    def apply(self) -> None:
        """Copy the spares into the parameters; on a GPU, in the calling thread's stream."""
        live = [self._live[name].detach() for name in self._spares]
        if live:
            with torch.no_grad():
                torch._foreach_copy_(live, list(self._spares.values()))
        device = next((one.device for one in live if one.is_cuda), None)
        if device is not None:
            self._applied = torch.cuda.current_stream(device).record_event()

    def altered(self) -> str | None:
        """The first parameter that does not have the bits of its spare, which must not be filled anew meanwhile."""
        self.settle()
        return next((name for name, spare in self._spares.items() if not same(self._live[name].detach(), spare)), None)


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
