"""The sandbox of an attempt, which outlives the worker of the attempt, and is replaced when it dies where that is safe.

coding-3: nothing runs twice. A worker that takes over adopts the sandbox; one that died is replaced by another, in an
    earlier state of its files, only for tasks that are `safe_to_repeat`, and the calls since then are made again.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import pickle
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from goaly.coding.workspace import Workspaces
from goaly.grading.task import CodingTask
from goaly.sandboxes.contract import FileSnapshot, SandboxDied, SandboxError, SnapshotLost
from goaly.sandboxes.sandbox import Sandbox

if TYPE_CHECKING:
    from goaly.agents.chat import Chat

logger = logging.getLogger(__name__)

MARK: Final = "sandbox"
USED: Final = "seconds used"
MOST_RESTARTS: Final = 3
"""Of one attempt; after that, its own commands may be what kills it."""


def packed(value: Any) -> str:
    """Any value as a mark, which the next worker of the same run unpacks."""
    return base64.b64encode(pickle.dumps(value)).decode()


def unpacked(mark: str) -> Any:
    """The value of a mark of `packed`."""
    return pickle.loads(base64.b64decode(mark))


class HeldSandbox:
    """`async with` starts or adopts the sandbox, and stops it."""

    def __init__(self, workspaces: Workspaces, task: CodingTask, chat: Chat, labels: Mapping[str, str]) -> None:
        self._workspaces = workspaces
        self._task = task
        self._chat = chat
        self._labels = labels
        self._sandbox: Sandbox | None = None
        self._restarts = 0
        self.used_before: float = chat.marks.get(USED, 0.0)
        """The seconds that the agent has used in earlier workers, up to its last call."""
        self._began = time.monotonic()
        self.behind: SandboxError | None = None
        """The death after which its files lack calls of the attempt; who has made them again sets it to None."""
        self._snapshots: list[FileSnapshot] = []
        """Each is made of the layers of those before it, too."""
        self.is_adopted = False
        """Whether an earlier worker started it. Its files are kept in no snapshot: they may be those of later calls
        than the one that is said again, and the layers below them go with that worker."""

    @property
    def sandbox(self) -> Sandbox:
        """The one that lives now."""
        assert self._sandbox is not None, "the block has begun"
        return self._sandbox

    async def __aenter__(self) -> Self:
        ticket = self._chat.marks.get(MARK)
        if ticket is None:
            await self._start()
        else:
            try:
                self._sandbox = await self._workspaces.host.adopt(unpacked(ticket))
                self.is_adopted = True
            except SandboxError as death:  # it ended with its worker, or waited too long for this one
                await self._replace(death)
        self._began = time.monotonic()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.sandbox.stop()
        while self._snapshots:
            try:
                await self._workspaces.host.forget(self._snapshots.pop())
            except SandboxError as error:
                logger.warning("a snapshot of task %s stays until its host ends: %s", self._task.id, error)

    async def keep_files(self) -> None:
        """Take a snapshot, from which `restart` begins. No process may run."""
        taking = asyncio.ensure_future(self.sandbox.snapshot())
        try:
            await asyncio.shield(taking)
        except asyncio.CancelledError:
            await asyncio.wait({taking})  # it takes milliseconds, and `__aexit__` forgets it
            raise
        finally:
            if taking.done() and not taking.cancelled() and taking.exception() is None:
                self._snapshots.append(taking.result())

    @property
    def has_snapshot(self) -> bool:
        """Whether the sandbox began, or its next one begins, with files that were kept."""
        return bool(self._snapshots)

    async def restart(self, death: SandboxDied) -> Sandbox:
        """Another sandbox with the files of the last snapshot, or of the beginning; raises `death` if not safe."""
        await self._replace(death)
        return self.sandbox

    def keep_time(self) -> None:
        """Keep the time that the agent has used, for a worker that takes over."""
        self._chat.mark(USED, round(self.used_before + time.monotonic() - self._began, 3))

    async def _replace(self, death: SandboxError) -> None:
        while True:
            self._restarts += 1
            if not self._task.safe_to_repeat or self._restarts > MOST_RESTARTS:
                raise death
            logger.warning("a sandbox of task %s is replaced: %s", self._task.id, death)
            self.behind = death
            if self._sandbox is not None:
                await self._sandbox.stop()
            try:
                return await self._start()
            except SandboxDied as error:  # the server was lost again
                death = error

    async def _start(self) -> None:
        self._sandbox = await self._of_snapshot() or await self._workspaces.start(self._task, self._labels)
        self.is_adopted = False
        self._chat.mark(MARK, packed(self.sandbox.ticket))

    async def _of_snapshot(self) -> Sandbox | None:
        """A sandbox with the files that were kept last; None if none are, or if they went with their server."""
        if not self._snapshots:
            return None
        try:
            return await self._workspaces.host.start(self.sandbox.spec, origin=self._snapshots[-1])
        except SnapshotLost as error:
            logger.warning("the snapshots of task %s are lost: %s", self._task.id, error)
            self._snapshots.clear()
            return None
