"""The message in an answer of the policy: its text, its reasoning and its tool calls, read by vLLM's parsers.

An answer in which a parser finds no call that is whole stays text, as the policy wrote it.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from goaly.agents.answer_stream import AnswerReading, AnswerStream
from goaly.generate.request import AT_ONCE
from goaly.prompts.prompt import ASSISTANT, Message
from goaly.prompts.settings import ChatSettings
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.rollout.policy import Completion

ToolChoice = str | Mapping[str, Any]
"""As in OpenAI's chats: `auto`, `none`, `required`, or the one tool that must be called."""

FREE = (None, "auto", "none")
"""Choices of tools that force no call."""
_CALL = re.compile("call|tool|tc_")


class AnswerParser:
    """Reads answers with the parsers of these settings; without any, an answer is its text."""

    def __init__(self, chat: ChatTokenizer, settings: ChatSettings):
        self._chat = chat
        self._settings = settings
        self._parser: Any = None

    @property
    def reads_calls(self) -> bool:
        """Whether it finds tool calls."""
        return self._settings.tool_parser is not None

    def load(self) -> None:
        """Import the parsers, which takes seconds. To be called before the first answer."""
        settings = self._settings
        if settings.tool_parser is None and settings.reasoning_parser is None:
            return
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.parser import ParserManager
        from vllm.tokenizers import get_tokenizer

        self._request = ChatCompletionRequest
        self._tokenizer = get_tokenizer(str(self._chat.folder))
        self._parser = ParserManager.get_parser(
            tool_parser_name=settings.tool_parser,
            reasoning_parser_name=settings.reasoning_parser,
            enable_auto_tools=True,
            tokenizer=self._tokenizer,
        )
        tools = getattr(self._parser, "tool_parser_cls", None)
        self._starts = [] if tools is None else starts_of_calls(tools(self._tokenizer, None))

    def message(
        self,
        completion: Completion,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        choice: ToolChoice = "auto",
        one_call: bool = False,
    ) -> Message:
        """The assistant's message in this answer, without the stop string that ended it; `tools` are those that it was
        told of. With `choice="none"` tool calls stay in the text, with `one_call` the first one is kept."""
        text = self.text(completion, skip_special_tokens=self._parser is None)
        if self._parser is None:
            return Message(role=ASSISTANT, content=text)
        choice = choice if tools else "none"
        reasoning, content, parsed = self._parsed(text, completion, tools, choice)
        if choice not in FREE and not parsed and content is None:  # vLLM drops a forced call that is not whole
            reasoning, content, _ = self._parsed(text, completion, tools, "none")
        found = [
            {
                "id": call.id or f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in (parsed or ())[: 1 if one_call else None]
        ]
        return Message(
            role=ASSISTANT, content=content, reasoning_content=reasoning or None, tool_calls=tuple(found) or None
        )

    def stream(
        self,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        choice: ToolChoice = "auto",
        plain: bool = False,
        stops: Sequence[str] = (),
        on_piece: Callable[[], None] = lambda: None,
    ) -> AnswerStream:
        """Reads one answer while it is sampled, as `message` reads the whole; with `plain` as `text` does."""
        is_text = plain or self._parser is None
        decode = partial(self._chat.decode, skip_special_tokens=is_text)
        reading = None if is_text else self._reading(tools, choice if tools else "none")
        return AnswerStream(decode, stops, reading, on_piece)

    def as_shown(self, message: Message, completion: Completion, stream: AnswerStream) -> Message:
        """The message of this answer, of which clients have seen the stream."""
        return stream.agreed(message, self._written(completion), completion.stop)

    def structured_outputs(self, request: Any, *, at_once: bool = False) -> dict[str, Any] | None:
        """The form that the answer to this request of an API must have, as in `Sampling`: the one that it asks for, or
        that of the tool calls that it forces; None if any will do. `at_once`: no reasoning comes before it."""
        if getattr(request, "tool_choice", None) not in FREE:
            request = self._parser(self._tokenizer, request.tools).adjust_request(request.model_copy())
        form = request.extract_structured_outputs()
        if form is None:
            return None
        from vllm.sampling_params import check_json_nesting

        check_json_nesting(form.json)  # its pickle would fail
        check_json_nesting(form.structural_tag, structural_tag=True)
        asked = {
            key: value
            for key, value in vars(form).items()
            if value is not None and (value is not False or key == "json_object")  # which the engine refuses
        }
        return {**asked, AT_ONCE: True} if at_once else asked

    def malformed_calls(
        self, message: Message, tools: Sequence[Mapping[str, Any]] = (), choice: ToolChoice = "auto"
    ) -> int:
        """The number of calls in an answer that are none: text that begins as a call does but cannot be read, calls of
        unknown tools, calls whose arguments are no JSON object, and the call that `choice` forces if there is none."""
        if not self.reads_calls or not tools or choice == "none":
            return 0
        known = {tool["function"]["name"] for tool in tools}
        calls = [call["function"] for call in message.tool_calls or ()]
        wrong = sum(call["name"] not in known or not _is_object(call["arguments"]) for call in calls)
        is_broken = any(start in (message.content or "") for start in self._starts)
        return wrong + (is_broken or (choice not in FREE and not calls))

    def text(self, completion: Completion, *, skip_special_tokens: bool = True) -> str:
        """The text of the answer without the stop token or the stop string that ended it."""
        stop = completion.stop
        text = self._chat.decode(self._written(completion), skip_special_tokens=skip_special_tokens)
        return text if stop is None or stop not in text else text[: text.rfind(stop)]

    def _parsed(
        self, text: str, completion: Completion, tools: Sequence[Mapping[str, Any]], choice: ToolChoice
    ) -> tuple[Any, Any, Any]:
        reading, tokens = self._reading(tools, choice), self._written(completion)
        return reading.parser.parse(text, reading.request, enable_auto_tools=True, model_output_token_ids=tokens)

    def _reading(self, tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> AnswerReading:
        request = self._request(messages=[], tools=list(tools) or None, tool_choice=choice)
        return AnswerReading(self._parser(self._tokenizer, request.tools), request)

    def _written(self, completion: Completion) -> list[int]:
        """The tokens of the answer without the stop token."""
        tokens = completion.tokens.tolist()
        return tokens[:-1] if tokens and tokens[-1] in self._chat.stop_token_ids else tokens


def starts_of_calls(parser: object) -> list[str]:
    """The texts that begin a tool call, as far as vLLM's parser names them: `pythonic` and some others name none."""
    named = [name for name in dir(parser) if name.startswith("bot_") or ("start" in name and _CALL.search(name))]
    found = {value for name in named if isinstance(value := getattr(parser, name, None), str) and value.strip()}
    return sorted(found)


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False
