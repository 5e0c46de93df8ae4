"""The memory that tensors take, counted without data."""

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of the tensor."""
    return getattr(tensor, "_local_tensor", tensor)


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of this rank's parts of these tensors."""
    return sum(local_part(tensor).nbytes for tensor in tensors)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make, until they are freed."""

    def __init__(self, known: Sequence[torch.Tensor] = ()):
        """The memory of `known` tensors is not counted."""
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        for tensor in known:
            self._add(tensor, counts=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count its results."""
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor)
        return out

    def __enter__(self) -> Self:
        """Also count what FSDP frees and gets again by resizing storages."""
        before = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            key = storage._cdata
            if key in self._sizes:
                self.now += size - self._sizes[key]
                self._sizes[key] = size
                self.peak = max(self.peak, self.now)
            return before(storage, size)

        self._restore = partial(setattr, torch.UntypedStorage, "resize_", before)
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Count no longer."""
        self._restore()
        super().__exit__(*error)

    def _add(self, tensor: torch.Tensor, *, counts: bool = True) -> None:
        tensor = local_part(tensor)
        storage = getattr(tensor, "elem", tensor).untyped_storage()  # what a collective's unfinished result wraps
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = size = storage.nbytes() if counts else 0
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)
