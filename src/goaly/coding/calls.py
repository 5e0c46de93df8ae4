"""The tool calls of an attempt: each is made once, whoever dies meanwhile (coding-3).

What the policy saw of each call is in the marks of its chat. A worker that takes over says the same again from there,
waits for the command that was running, and goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from goaly.coding.held_sandbox import HeldSandbox
from goaly.coding.tools import BASH, SUBMIT, SUBMITTED, Tools
from goaly.sandboxes.contract import SandboxDied, SandboxError

if TYPE_CHECKING:
    from goaly.agents.chat import Chat

BEGUN, SHELL, SEEN = "call begun", "shell", "call {}"
"""Marks: the number of the newest call, the shell's state, and what the policy saw of each call."""
LOST: Final = "[the connection to this machine was lost while this ran; what it printed is not known]"
LOST_BEGINNING: Final = "[the connection to this machine was lost while this ran; its first output is not known]"


class Calls:
    """Makes the calls of an attempt, in order."""

    def __init__(self, tools: Tools, held: HeldSandbox, chat: Chat, snapshot_every: int | None = None) -> None:
        """The files are kept after every `snapshot_every` calls, for a sandbox that takes the place of this one."""
        self._tools = tools
        self._held = held
        self._chat = chat
        self._snapshot_every = snapshot_every
        self._number = -1
        self._calls: list[tuple[str, str]] = []
        """All calls of the attempt."""
        self._kept = 0
        """How many of them the newest snapshot has."""
        if held.is_adopted and (state := chat.marks.get(SHELL)) is not None:
            tools.adopt_shell(*state)

    @property
    def submitted(self) -> bool:
        """Whether the agent has said that it is done."""
        return self._tools.submitted

    async def call(self, name: str, arguments: str) -> str:
        """Do a tool call with these arguments, as JSON text; what the policy sees of it."""
        self._number += 1
        seen = self._chat.marks.get(SEEN.format(self._number))
        if seen is None:
            seen = await self._done(name, arguments)
        elif name == SUBMIT and seen == SUBMITTED:
            self._tools.submitted = True
        self._calls.append((name, arguments))
        every, is_current = self._snapshot_every, not self._held.is_adopted and self._held.behind is None
        if every is not None and len(self._calls) - self._kept >= every and is_current:
            await self._keep_files()
        return seen

    async def catch_up(self) -> None:
        """Make the calls again that the files of a new sandbox lack."""
        while (death := self._held.behind) is not None:
            if not self._held.has_snapshot:  # or it went with its server
                self._kept = 0
            lacking = self._calls[self._kept :]
            try:
                with self._tools.unrecorded():
                    for earlier in lacking:
                        await self._tools.call(*earlier)
                self._held.behind = None
                self._chat.note({"kind": "sandbox replaced", "why": str(death), "repeated": len(lacking)})
            except SandboxDied as error:
                await self._restart(error)

    async def _done(self, name: str, arguments: str) -> str:
        was_begun = self._chat.marks.get(BEGUN) == self._number
        while True:
            try:
                await self.catch_up()
                seen = await self._made(name, arguments, was_begun and self._held.is_adopted)
                break
            except SandboxDied as death:
                await self._restart(death)
        self._mark_shell()
        self._chat.mark(SEEN.format(self._number), seen)
        return seen

    async def _made(self, name: str, arguments: str, was_begun: bool) -> str:
        if name == BASH and not self._tools.has_shell:
            await self._tools.open_shell()
        self._mark_shell()
        self._chat.mark(BEGUN, self._number)
        self._held.keep_time()
        return await (self._rest_of(name, arguments) if was_begun else self._tools.call(name, arguments))

    async def _restart(self, death: SandboxDied) -> None:
        self._tools.move_to(await self._held.restart(death))

    def _mark_shell(self) -> None:
        state = self._tools.shell_state
        if self._chat.marks.get(SHELL) != state:
            self._chat.mark(SHELL, state)

    async def _rest_of(self, name: str, arguments: str) -> str:
        """The policy's view of a call that an earlier worker began."""
        if name == BASH and (seen := await self._tools.rest(arguments)) is not None:
            return f"{LOST_BEGINNING}\n{seen}"
        self._chat.note({"tool": name, "arguments": arguments, "output": LOST})
        return LOST

    async def _keep_files(self) -> None:
        """Keep the files as they are, unless jobs of the agent run. The shell ends for that, and the next one has its
        folder and variables."""
        script = await self._tools.end_shell()
        if script is None:
            return
        try:
            await self._held.keep_files()
            self._kept = len(self._calls)
        except SandboxDied:
            return  # the next call notices
        except (SandboxError, OSError) as error:  # such as processes that are no jobs of the shell
            self._chat.note({"kind": "no snapshot", "why": str(error)})
        await self._tools.open_shell(script)
        self._mark_shell()
