"""A session, and a policy and an agent that use it: what the tests of sessions share."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from chat_templates import Family

from goaly.agents.session import Session
from goaly.agents.settings import SessionSettings
from goaly.agents.turn import Continuation, Record, RecordedTurn
from goaly.generate.policy import Completion
from goaly.generate.request import Finish
from goaly.prompts.tokenizer import ChatTokenizer

Message = Mapping[str, Any]
MALFORMED = {
    "a call that cannot be read": '<tool_call>\n{"name": "add", "arguments": {"a": 2\n</tool_call>',
    "an unknown tool": '<tool_call>\n{"name": "subtract", "arguments": {"a": 2}}\n</tool_call>',
    "arguments that are no object": '<tool_call>\n{"name": "add", "arguments": [2]}\n</tool_call>',
}
PENALTY = SessionSettings(malformed_penalty=0.25)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("add", "search")
]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def tool(text: str, call: str = "call-0") -> Message:
    return {"role": "tool", "tool_call_id": call, "content": text}


def assistant(content: str = "", reasoning: str | None = None, *calls: Mapping[str, Any]) -> Message:
    """As the gateway returns it to a client."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call-{at}",
                "type": "function",
                "function": {"name": "add", "arguments": json.dumps(arguments)},
            }
            for at, arguments in enumerate(calls)
        ]
    return message


class Agent:
    """A session, with the policy and the log that it is tested with. Each sampled token has a log-probability of its
    own, so that it is recognized wherever it turns up."""

    def __init__(self, chat: ChatTokenizer, family: Family, **facts: Any):
        self.chat = chat
        self.family = family
        self.log: list[Record] = []
        self.facts = {"prompt_id": "q1", "sample_index": 2, "environment": "shop", **facts}
        self.session = Session(chat, log=self.log.append, **self.facts)
        self._sampled = 0

    def replayed(self) -> Session:
        """The session that its log describes, once written and read again."""
        return Session(self.chat, **self.facts).replay(json.loads(json.dumps(self.log)))

    def written(self, answer: Message, stop: int = 0) -> list[int]:
        """The tokens of an answer as the template renders it, with this stop token of its family."""
        return self.chat.encode(self.family.wrote(answer) + self.family.stops[stop])

    def completion(
        self, prompt: Sequence[int], tokens: Sequence[int], finish: Finish = Finish.STOP, **facts: Any
    ) -> Completion:
        count = torch.arange(self._sampled + 1, self._sampled + 1 + len(tokens), dtype=torch.float32)
        self._sampled += len(tokens)
        versions = torch.full((len(tokens),), 7 + self._sampled, dtype=torch.int32)
        return Completion(
            prompt=tuple(prompt),
            tokens=torch.tensor(tokens, dtype=torch.int64),
            logprobs=-count / 4096,
            versions=versions,
            finish=finish,
            text="",
            **facts,
        )

    def ask(
        self,
        messages: Sequence[Message],
        answer: Message,
        tools: Sequence[Mapping[str, Any]] = (),
        tokens: Sequence[int] | None = None,
        key: str | None = None,
        **facts: Any,
    ) -> tuple[Continuation, RecordedTurn]:
        """A request, answered with these tokens, by default those of the answer."""
        continuation = self.session.extend(messages, tools)
        completion = self.completion(continuation.prompt, self.written(answer) if tokens is None else tokens, **facts)
        return continuation, self.session.record(continuation, completion, answer, key)

    def say(self, messages: Sequence[Message], answer: Message, **more: Any) -> RecordedTurn:
        """The turn of `ask`."""
        return self.ask(messages, answer, **more)[1]

    def text(self, tokens: Sequence[int]) -> str:
        return self.chat.decode(tokens, skip_special_tokens=False)
