"""The thread of a rank, and the one beside it that writes checkpoints."""

import asyncio
import threading
from errno import ENOSPC
from pathlib import Path

import pytest

from goaly.train.rank_thread import RankThread


class Slow:
    """Stands in for a staged state whose writes take long."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.disk = threading.Event()

    def stage(self) -> int:
        self.seen.append("stage")
        return 3

    def write(self, folder: Path) -> None:
        assert self.disk.wait(30)
        self.seen.append(f"write {folder}")
        if folder.name == "full":
            raise OSError(ENOSPC, "No space left on device", str(folder))


async def test_steps_run_during_a_write_and_only_the_next_stage_waits_for_it():
    thread, slow = RankThread("test"), Slow()
    thread._staged = slow
    assert await thread.stage() == 3
    writing = asyncio.create_task(thread.write(Path("a")))
    await asyncio.sleep(0)
    assert await thread.run(lambda: "stepped", "step") == "stepped"
    staging = asyncio.create_task(thread.stage())
    assert await thread.run(lambda: "stepped", "step") == "stepped"
    assert not staging.done()
    assert slow.seen == ["stage"]
    slow.disk.set()
    await writing
    assert await staging == 3
    assert slow.seen == ["stage", "write a", "stage"]
    thread.close()


async def test_a_failed_or_abandoned_write_holds_no_later_one_up():
    thread, slow = RankThread("test"), Slow()
    thread._staged = slow
    abandoned = asyncio.create_task(thread.write(Path("full")))
    await asyncio.sleep(0)
    abandoned.cancel()
    with pytest.raises(asyncio.CancelledError):
        await abandoned
    staging = asyncio.create_task(thread.stage())
    await asyncio.sleep(0.05)
    assert not staging.done()  # the memory is still being written
    slow.disk.set()
    assert await staging == 3
    with pytest.raises(OSError, match="full"):
        await thread.write(Path("full"))
    assert await thread.stage() == 3
    await thread.write(Path("b"))
    assert slow.seen == ["write full", "stage", "write full", "stage", "write b"]
    thread.close()
