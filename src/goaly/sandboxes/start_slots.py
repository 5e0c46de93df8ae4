"""Paces starts across all processes of this user on a host.

A slot is a file, and who holds its lock has it: a killed process gives its slots back by dying.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path


class StartSlots:
    """`async with slots.one():` at most `count` times at once on this host."""

    def __init__(self, folder: Path, count: int) -> None:
        folder.mkdir(exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._files = [os.open(folder / str(index), flags, 0o600) for index in range(count)]
        self._unused = set(range(count))
        """Slots that no start of this process has or waits for."""
        self._permits = asyncio.Semaphore(count)
        """As many as there are unused slots."""
        self._turn = itertools.cycle(range(count))

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Hold a slot; wait until there is one."""
        await self._permits.acquire()
        slot = self._free_slot()
        if slot is None:
            slot = await self._awaited_slot()
        try:
            yield
        finally:
            self._give_back(slot)

    def _free_slot(self) -> int | None:
        for slot in self._unused:
            try:
                fcntl.flock(self._files[slot], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            self._unused.remove(slot)
            return slot
        return None

    async def _awaited_slot(self) -> int:
        """Wait in a thread for one slot, by turns: a locked file cannot be waited for otherwise."""
        slot = next(slot for slot in self._turn if slot in self._unused)
        self._unused.remove(slot)
        loop, file = asyncio.get_running_loop(), self._files[slot]
        locked: asyncio.Future[None] = loop.create_future()

        def lock() -> None:
            with suppress(RuntimeError, OSError):  # it was closed, or the loop was
                fcntl.flock(file, fcntl.LOCK_EX)
                loop.call_soon_threadsafe(locked.set_result, None)

        # Not one of the loop's own threads: those would keep a process from ending while they wait.
        threading.Thread(target=lock, name="start slot", daemon=True).start()
        try:
            await asyncio.shield(locked)
        except asyncio.CancelledError:
            locked.add_done_callback(lambda _: self._give_back(slot))
            raise
        return slot

    def _give_back(self, slot: int) -> None:
        if self._files:
            fcntl.flock(self._files[slot], fcntl.LOCK_UN)
        self._unused.add(slot)
        self._permits.release()

    def close(self) -> None:
        """Give all slots back."""
        for file in self._files:
            os.close(file)
        self._files.clear()
