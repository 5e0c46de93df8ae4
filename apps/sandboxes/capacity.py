"""How many sandboxes a server has at once, and who gets the next place."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable

from goaly.sandboxes.contract import SandboxFull, SandboxUnavailable


class Capacity:
    """Places for sandboxes. Clients that wait get them in turns, so one with many starts does not hold up others."""

    def __init__(self, most: int, most_memory_mib: int | None, changed: Callable[[], None]) -> None:
        self.most = most
        self.taken = 0
        self._most_memory = most_memory_mib
        self._memory = 0
        self._changed = changed
        self._queues: dict[Hashable, deque[tuple[int, asyncio.Future[None]]]] = {}
        """The client whose turn it is comes first."""

    @property
    def waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    async def take(self, client: Hashable, memory_mib: int, *, wait: bool) -> None:
        """A place; SandboxFull if there is none now and the client does not wait."""
        if self._most_memory is not None and memory_mib > self._most_memory:
            raise SandboxUnavailable(
                f"limits.memory_mib={memory_mib}: must be at most {self._most_memory}, which all sandboxes share there"
            )
        if not self._queues and self._fits(memory_mib):
            self._give(memory_mib)
            return
        if not wait:
            raise SandboxFull(f"{self.taken} of {self.most} sandboxes are alive, and {self._memory} MiB are taken")
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (memory_mib, place)
        self._queues.setdefault(client, deque()).append(entry)
        self._changed()
        try:
            await place  # unblocked by `free`, or by the client that gives up
        except asyncio.CancelledError:
            if place.cancelled():
                queue = self._queues[client]
                queue.remove(entry)
                if not queue:
                    del self._queues[client]
                self._hand_out()
            else:
                self.free(memory_mib)
            raise

    def free(self, memory_mib: int) -> None:
        """A sandbox has ended, or has not started."""
        self.taken -= 1
        self._memory -= memory_mib
        self._hand_out()

    def _fits(self, memory_mib: int) -> bool:
        enough = self._most_memory is None or self._memory + memory_mib <= self._most_memory
        return self.taken < self.most and enough

    def _give(self, memory_mib: int) -> None:
        self.taken += 1
        self._memory += memory_mib
        self._changed()

    def _hand_out(self) -> None:
        while self._queues:
            client, queue = next(iter(self._queues.items()))
            memory_mib, place = queue[0]
            if not self._fits(memory_mib):
                break
            queue.popleft()
            del self._queues[client]
            if queue:
                self._queues[client] = queue
            self._give(memory_mib)
            place.set_result(None)
        self._changed()
