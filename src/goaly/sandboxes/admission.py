"""The order in which sandboxes start: within bounds of number, memory and disk, and one task after the other.

Pure bookkeeping, without clocks or processes: `pool.py` tells it what happens and does what it says.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from goaly.sandboxes.contract import Limits


@dataclass(eq=False, slots=True)
class RoomRequest:
    """A start that waits, or that has got its room."""

    task: str
    """Tasks take turns, however many requests each has."""
    limits: Limits
    """The room that it needs: the most that its sandbox may use."""


class Admission:
    """The room that live sandboxes and starts take, and the requests that wait for some.

    The request whose turn it is waits until its own room is free, and nobody overtakes it: otherwise small sandboxes
    could keep a large one waiting for ever.
    """

    def __init__(self, most: int, memory_mib: float | None = None, disk_mib: float | None = None) -> None:
        self._most = most
        self._memory_mib = memory_mib
        self._disk_mib = disk_mib
        self._holders: set[RoomRequest] = set()
        self._held_memory = self._held_disk = 0
        self._waiting: OrderedDict[str, deque[RoomRequest]] = OrderedDict()
        """By task, whose turn is next first. A task is here only while it has requests."""

    @property
    def next(self) -> RoomRequest | None:
        """The request whose turn it is."""
        return next(iter(self._waiting.values()))[0] if self._waiting else None

    def too_large(self, limits: Limits) -> str | None:
        """Why a sandbox of these limits can never start, if it cannot."""
        if self._memory_mib is not None and limits.memory_mib > self._memory_mib:
            return f"its limit of memory, {limits.memory_mib} MiB, is above all that the pool may give"
        if self._disk_mib is not None and limits.disk_mib > self._disk_mib:
            return f"its limit of files, {limits.disk_mib} MiB, is above all that the pool may give"
        return None

    def ask(self, request: RoomRequest) -> None:
        """Wait for room; `admit` says when it is there."""
        self._waiting.setdefault(request.task, deque()).append(request)

    def admit(self) -> RoomRequest | None:
        """The request whose turn it is, if there is room for it. It holds the room until `free`."""
        request = self.next
        if request is None or not self._fits(request.limits):
            return None
        self.serve(request)
        self.hold(request)
        return request

    def serve(self, request: RoomRequest) -> None:
        """Let a request go, with room or with something better: the next turn is another task's."""
        self._waiting.move_to_end(request.task)
        self.withdraw(request)

    def withdraw(self, request: RoomRequest) -> None:
        """Wait no longer. Its task keeps its turn."""
        queue = self._waiting.get(request.task)
        if queue and request in queue:
            queue.remove(request)
            if not queue:
                del self._waiting[request.task]

    def hold(self, request: RoomRequest) -> None:
        """Take room without waiting, even beyond the bounds: what lives already is counted, not refused."""
        self._holders.add(request)
        self._held_memory += request.limits.memory_mib
        self._held_disk += request.limits.disk_mib

    def try_hold(self, request: RoomRequest) -> bool:
        """Take room if there is some and nobody waits for it."""
        if self._waiting or not self._fits(request.limits):
            return False
        self.hold(request)
        return True

    def free(self, request: RoomRequest) -> None:
        """Give room back; again is no error."""
        if request in self._holders:
            self._holders.remove(request)
            self._held_memory -= request.limits.memory_mib
            self._held_disk -= request.limits.disk_mib

    def _fits(self, limits: Limits) -> bool:
        return (
            len(self._holders) < self._most
            and (self._memory_mib is None or self._held_memory + limits.memory_mib <= self._memory_mib)
            and (self._disk_mib is None or self._held_disk + limits.disk_mib <= self._disk_mib)
        )
