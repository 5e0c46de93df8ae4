"""A policy whose answers are known: it stands where an episode's chat is."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from goaly.prompts.prompt import ASSISTANT, Message


class ScriptedChat:
    """Gives these answers, one after the other, and keeps the messages that it was shown. An exception is raised."""

    def __init__(self, *answers: Message | Exception):
        self._answers: Iterator[Message | Exception] = iter(answers)
        self.shown: list[list[Message]] = []

    async def say(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Message:
        self.shown.append(list(messages))
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def last(self) -> str:
        """The text of the newest message that it was shown."""
        return self.shown[-1][-1].content


def calls(*named: tuple[str, Mapping[str, Any]]) -> Message:
    """An answer that calls these tools."""
    made = [
        {"id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
        for at, (name, given) in enumerate(named)
    ]
    return Message(role=ASSISTANT, content=None, tool_calls=made)


def bash(command: str) -> Message:
    return calls(("bash", {"command": command}))


def text(content: str) -> Message:
    return Message(role=ASSISTANT, content=content)


def block(commands: str) -> Message:
    return text(f"I look first.\n\n```bash\n{commands}\n```\n")


SUBMIT = calls(("submit", {}))
