"""How many sandboxes a server has at once, and who gets the next place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from goaly.sandboxes.admission import Admission, RoomRequest
from goaly.sandboxes.contract import Limits, SandboxFull, SandboxUnavailable


@dataclass(eq=False, slots=True)
class Place(RoomRequest):
    """The place of one sandbox, or the wait for it. Its task is the client's name: clients take turns."""

    given: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Capacity:
    """Places for sandboxes, within bounds of number and memory."""

    def __init__(self, most: int, most_memory_mib: float | None, changed: Callable[[], None]) -> None:
        self.most = most
        self.taken = 0
        self.waiting = 0
        self._admission = Admission(most, most_memory_mib)
        self._changed = changed

    async def take(self, client: str, limits: Limits, *, wait: bool) -> Place:
        """A place; SandboxFull if there is none now and the client does not wait."""
        if reason := self._admission.too_large(limits):
            raise SandboxUnavailable(f"the server cannot start it: {reason}")
        place = Place(client, limits)
        if self._admission.try_hold(place):
            self._count(taken=1)
            return place
        if not wait:
            raise SandboxFull(f"{self.taken} of {self.most} sandboxes are alive, and {self.waiting} wait")
        self._admission.ask(place)
        self._count(waiting=1)
        try:
            await place.given  # unblocked by `free`, or by the client that gives up
        except asyncio.CancelledError:
            if place.given.cancelled():
                self._admission.withdraw(place)
                self._count(waiting=-1)
                self._hand_out()
            else:
                self.free(place)
            raise
        return place

    def free(self, place: Place) -> None:
        """A sandbox has ended, or has not started."""
        self._admission.free(place)
        self._count(taken=-1)
        self._hand_out()

    def _hand_out(self) -> None:
        while isinstance(place := self._admission.admit(), Place):
            self._count(taken=1, waiting=-1)
            place.given.set_result(None)

    def _count(self, taken: int = 0, waiting: int = 0) -> None:
        self.taken += taken
        self.waiting += waiting
        self._changed()
