"""The parameters of the last policy versions, in host memory: a step with bitwise numerics computes the log-probs of
tokens that these sampled.

Parameters are kept in the type in which the model computes, which loses nothing: they are rounded to it in each pass.

Within `loaded` all passes of the model are those of an earlier version, to the last bit. After it the live tensors have
the bits that they had before, however it ended. The last `count` versions are kept.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from goaly.weights.dtensor_layout import local


class EarlierPolicies:
    """Copies of this rank's part of a model's tensors, of the last versions."""

    def __init__(self, tensors: Mapping[str, Tensor], count: int, dtype: torch.dtype):
        """The live `tensors` by name, of which parameters are computed with in this `dtype`."""
        self._tensors = tuple(tensors.values())
        self._dtypes = [dtype if isinstance(one, torch.nn.Parameter) else one.dtype for one in self._tensors]
        self._count = count
        self._kept: dict[int, list[Tensor]] = {}

    @property
    def versions(self) -> list[int]:
        """The kept versions, oldest first."""
        return sorted(self._kept)

    @torch.no_grad()
    def keep(self, version: int) -> None:
        """Copy the live tensors, which are those of this version, if it is not kept already."""
        if version in self._kept or not self._count:
            return
        live = self._live()
        # A version that is dropped gives its memory to the new one.
        room = self._kept.pop(min(self._kept)) if len(self._kept) == self._count else None
        if room is None:
            room = [
                torch.empty(one.shape, dtype=dtype, pin_memory=one.is_cuda)
                for one, dtype in zip(live, self._dtypes, strict=True)
            ]
        torch._foreach_copy_(room, live)
        self._kept[version] = room

    @contextmanager
    def loaded(self, version: int) -> Iterator[None]:
        """Put the tensors of a kept version in the place of the live ones."""
        with torch.no_grad():
            live = self._live()
            present = [one.to("cpu", copy=True) for one in live]
            torch._foreach_copy_(live, self._kept[version])
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(live, present)

    def _live(self) -> list[Tensor]:
        return [local(one) for one in self._tensors]
