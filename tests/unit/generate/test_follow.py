"""How a replica follows the weights."""

import asyncio
from typing import Any

from goaly.errors import WritersGone
from goaly.generate.follow import WeightFollower


class Versions:
    """One version, and then no more."""

    held = None

    def __init__(self) -> None:
        self.released = asyncio.Event()

    async def newest(self, after: int, *, early: bool) -> int:
        if after >= 1:
            raise WritersGone("writer rank 0 has left")
        return 1

    async def prefetch(self, version: int, lent: Any = None) -> bool:
        return True

    async def release(self) -> None:
        self.released.set()

    def apply(self) -> int:
        raise AssertionError("the engine's thread applies")


class Draining:
    """An engine loop that applies once its requests have ended."""

    def __init__(self) -> None:
        self.version = 0
        self.drained = asyncio.Event()

    async def apply(self, version: int) -> None:
        await self.drained.wait()
        self.version = version


async def test_a_version_is_held_no_longer_than_it_is_copied_however_long_its_apply_waits() -> None:
    versions, loop = Versions(), Draining()
    following = asyncio.ensure_future(WeightFollower(versions, loop, None).run())  # type: ignore[bad-argument-type]
    await asyncio.wait_for(versions.released.wait(), 5)  # FO-3
    assert loop.version == 0
    loop.drained.set()
    await asyncio.wait_for(following, 5)  # and ends with the last version, without an error
    assert loop.version == 1
