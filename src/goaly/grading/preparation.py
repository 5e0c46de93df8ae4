"""Prepares the sandbox of a task: repository, setup, one first commit, and the snapshot that others start from."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from goaly.grading.file_tree import FileTree
from goaly.grading.python_with_pytest import Toolbox
from goaly.grading.repository_files import repository_files
from goaly.grading.task import CodingTask, TaskProblem
from goaly.sandboxes.contract import CommandResult, FileSnapshot, SandboxSpec
from goaly.sandboxes.network import allow
from goaly.sandboxes.sandbox import Sandbox, SandboxHost

AGENT: Final = 1000
MOST_BYTES: Final = 1 << 30
PROXY_PORT: Final = 3128
QUIET_GIT: Final = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_AUTHOR_NAME": "goaly",
    "GIT_AUTHOR_EMAIL": "goaly@localhost",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "goaly",
    "GIT_COMMITTER_EMAIL": "goaly@localhost",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
}
GIT: Final = "git -c core.hooksPath=/dev/null -c safe.directory='*' -c gc.auto=0 -c core.fsmonitor=false"


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanState:
    """The state from which an agent starts, and with which its change is compared."""

    snapshot: FileSnapshot
    spec: SandboxSpec
    """Of an agent's sandbox."""
    tree: FileTree
    tools: Toolbox


async def prepare(host: SandboxHost, task: CodingTask, spec: SandboxSpec, tools: Toolbox, user: int) -> CleanState:
    """The clean state of a task; TaskProblem if its repository or its setup is at fault."""
    environment = {**task.environment, "PATH": tools.path}  # the task's own PATH is a part of it
    sandbox = await host.start(replace(spec, workdir="/", environment=environment), origin=tools.snapshot)
    try:
        user = await _lay_repository(sandbox, task, user)
        maker = _Maker(sandbox, task, user)
        await maker.check_out()
        await maker.set_up()
        tracked = await maker.drop_history()
        await maker.open_folders()
        try:
            tree = FileTree(await sandbox.download(task.workdir, most_bytes=MOST_BYTES, user=user))
        except ValueError as error:
            raise TaskProblem(
                f"task {task.id}: workdir={task.workdir}: {error}; must be a folder of the task"
            ) from None
        await maker.commit(None if tracked is None else [path for path in tracked if path in tree])
        return CleanState(
            snapshot=await sandbox.snapshot(),
            spec=replace(spec, workdir=task.workdir, environment=environment, user=user),
            tree=tree,
            tools=tools,
        )
    finally:
        await sandbox.stop()


async def _lay_repository(sandbox: Sandbox, task: CodingTask, user: int) -> int:
    """Upload the repository; the user to whom it belongs."""
    where = shlex.quote(task.workdir)
    owner = await sandbox.run(f"stat -c %u {where}", user=0)
    if task.repository.path is None:
        if not owner.ok:
            raise TaskProblem(f"task {task.id}: workdir={task.workdir}: no such folder in its image or root")
        return int(owner.stdout.text())
    entries = await asyncio.to_thread(repository_files, Path(task.repository.path), most_bytes=MOST_BYTES)
    if not owner.ok:
        above = shlex.quote(task.workdir.rpartition("/")[0] or "/")
        opened = await sandbox.run(f"mkdir -p {above} && stat -c %a {above} && chmod a+w {above}", user=0)
        made = await sandbox.run(["mkdir", task.workdir], user=user)
        closed = await sandbox.run(f"chmod {opened.stdout.text().strip()} {above}", user=0)
        for result in (opened, made, closed):
            _check(task, f"making {task.workdir}", result)
    else:
        user = int(owner.stdout.text())
    await sandbox.upload(entries, task.workdir, user=user)
    return user


class _Maker:
    def __init__(self, sandbox: Sandbox, task: CodingTask, user: int) -> None:
        self.sandbox = sandbox
        self.task = task
        self.user = user

    async def run(
        self,
        command: str,
        *,
        stdin: bytes = b"",
        seconds: float = 600.0,
        env: Mapping[str, str] | None = None,
        output_bytes: int = 65_536,
    ) -> CommandResult:
        return await self.sandbox.run(
            command,
            stdin=stdin,
            cwd=self.task.workdir,
            env=env,
            user=self.user,
            seconds=seconds,
            output_bytes=output_bytes,
        )

    async def check_out(self) -> None:
        commit = self.task.repository.base_commit
        if commit is None:
            return
        if not (await self.run("test -e .git")).ok:
            raise TaskProblem(f"task {self.task.id}: base_commit={commit!r}: its repository has no .git")
        command = f"{GIT} checkout -q -f --detach {shlex.quote(commit)}"
        _check(self.task, f"base_commit={commit!r}", await self.run(command, env=QUIET_GIT))

    async def set_up(self) -> None:
        if not self.task.setup:
            return
        proxy = await allow(self.sandbox, PROXY_PORT, self.task.setup_hosts) if self.task.setup_hosts else None
        address = f"http://127.0.0.1:{PROXY_PORT}"
        names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
        try:
            async with asyncio.timeout(self.task.seconds.setup):
                for command in self.task.setup:
                    variables = dict.fromkeys(names, address) if proxy else {}
                    result = await self.run(command, seconds=self.task.seconds.setup, env=variables)
                    _check(self.task, f"setup {command!r}", result)
        except TimeoutError:
            seconds = self.task.seconds.setup
            raise TaskProblem(f"task {self.task.id}: setup did not end in {seconds} seconds") from None
        finally:
            if proxy:
                proxy.close()
        for user in {self.user, 0}:
            await self.sandbox.run("kill -9 -1", user=user)  # a daemon that the setup has started

    async def drop_history(self) -> list[str] | None:
        """Remove every trace of git; the paths that it tracked."""
        tracked = None
        if (await self.run("test -e .git")).ok:
            listed = await self.run(f"{GIT} ls-files -z", env=QUIET_GIT, output_bytes=1 << 28)
            _check(self.task, "git ls-files", listed)
            names = listed.stdout.head + listed.stdout.tail
            tracked = names.decode(errors="surrogateescape").split("\0")[:-1]
        removed = await self.run("find . -name .git -prune -exec rm -rf {} +")
        _check(self.task, "removing the history", removed)
        return tracked

    async def open_folders(self) -> None:
        """Let other users make files in the folders, as tests do, but not change those that are there."""
        _check(self.task, "opening its folders", await self.run("find . -type d -exec chmod a+rwxt {} +"))

    async def commit(self, tracked: Sequence[str] | None) -> None:
        """One first commit of these files, or of everything."""
        if not (await self.run("command -v git")).ok:
            return
        add = f"{GIT} add -f -A ." if tracked is None else f"{GIT} add -f --pathspec-from-file=- --pathspec-file-nul"
        command = (
            f"git init -q --template= . && {add} && {GIT} commit -q --no-verify --allow-empty -m base"
            " && git config user.name agent && git config user.email agent@localhost"
        )
        names = "\0".join(tracked or ()).encode(errors="surrogateescape")
        _check(self.task, "the first commit", await self.run(command, stdin=names, env=QUIET_GIT))


def _check(task: CodingTask, what: str, result: CommandResult) -> None:
    if not result.ok:
        reason = f"exceeded its limit of {result.limit}" if result.limit else f"exit code {result.exit_code}"
        output = (result.stderr.text() or result.stdout.text()).strip()[-2000:]
        raise TaskProblem(f"task {task.id}: {what}: {reason}: {output}")
