"""Places for episodes in a worker, in the order in which they ask; their number may change while episodes run."""

import asyncio
from collections import deque
from types import TracebackType


class EpisodePlaces:
    """`async with` it to run in a place."""

    def __init__(self, most: int):
        self._most = most
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.taken = 0
        """How many episodes have a place."""

    @property
    def waiting(self) -> int:
        """How many episodes wait for a place."""
        return sum(not one.done() for one in self._waiting)

    def limit(self, most: int) -> None:
        """Have this many places from now on. Episodes beyond them go on, and nobody follows them."""
        self._most = most
        self._give()

    async def __aenter__(self) -> None:
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._give()
        try:
            await place  # the end of another episode, or a higher limit, unblocks it
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._leave()
            raise

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        self.taken -= 1
        self._give()

    def _give(self) -> None:
        while self._waiting and (self.taken < self._most or self._waiting[0].done()):
            place = self._waiting.popleft()
            if not place.done():  # a cancelled one
                place.set_result(None)
                self.taken += 1
