"""The message in an answer of the policy: its text, its reasoning and its tool calls, read by vLLM's parsers.

An answer in which a parser finds no call that is whole stays text, as the policy wrote it.
"""

import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from goaly.agents.answer_stream import AnswerReading, AnswerStream
from goaly.agents.conversation import Conversation
from goaly.base.json_text import bounded_json
from goaly.generate.policy import Completion
from goaly.generate.request import AT_ONCE, TEMPLATE_ARGS
from goaly.prompts.prompt import ASSISTANT, Message
from goaly.prompts.settings import ChatSettings
from goaly.prompts.tokenizer import ChatTokenizer

logger = logging.getLogger(__name__)

ToolChoice = str | Mapping[str, Any]
"""As in OpenAI's chats: `auto`, `none`, `required`, or the one tool that must be called."""

FREE = (None, "auto", "none")
"""Choices of tools that force no call."""
_CALL = re.compile("call|tool|tc_")
_ENGINE_START = re.compile("TOOL(?!.*(END|ERROR|TEXT))")
_PYTHONIC = {
    name: re.compile(r"\s*(<\|python_start\|>)?\s*\[\s*[A-Za-z_][\w.]*\(") for name in ("pythonic", "llama4_pythonic")
}
"""The beginning of an answer that is a list of Python calls, by the parsers of such answers."""


