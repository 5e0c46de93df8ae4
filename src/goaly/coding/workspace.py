"""The clean state of each task, prepared once, and the sandboxes that begin in it.

    workspaces = Workspaces(host, settings.sandbox)
    sandbox = await workspaces.start(task)          # for an agent
    patch = await workspaces.patch(task, sandbox)   # what it changed
    grade = await grade(workspaces, task, patch)    # in a fresh sandbox

coding-1: an agent starts in a snapshot of files. No process of the setup, no network and no other commit is in it.
coding-2: the agent's patch is the difference of its files from the clean ones, computed on this side.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from goaly.grading.file_tree import FileTree
from goaly.grading.patch_reader import PatchProblem
from goaly.grading.patch_writer import patch_of
from goaly.grading.preparation import AGENT, CleanState, prepare
from goaly.grading.python_with_pytest import Toolbox, find_tools
from goaly.grading.task import CodingTask
from goaly.sandboxes.contract import Entry, SandboxDied, SandboxError, SandboxSpec, SnapshotLost
from goaly.sandboxes.sandbox import Sandbox, SandboxHost
from goaly.sandboxes.settings import SandboxSettings

TESTER: Final = 1001
MOST_NEW_BYTES: Final = 64 << 20
"""Most bytes that a workdir may have beside twice its clean files, with git's."""


@dataclass(slots=True)
class _Held:
    task: CodingTask
    prepared: asyncio.Task[CleanState]
    users: int = 0


class Workspaces:
    """Clean states of tasks at one host. The last `kept` ones that were used stay there."""

    def __init__(
        self,
        host: SandboxHost,
        settings: SandboxSettings,
        *,
        kept: int = 256,
        user: int | None = None,
        tester: int | None = None,
        files: Mapping[str, str] | None = None,
    ) -> None:
        """`files` are files and folders here that every sandbox has, by their paths there."""
        self.host = host
        self.settings = settings
        one_user = settings.backend == "namespaces" and os.geteuid() != 0
        self.user = user if user is not None else 0 if one_user else AGENT
        """Agents work as this user, if their task's files do not belong to another one."""
        self.tester = tester if tester is not None else 0 if one_user else TESTER
        """Hidden tests run as this user. The files belong to another one, if the sandboxes have several users."""
        self._files = files or {}
        self._kept = kept
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._tools: dict[object, asyncio.Task[Toolbox]] = {}

    @asynccontextmanager
    async def clean(self, task: CodingTask) -> AsyncIterator[CleanState]:
        """The task's clean state, which is kept at least as long as this lasts."""
        held = self._held.get(task.id)
        if held is None:
            held = self._held[task.id] = _Held(task, asyncio.create_task(self._prepare(task)))
        elif held.task is not task and held.task != task:
            raise ValueError(f"two different tasks have the id {task.id!r}")
        self._held.move_to_end(task.id)
        held.users += 1
        is_lost = False
        try:
            yield await asyncio.shield(held.prepared)
        except SnapshotLost:  # its server has ended
            is_lost = True
            raise
        finally:
            held.users -= 1
            if (is_lost or _failed(held.prepared)) and self._held.get(task.id) is held:
                del self._held[task.id]  # the next caller tries again
            await self._forget_old()

    async def start(self, task: CodingTask, labels: Mapping[str, str] | None = None) -> Sandbox:
        """A sandbox in the task's clean state, for an agent. The state is prepared again if its server has ended."""
        try:
            return await self._start(task, labels)
        except SnapshotLost:
            return await self._start(task, labels)

    async def _start(self, task: CodingTask, labels: Mapping[str, str] | None) -> Sandbox:
        async with self.clean(task) as clean:
            return await self.host.start(replace(clean.spec, labels=labels or {}), origin=clean.snapshot)

    async def patch(self, task: CodingTask, sandbox: Sandbox) -> str:
        """The agent's changes in its workdir; PatchProblem, which is the agent's fault, if they are too large."""
        async with self.clean(task) as clean:
            entries = await _files(task, sandbox, 2 * clean.tree.bytes + MOST_NEW_BYTES)
            return await asyncio.to_thread(_patch, clean.tree, entries)

    async def artifacts(self, task: CodingTask, sandbox: Sandbox) -> list[Entry]:
        """The task's artifacts that the agent left outside of its workdir, by their paths from the root."""
        found = []
        for path in task.artifacts:
            with suppress(FileNotFoundError):
                for entry in await sandbox.download(path, most_bytes=MOST_NEW_BYTES):
                    found.append(replace(entry, path=f"{path.strip('/')}/{entry.path}".rstrip("/")))
        return found

    async def close(self) -> None:
        """Forget the clean states at the host, which stays open."""
        for held in self._held.values():
            held.prepared.cancel()
        for tools in self._tools.values():
            tools.cancel()
        self._kept = 0
        await asyncio.gather(
            *(held.prepared for held in self._held.values()), *self._tools.values(), return_exceptions=True
        )
        await self._forget_old()
        for tools in self._tools.values():
            if not _failed(tools):
                with suppress(SandboxError):
                    await self.host.forget(tools.result().snapshot)

    async def _prepare(self, task: CodingTask) -> CleanState:
        try:
            return await self._prepare_once(task)
        except (SnapshotLost, SandboxDied):  # its server has ended, or that of the tools, which are laid in again
            return await self._prepare_once(task)

    async def _prepare_once(self, task: CodingTask) -> CleanState:
        where = (task.image or task.root or self.settings.root, task.environment.get("PATH"))
        if where not in self._tools:
            path = {} if where[1] is None else {"PATH": where[1]}
            self._tools[where] = asyncio.create_task(
                find_tools(self.host, replace(self._spec(task), environment=path), self._files)
            )
        finding = self._tools[where]
        try:
            return await prepare(self.host, task, self._spec(task), await asyncio.shield(finding), self.user)
        except BaseException as error:
            is_lost = _failed(finding) or isinstance(error, SnapshotLost)
            if is_lost and self._tools.get(where) is finding:  # or another task has found others
                del self._tools[where]
            raise

    def _spec(self, task: CodingTask) -> SandboxSpec:
        spec = self.settings.spec(image=task.image, limits=task.limits or self.settings.limits)
        return replace(spec, root=task.root or spec.root)

    async def _forget_old(self) -> None:
        for name, held in list(self._held.items()):
            if len(self._held) <= self._kept:
                return
            if held.users == 0 and held.prepared.done() and self._held.get(name) is held:  # others forget, too
                del self._held[name]
                if not _failed(held.prepared):
                    clean = held.prepared.result()
                    clean.tree.close()
                    with suppress(SandboxError):
                        await self.host.forget(clean.snapshot)


async def _files(task: CodingTask, sandbox: Sandbox, most_bytes: int) -> Sequence[Entry]:
    for readable in (False, True):
        try:
            return await sandbox.download(task.workdir, most_bytes=most_bytes)
        except FileNotFoundError:
            return []
        except PermissionError:
            if readable:
                raise PatchProblem(f"files of {task.workdir} cannot be read") from None
            await sandbox.run(["chmod", "-R", "u+rwX", task.workdir])
        except ValueError as error:
            raise PatchProblem(str(error)) from None
    raise AssertionError


def _failed(work: asyncio.Task[Any]) -> bool:
    return work.done() and (work.cancelled() or work.exception() is not None)


def _patch(tree: FileTree, entries: Sequence[Entry]) -> str:
    return patch_of(tree, tree.changes(entries))
