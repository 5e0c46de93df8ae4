"""The tools of a coding agent in its sandbox: a shell that stays, edits of files, and the end of the work.

Whatever the policy does wrong is an observation that it can read. Only the sandbox's own errors are raised.
"""

from __future__ import annotations

import errno
import json
import os
import posixpath
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from goaly.base.json_text import bounded_json
from goaly.coding.changes import FileChanges
from goaly.coding.settings import CodingSettings
from goaly.coding.text_edits import CannotCall, inserted, replaced
from goaly.sandboxes.contract import CommandResult, Entry, Limit, SandboxDied, SandboxError
from goaly.sandboxes.sandbox import Sandbox
from goaly.sandboxes.shell import Shell

BASH, EDIT, SUBMIT = "bash", "edit", "submit"
SUBMITTED = "submitted"
SHELL_ENDED = "the shell has ended, the next command starts a new one"
ANSWER_SECONDS = 30.0
"""In which a sandbox that lives answers."""
MOST_EDITED_BYTES = 1 << 23
"""Of a file that `edit` changes."""

Record = Callable[[Mapping[str, Any]], None]
"""Keeps what a tool did."""


def _schema(name: str, description: str, required: tuple[str, ...] = (), **arguments: tuple[str, str]) -> Any:
    properties = {key: {"type": kind, "description": what} for key, (kind, what) in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


SCHEMAS: tuple[Mapping[str, Any], ...] = (
    _schema(
        BASH,
        "Run commands in a shell that stays: its folder, its variables and its background jobs are kept.",
        ("command",),
        command=("string", "the commands"),
    ),
    _schema(
        EDIT,
        "Change a file. With `old`: put `new` in place of it; `old` must be in the file exactly once. With `line`: "
        "insert `new` behind this line, 0 is the beginning. With neither: create the file with `new` in it.",
        ("path", "new"),
        path=("string", "the file"),
        new=("string", "the new text"),
        old=("string", "the exact text that is replaced"),
        line=("integer", "the number of the line"),
    ),
    _schema(SUBMIT, "End the work: the files are graded as they are now."),
)
"""The tools as JSON schemas, which the chat template renders."""


class Tools:
    """The tools of one attempt. `async with` ends the shell; the sandbox stays."""

    def __init__(
        self,
        sandbox: Sandbox,
        workdir: str,
        settings: CodingSettings,
        record: Record = lambda record: None,
        changes: FileChanges | None = None,
    ) -> None:
        """`record` gets each call with its end, and with `changes` the files that it changed."""
        self._sandbox = sandbox
        self._workdir = workdir
        self._settings = settings
        self._record = record
        self._changes = changes
        self._shell: Shell | None = None
        self.submitted = False
        """Whether the agent has said that it is done."""

    async def call(self, name: str, arguments: str) -> str:
        """Do a tool call with these arguments, as JSON text; what the policy sees of it."""
        try:
            given = _object(arguments)
            if name == BASH:
                return await self.bash(_argument(given, "command", str))
            if name == EDIT:
                old = _argument(given, "old", str) if given.get("old") is not None else None
                line = _argument(given, "line", int) if given.get("line") is not None else None
                return await self.edit(_argument(given, "path", str), _argument(given, "new", str), old=old, line=line)
            if name == SUBMIT:
                return self.submit()
            raise CannotCall(f"there is no tool {name!r}: the tools are {BASH}, {EDIT} and {SUBMIT}")
        except CannotCall as error:
            said = f"error: {error}"
            self._record({"tool": name, "arguments": arguments, "output": said})
            return said

    async def bash(self, command: str) -> str:
        """Run commands in the shell; their output, cut in the middle, and how they ended."""
        if "\0" in command:
            raise CannotCall("a command must not have a zero byte")
        if not self.has_shell:
            await self.open_shell()
        try:
            if self._shell is not None:
                ended = await self._shell.run(command, seconds=self._settings.command_seconds)
                return await self._told(command, ended)
        except SandboxDied:
            if not await self._answers():
                raise
        self._shell = None  # something of the agent's has ended it
        raise CannotCall(SHELL_ENDED)

    async def rest(self, arguments: str) -> str | None:
        """Wait for the end of a call of `bash` that runs already; None if it does not, or its end is not known."""
        ended = None if self._shell is None else await self._shell.rest(seconds=self._settings.command_seconds)
        return None if ended is None else await self._told(str(_object(arguments).get("command")), ended)

    async def _told(self, command: str, ended: CommandResult) -> str:
        output = said = ended.stdout.text()
        if notes := self._notes(ended):
            said = f"{output}{'' if output.endswith(chr(10)) or not output else chr(10)}{notes}"
        self._record(
            {
                "tool": BASH,
                "command": command,
                "output": output,
                "exit_code": ended.exit_code,
                "seconds": round(ended.seconds, 4),
                **({} if ended.limit is None else {"limit": str(ended.limit)}),
                **await self._changed(),
            }
        )
        return said

    async def edit(self, path: str, new: str, *, old: str | None = None, line: int | None = None) -> str:
        """Change or create a file; what was done."""
        if old is not None and line is not None:
            raise CannotCall("give `old` to replace a text, or `line` to insert one, not both")
        where = posixpath.normpath(posixpath.join(self._workdir, path))
        if "\0" in path or where == "/":
            raise CannotCall(f"path={path!r} is no file")
        try:
            if old is None and line is None:
                await self._create(where, new)
                said = f"created {path}"
            else:
                file = await self._file(where)
                text = file.contents.decode(errors="surrogateescape")
                changed, at = replaced(text, old, new) if old is not None else inserted(text, line or 0, new)
                await self._write(where, changed.encode(errors="surrogateescape"), file.mode)
                said = f"changed {path} at line {at}"
        except (OSError, UnicodeEncodeError) as error:
            raise CannotCall(f"{path}: {getattr(error, 'strerror', None) or error}") from error
        self._record(
            {
                "tool": EDIT,
                "path": path,
                "new": new,
                **({} if old is None else {"old": old}),
                **({} if line is None else {"line": line}),
                "output": said,
                **await self._changed(),
            }
        )
        return said

    def submit(self) -> str:
        """Say that the work is done."""
        self.submitted = True
        self._record({"tool": SUBMIT})
        return SUBMITTED

    async def _changed(self) -> Mapping[str, Any]:
        changed = {} if self._changes is None else await self._changes.since_last()
        return {"changes": changed} if changed else {}

    async def open_shell(self, script: str = "") -> None:
        """Open a shell that has run this script. There is none after this if the agent's own processes end it."""
        most = 2 * (self._settings.observation_bytes // 2)
        try:
            # the agent may have moved its workdir
            shell = await Shell.open(self._sandbox, output_bytes=most, cwd="/", one_stream=True)
            await shell.run(f"cd {shlex.quote(self._workdir)}\n{script}")
            self._shell = shell
        except SandboxDied:
            if not await self._answers():
                raise

    async def _answers(self) -> bool:
        """Whether the sandbox lives, whatever has become of the shell."""
        if not self._sandbox.alive():
            return False
        try:
            await self._sandbox.run(["true"], seconds=ANSWER_SECONDS)
        except SandboxError:
            return False
        except OSError:  # such as too many processes
            pass
        return True

    async def end_shell(self) -> str | None:
        """End the shell; the script that brings another one into its state. None: it has jobs, and stays."""
        if self._shell is None:
            return ""
        if self._shell.state[1]:
            return None
        script = await self._shell.script()
        await self._shell.close()
        self._shell = None
        return script

    @property
    def has_shell(self) -> bool:
        """Whether a shell was opened whose end the policy has not seen; it may be dead."""
        return self._shell is not None

    @property
    def shell_state(self) -> list[Any] | None:
        """The arguments of `adopt_shell`; None if there is no live shell."""
        return list(self._shell.state) if self._shell is not None and self._shell.alive else None

    def adopt_shell(self, count: int, jobs: Sequence[int]) -> None:
        """Go on with the shell of the sandbox's earlier owner, if it had one."""
        self._shell = Shell.adopted(self._sandbox, count, jobs)

    def move_to(self, sandbox: Sandbox) -> None:
        """Work in another sandbox, whose files are as they were here."""
        self._sandbox, self._shell = sandbox, None
        if self._changes is not None:
            self._changes.move_to(sandbox)

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """The block in which calls are made that have been recorded before."""
        record, self._record = self._record, lambda record: None
        try:
            yield
        finally:
            self._record = record

    def _notes(self, ended: CommandResult) -> str:
        """Facts that the output does not have."""
        assert self._shell is not None
        notes = []
        if ended.limit is Limit.TIME:
            notes.append(f"stopped after {self._settings.command_seconds:g} s")
        elif ended.limit is Limit.MEMORY:
            notes.append("a process was killed, because the memory was used up")
        if ended.exit_code and ended.limit is not Limit.TIME:
            notes.append(f"exit code {ended.exit_code}")
        if not self._shell.alive:
            self._shell = None
            notes.append(SHELL_ENDED)
        if not notes and not (ended.stdout.head or ended.stdout.tail):
            notes.append("no output")
        return f"[{'; '.join(notes)}]" if notes else ""

    async def _file(self, path: str) -> Entry:
        try:
            entries = await self._sandbox.download(path, most_bytes=MOST_EDITED_BYTES)
        except ValueError as error:
            raise CannotCall(str(error)) from error
        if len(entries) != 1 or entries[0].kind != "file":
            raise CannotCall(f"{path} is not a file")
        return entries[0]

    async def _write(self, path: str, contents: bytes, mode: int) -> None:
        try:
            await self._sandbox.write(path, contents, mode=mode)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            found = await self._sandbox.run(["readlink", "-f", path])  # files are not written through links
            if not found.ok:
                raise
            await self._sandbox.write(os.fsdecode(found.stdout.head.removesuffix(b"\n")), contents, mode=mode)

    async def _create(self, path: str, contents: str) -> None:
        try:
            await self._sandbox.download(path, most_bytes=1)
        except FileNotFoundError:
            await self._sandbox.write(path, contents.encode(errors="surrogateescape"))
            return
        except ValueError:
            pass  # it has more bytes
        raise CannotCall(f"{path} exists; give `old` to replace a part of it, or `line` to insert")

    async def __aenter__(self) -> Tools:
        if self._changes is not None:
            await self._changes.begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._shell is not None and self._sandbox.alive():
            await self._shell.close()


def _object(arguments: str) -> Mapping[str, Any]:
    try:
        given = bounded_json(arguments or "{}")
    except ValueError as error:
        raise CannotCall(f"the arguments are no JSON object: {error}") from error
    if not isinstance(given, Mapping):
        raise CannotCall(f"the arguments must be a JSON object, they are {json.dumps(given)[:80]}")
    return given


def _argument(given: Mapping[str, Any], name: str, kind: type) -> Any:
    value = given.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        wanted = "a text" if kind is str else "a whole number"
        raise CannotCall(f"`{name}` must be {wanted}" + ("" if name in given else ", it is missing"))
    return value