class AnswerParser:
    """Reads answers with the parsers of these settings; without any, an answer is its text."""

    def __init__(self, chat: ChatTokenizer, settings: ChatSettings):
        self.chat = chat
        self._settings = settings
        self._parser: Any = None

    @property
    def reads_calls(self) -> bool:
        """Whether it finds tool calls."""
        return self._settings.tool_parser is not None

    def load(self) -> None:
        """Import the parsers, which takes seconds, if it has not. To be called before the first answer."""
        settings = self._settings
        if self._parser is not None or settings.tool_parser is settings.reasoning_parser is None:
            return
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.parser import ParserManager
        from vllm.tokenizers import get_tokenizer

        self._request = ChatCompletionRequest
        self._tokenizer = get_tokenizer(str(self.chat.folder))
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
        template_args: Mapping[str, Any] | None = None,
    ) -> Message:
        """The assistant's message in this answer, without the stop string that ended it; `tools` are those of the
        request. With `choice="none"` tool calls stay in the text, with `one_call` the first one is kept.
        `template_args` are those of the request: they may say that the answer has no reasoning."""
        text = self.text(completion, skip_special_tokens=self._parser is None)
        if self._parser is None:
            return Message(role=ASSISTANT, content=text)
        choice = choice if tools else "none"
        arguments = self._merged(template_args or {})
        read = self._parsed(text, completion, tools, choice, arguments)
        is_dropped = read is not None and choice not in FREE and not read[2] and read[1] is None
        if read is None or is_dropped:  # vLLM drops a forced call that is not whole
            read = self._parsed(text, completion, tools, "none", arguments)
        reasoning, content, parsed = read or (None, text, None)
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
        template_args: Mapping[str, Any] | None = None,
    ) -> AnswerStream:
        """Reads one answer while it is sampled, as `message` reads the whole; with `plain` as `text` does."""
        is_text = plain or self._parser is None
        decode = partial(self.chat.decode, skip_special_tokens=is_text)
        reading = (
            None if is_text else self._reading(tools, choice if tools else "none", self._merged(template_args or {}))
        )
        return AnswerStream(decode, stops, reading, on_piece)

    def as_shown(self, message: Message, completion: Completion, stream: AnswerStream) -> Message:
        """The message of this answer, of which clients have seen the stream."""
        return stream.agreed(message, self._written(completion), completion.stop)

    def check_template_args(self, args: Mapping[str, Any]) -> None:
        """Raise ValueError if the parsers cannot read an answer to a request with these arguments of the template."""
        if not args or self._parser is None:
            return
        from vllm.sampling_params import check_json_nesting

        try:
            check_json_nesting(dict(args))  # their pickle would fail
            self._parser_of(None, self._merged(args))
        except Exception as error:  # whatever parsers raise
            raise ValueError(f"chat_template_kwargs: the parsers cannot read answers with them: {error}") from error

    def structured_outputs(self, request: Any, chat: Conversation | None) -> dict[str, Any] | None:
        """The form that the answer to this request of an API must have, as in `Sampling`: the one that it asks for, or
        that of the tool calls that it forces; None if any will do. In an answer to a text (`chat=None`) no reasoning
        comes before it."""
        if getattr(request, "tool_choice", None) not in FREE:
            assert chat is not None
            parser = self._parser_of(request.tools, self._merged(chat.template_args))
            request = parser.adjust_request(request.model_copy())
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
        if chat is None:
            return {**asked, AT_ONCE: True}
        return asked if self._settings.reasoning_parser is None else {**asked, **self._reasoning(chat)}

    def malformed_calls(
        self,
        message: Message,
        completion: Completion,
        tools: Sequence[Mapping[str, Any]] = (),
        choice: ToolChoice = "auto",
    ) -> int:
        """The number of attempts at tool calls in an answer that are not valid calls: text that begins as a call does
        but cannot be read, calls of unknown tools, calls whose arguments are no JSON object, and the call that `choice`
        forces if there is none."""
        if not self.reads_calls or not tools or choice == "none":
            return 0
        known = {tool["function"]["name"] for tool in tools}
        calls = [call["function"] for call in message.tool_calls or ()]
        wrong = sum(call["name"] not in known or not is_object(call["arguments"]) for call in calls)
        text = message.content or ""
        if not calls:  # some parsers drop a call that they cannot read from the content
            text = self.text(completion, skip_special_tokens=False).replace(message.reasoning_content or "", "", 1)
        listed = _PYTHONIC.get(self._settings.tool_parser or "")
        is_broken = any(start in text for start in self._starts) or (
            listed is not None and not calls and listed.match(text) is not None
        )
        if not self._starts and not calls:
            is_broken |= self._parsed(text, completion, tools, choice, self._merged({})) is None
        return wrong + (is_broken or (choice not in FREE and not calls))

    def text(self, completion: Completion, *, skip_special_tokens: bool = True) -> str:
        """The text of the answer without the stop token or the stop string that ended it."""
        stop = completion.stop
        text = self.chat.decode(self._written(completion), skip_special_tokens=skip_special_tokens)
        return text if stop is None or stop not in text else text[: text.rfind(stop)]

    def _merged(self, template_args: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments that the template has in a chat whose request has these."""
        return {**self._settings.template_args, **template_args}

    def _parser_of(self, tools: Any, template_args: Mapping[str, Any]) -> Any:
        return self._parser(self._tokenizer, tools, chat_template_kwargs=dict(template_args))  # some parsers change it

    def _reasoning(self, chat: Conversation) -> dict[str, Any]:
        """Whether the reasoning of the next answer to this chat has ended before its first token, and the arguments
        with which its end is found. Parsers would take the end of an earlier answer's reasoning for it, so they get
        only the tokens that begin the next answer."""
        args = self._merged(chat.template_args)
        text, before = (
            self.chat.render_text(chat.messages, is_next, chat.tools, chat.template_args) for is_next in (True, False)
        )
        begun = self.chat.encode(text.removeprefix(before))
        return {AT_ONCE: self._parser_of(None, args).is_reasoning_end(begun), TEMPLATE_ARGS: args}

    def _parsed(
        self,
        text: str,
        completion: Completion,
        tools: Sequence[Mapping[str, Any]],
        choice: ToolChoice,
        template_args: Mapping[str, Any],
    ) -> tuple[Any, Any, Any] | None:
        """The reasoning, the text and the calls in an answer; None if the parser cannot read it."""
        reading, tokens = self._reading(tools, choice, template_args), self._written(completion)
        try:
            read = reading.parser.parse(text, reading.request, enable_auto_tools=True, model_output_token_ids=tokens)
            for call in read[2] or ():
                f"{call.name}{call.arguments}".encode()  # ValueError for a lone surrogate, which no client can get
        except Exception as error:  # whatever parsers raise, such as RecursionError
            logger.info("the answer stays text, the parser cannot read it: %s: %s", type(error).__name__, error)
            return None
        return read

    def _reading(
        self, tools: Sequence[Mapping[str, Any]], choice: ToolChoice, template_args: Mapping[str, Any]
    ) -> AnswerReading:
        request = self._request(messages=[], tools=list(tools) or None, tool_choice=choice)
        return AnswerReading(self._parser_of(request.tools, template_args), request)

    def _written(self, completion: Completion) -> list[int]:
        """The tokens of the answer without the stop token."""
        tokens = completion.tokens.tolist()
        return tokens[:-1] if tokens and tokens[-1] in self.chat.stop_token_ids else tokens


def starts_of_calls(parser: object) -> list[str]:
    """The texts that begin a tool call, as far as vLLM's parser names them (`docs/agent_endpoint.md`)."""
    named = [name for name in dir(parser) if name.startswith("bot_") or ("start" in name and _CALL.search(name))]
    values = [getattr(parser, name, None) for name in named]
    if (engine := getattr(parser, "_parser_engine", None)) is not None:
        terminals = engine.parser_engine_config.terminals
        for text in (text for name, text in terminals.items() if _ENGINE_START.match(name)):
            values += [text] if isinstance(text, str) else text
    return sorted({value for value in values if isinstance(value, str) and value.strip()})


def is_object(arguments: str) -> bool:
    """Whether the arguments of a call are a JSON object."""
    try:
        return isinstance(bounded_json(arguments), dict)
    except ValueError:
        return False
