"""Sums and gathers of a replica's ranks on one CPU machine, which sleep while they wait for each other.

vLLM's ranks spin in shared memory. Where the processes of a run are more than its cores, a rank then waits in each
layer until another one's time slice ends. Here a rank writes its part into memory that all of them read, tells the
others by a byte, and sleeps until theirs have come.

All ranks add the parts in the same order, so they have the same bits. A rank overwrites a part only after every other
rank has read it: it alternates between two places, and announces a part in one only after it has read those in the
other. A rank gets an error as soon as another one has ended.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from goaly.weights.shared_memory import Segment

PLACE = 1 << 20
"""Bytes of a place. Longer tensors go in pieces."""


class CpuRanks:
    """A group of ranks, with the functions that vLLM calls in place of torch's."""

    def __init__(self, communicator: Any):
        own = Segment.create(2 * PLACE)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0goaly-{os.urandom(8).hex()}")
            listener.listen(communicator.world_size)
            met: list[Any] = [None] * communicator.world_size
            dist.all_gather_object(met, (listener.getsockname(), own.handle), group=communicator.device_group)
            self._rank: int = communicator.rank_in_group
            self._others = [socket.socket(socket.AF_UNIX) for _ in met[: self._rank]]
            for other, (address, _) in zip(self._others, met, strict=False):
                other.connect(address)
            self._others += [listener.accept()[0] for _ in met[self._rank + 1 :]]
        segments = [own if handle == own.handle else Segment.open(handle) for _, handle in met]
        dist.barrier(communicator.device_group)
        own.close()
        self._parts = [segment.tensor(torch.uint8, (2, PLACE), 0) for segment in segments]
        self._place = 0

    @staticmethod
    def make_group_name(_: Any) -> str:
        """vLLM asks whether this is the same for all ranks. They are on one machine."""
        return ""

    def all_reduce(self, input: Tensor, group: Any = None) -> None:
        """Add the ranks' tensors, in place."""
        for piece_N, (first_N, second_N, *others) in self._exchanged(input.view(-1)):
            torch.add(first_N, second_N, out=piece_N)
            for other_N in others:
                piece_N += other_N

    def all_gather_into_tensor(self, output: Tensor, input: Tensor, group: Any = None) -> None:
        """Write the ranks' tensors one after another."""
        self.gather(input, list(output.view(len(self._parts), -1)))

    def gather(
        self, input: Tensor, gather_list: Sequence[Tensor] | None = None, dst: int = 0, group: Any = None
    ) -> None:
        """Write the ranks' tensors into those of the list, on the rank that has one."""
        start = 0
        for piece_N, parts in self._exchanged(input.reshape(-1)):
            for whole, part_N in zip(gather_list or (), parts, strict=bool(gather_list)):
                whole.view(-1)[start : start + len(piece_N)].copy_(part_N)
            start += len(piece_N)

    def _exchanged(self, own_N: Tensor) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Each piece of a tensor, and all ranks' parts for it."""
        for piece_N in own_N.split(PLACE // own_N.itemsize):
            parts = [part[self._place, : piece_N.nbytes].view(own_N.dtype) for part in self._parts]
            self._place = 1 - self._place
            parts[self._rank].copy_(piece_N)
            for other in self._others:
                other.send(b"1")
            for other in self._others:
                if not other.recv(1):
                    raise ConnectionError("another rank of this replica has ended")
            yield piece_N, parts
