"""Our own coding agents: the policy works on a task by tool calls, or by blocks of shell commands in its text.

An attempt goes on until the policy submits or a limit ends it. What it left in the sandbox is graded elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from goaly.agents.session import SessionExhausted
from goaly.coding.calls import Calls
from goaly.coding.command_blocks import command_blocks
from goaly.coding.settings import CodingSettings
from goaly.coding.tools import BASH, SCHEMAS, SUBMIT
from goaly.generate.policy import ContextFull, PromptFillsContext
from goaly.prompts.prompt import Message

if TYPE_CHECKING:
    from goaly.agents.chat import Chat


class End(StrEnum):
    """How an attempt ended."""

    SUBMITTED = "submitted"
    """The agent said that it is done."""
    TURNS = "turns"
    """It used all answers of `coding.turns` or `rollout.session`."""
    CONTEXT = "context"
    """Its chat filled the context."""
    NO_CALLS = "no_calls"
    """It went on without calls (`coding.reminders`)."""
    SECONDS = "seconds"
    """Its time was over."""
    MEMORY = "memory"
    """The sandbox's memory was used up, which ended its program."""


TOOLS_SYSTEM = """\
You are a software engineer. A repository is in {workdir}. Solve the task that you are given by changing its files.
Look around first, make the change, and run the tests. Call `submit` when you are done."""

TEXT_SYSTEM = """\
You are a software engineer. A repository is in {workdir}. Solve the task that you are given by changing its files.
Look around first, make the change, and run the tests.

Each of your answers has one block of shell commands, and the next message shows what they print:

```bash
ls
```

The shell stays: its folder and its variables are kept. When you are done, the block is only the word `submit`."""

CALL_REMINDER = "Call a tool. Call `submit` when you are done."
BLOCK_REMINDER = "Write one block of commands between ```bash and ```. When you are done, the block is `submit`."


async def by_tools(asked: Sequence[Message], chat: Chat, calls: Calls, settings: CodingSettings, workdir: str) -> End:
    """Let the policy work by native tool calls."""
    said, silent = begun(asked, settings.instructions, TOOLS_SYSTEM, workdir), 0
    for _ in range(settings.turns):
        answer = await _answer(chat, said, SCHEMAS)
        if isinstance(answer, End):
            return answer
        said.append(answer)
        for call in answer.tool_calls or ():
            function = call["function"]
            result = await calls.call(function["name"], function["arguments"])
            said.append(Message(role="tool", content=result, tool_call_id=call["id"], name=function["name"]))
            if calls.submitted:
                return End.SUBMITTED
        silent = 0 if answer.tool_calls else silent + 1
        if silent > settings.reminders:
            return End.NO_CALLS
        if silent:
            said.append(Message(role="user", content=CALL_REMINDER))
    return End.TURNS


async def by_text(asked: Sequence[Message], chat: Chat, calls: Calls, settings: CodingSettings, workdir: str) -> End:
    """Let the policy work by one fenced block of commands in each answer."""
    said, silent = begun(asked, settings.instructions, TEXT_SYSTEM, workdir), 0
    for _ in range(settings.turns):
        answer = await _answer(chat, said, ())
        if isinstance(answer, End):
            return answer
        said.append(answer)
        blocks = command_blocks(answer.content or "")
        silent = 0 if len(blocks) == 1 else silent + 1
        if silent > settings.reminders:
            return End.NO_CALLS
        if silent:
            said.append(Message(role="user", content=BLOCK_REMINDER))
        elif blocks[0].strip() == SUBMIT:
            await calls.call(SUBMIT, "{}")
            return End.SUBMITTED
        else:
            shown = await calls.call(BASH, json.dumps({"command": blocks[0]}))
            said.append(Message(role="user", content=shown))
    return End.TURNS


def begun(asked: Sequence[Message], instructions: str | None, default: str, workdir: str) -> list[Message]:
    """The messages of the chat's first request. A system message of the prompt's own stays alone."""
    system = default if instructions is None else instructions
    if not system or any(message.role == "system" for message in asked):
        return list(asked)
    return [Message(role="system", content=system.replace("{workdir}", workdir)), *asked]


async def _answer(chat: Chat, said: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Message | End:
    try:
        return await chat.say(said, tools)
    except PromptFillsContext:
        raise  # the task is too long for this policy
    except ContextFull:
        return End.CONTEXT
    except SessionExhausted:
        return End.TURNS
