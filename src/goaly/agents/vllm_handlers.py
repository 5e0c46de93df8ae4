"""vLLM's serving classes over sessions: its protocols, validation and streams; our prompts, answers and records.

A request is placed in its session's tree where vLLM would render it, and answered where vLLM would ask its engine. The
message that vLLM's code returns is the one that the session has recorded, also in a stream (`answer_stream.py`).
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from vllm.config import ModelConfig, VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall, FunctionCall
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.inputs import tokens_input
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser import Parser
from vllm.renderers import renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import SamplingParams
from vllm.tool_parsers import ToolParser

from goaly.agents.answer_parser import AnswerParser
from goaly.agents.answer_stream import Piece, Reader
from goaly.agents.client_request import allowed, choice_of, given, read_messages, refusal
from goaly.agents.event_streams import Messages
from goaly.agents.http_session import EXCHANGE, Ask
from goaly.agents.refusals import as_refusal
from goaly.agents.session import SessionBusy, SessionExhausted
from goaly.agents.turn import Continuation
from goaly.generate.request import Finish
from goaly.prompts.tokenizer import Room, beside

MODEL = "policy"
"""The name under which the policy is listed. Requests may name any model."""


class VllmHandlers:
    """The handlers of each API, for the model in a folder."""

    def __init__(self, folder: str, max_context: int, answers: AnswerParser):
        """`answers` reads those of all sessions."""
        config = ModelConfig(
            model=folder, max_model_len=max_context, dtype="float32", generation_config="vllm", enforce_eager=True
        )
        config.hf_config.model_type = "policy"  # gpt-oss would take another way, past the session
        vllm_config = VllmConfig(model_config=config)
        engine: Any = cast(Any, _Engine)(vllm_config)
        parser = type("Recorded", (_RecordedParser,), {"tool_parser_cls": ToolParser if answers.reads_calls else None})
        renderer = _SessionRenderer(
            config,
            engine.renderer,
            request_logger=None,
            chat_template=answers.chat.template,  # vLLM asks it whether system messages may be anywhere
            chat_template_content_format="string",
            enable_auto_tools=True,
        )
        renderer.parser = parser
        renderer.reads_calls = answers.reads_calls
        models = OpenAIServingModels(engine, [BaseModelPath(name=MODEL, model_path=MODEL)])
        shared: dict[str, Any] = {"request_logger": None, "online_renderer": renderer}
        chat: dict[str, Any] = {
            **shared,
            "chat_template": None,
            "chat_template_content_format": "string",
            "enable_auto_tools": True,
        }
        self.models = models
        self.chat = _Chat(engine, models, "assistant", **chat)
        self.messages = Messages(engine, models, "assistant", **chat)
        self.responses = _Responses(engine, models, **chat)
        self.completions = _Completion(engine, models, **shared)
        self.chat.parser_cls = self.messages.parser_cls = self.responses.parser = parser
        for api in (self.chat, self.messages, self.completions):
            api._base_request_id = _call_id


def _call_id(raw_request: Any, default: str | None = None) -> str | None:
    """The id of the call under way, which all its retries get, also if the client or a proxy sends one of its own."""
    call = EXCHANGE.get().call
    return default if call is None else call.id


class _SessionRenderer(OnlineRenderer):
    """Places requests in their session's tree."""

    reads_calls: bool

    async def render_chat(self, request: ChatCompletionRequest, *, skip_mm_cache: bool = False) -> Any:
        tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]  # as vLLM renders them
        return await self.preprocess_chat(request, list(request.messages), None, "string", None, tools)

    async def preprocess_chat(
        self,
        request: Any,
        messages: list[Any],
        default_template: Any,
        default_template_content_format: Any,
        default_template_kwargs: Any,
        tool_dicts: list[dict[str, Any]] | None = None,
        parser: Any = None,
        *,
        skip_mm_cache: bool = False,
    ) -> Any:
        exchange = EXCHANGE.get()
        exchange.is_read = True
        if tool_dicts is not None and not self.reads_calls:
            raise refusal("tools", "set chat.tool_parser, which reads the calls in answers")
        variables = request.build_chat_params(None, "string").chat_template_kwargs
        tools = tool_dicts or []
        said = read_messages(messages, self.model_config, exchange.http_session.parser.chat.reads_parts(tools))
        args = {key: value for key, value in variables.items() if key not in _OURS and value is not None}
        name = "input" if isinstance(request, ResponsesRequest) else "messages"
        room = partial(exchange.http_session.check_room, exchange.call, parameter=name, trained=exchange.trained)
        extend = partial(exchange.http_session.session.extend, said, tools, args, room)
        continuation = await beside([said, tools], extend)
        exchange.http_session.parser.check_template_args(continuation.request.template_args)
        request, tools = allowed(request, tools)
        one_call = request.parallel_tool_calls is False
        return [], [_asked(request, continuation, room, tools=tools, choice=choice_of(request), one_call=one_call)]

    async def preprocess_completion(
        self, request: Any, prompt_input: Any, prompt_embeds: Any, *, skip_mm_cache: bool = False
    ) -> Any:
        exchange = EXCHANGE.get()
        exchange.is_read = True
        is_text = isinstance(prompt_input, str)
        is_tokens = bool(prompt_input) and all(type(token) is int for token in prompt_input or ())
        if prompt_embeds is not None or not (is_text or is_tokens):
            raise refusal("prompt", "must be one text or one list of token ids")
        room = partial(exchange.http_session.check_room, exchange.call, parameter="prompt", trained=exchange.trained)
        extend = partial(exchange.http_session.session.extend_text, prompt_input, room)
        continuation = await beside(prompt_input if is_text else "", extend)
        return [_asked(request, continuation, room, tools=(), plain=True)]


def _asked(request: Any, continuation: Continuation, room: Room, *, plain: bool = False, **facts: Any) -> Any:
    """The prompt of the request under way, which becomes that of its exchange. Refuses it before vLLM checks its
    length."""
    exchange, prompt, chat = EXCHANGE.get(), list(continuation.prompt), None if plain else continuation.request
    exchange.ask = Ask(
        continuation=continuation,
        given=given(request),
        answers=getattr(request, "n", 1) or 1,
        plain=plain,
        structured_outputs=exchange.http_session.parser.structured_outputs(request, chat),
        streams=bool(request.stream),
        trained=exchange.trained,
        **facts,
    )
    room(len(prompt))
    return tokens_input(prompt)


_OURS = ("add_generation_prompt", "continue_final_message", "documents", "tools", "tokenize", "chat_template")


class _RecordedParser(Parser):
    """Reads the recorded message where vLLM's code parses the text of an answer."""

    def __init__(self, tokenizer: Any, tools: Any = None, *_: Any, **__: Any):
        self.model_tokenizer = tokenizer
        self._reasoning_parser = self._tool_parser = None

    def is_reasoning_end(self, input_ids: list[int]) -> bool:
        return True

    def parse(
        self, model_output: str, request: Any, enable_auto_tools: bool = False, model_output_token_ids: Any = ()
    ) -> tuple[str | None, str | None, list[FunctionCall] | None]:
        returned, tokens = EXCHANGE.get().returned, list(model_output_token_ids)
        message = returned.pop(next(at for at, turn in enumerate(returned) if turn.tokens.tolist() == tokens)).message
        calls = [FunctionCall(id=call["id"], **call["function"]) for call in message.get("tool_calls") or ()]
        return message.get("reasoning_content"), message.get("content"), calls

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> DeltaMessage | None:
        return EXCHANGE.get().delta


def _deltas(piece: Piece) -> list[DeltaMessage | None]:
    """The parts of a piece that clients get, one after the other: reasoning, text, and each call."""
    deltas: list[DeltaMessage | None] = []
    if piece.reasoning:
        deltas.append(DeltaMessage(reasoning=piece.reasoning))
    if piece.content:
        deltas.append(DeltaMessage(content=piece.content))
    for number, call in enumerate(piece.calls):
        function = DeltaFunctionCall(**call["function"])
        called = DeltaToolCall(id=call["id"], type="function", index=number, function=function)
        deltas.append(DeltaMessage(tool_calls=[called]))
    return deltas or [None if piece.finish is None else DeltaMessage(content="")]


class _Versioned:
    """Names the policy version that answers the request under way."""

    @property
    def system_fingerprint(self) -> str | None:
        exchange = EXCHANGE.get()
        return exchange.http_session.fingerprint(exchange.call)

    @system_fingerprint.setter
    def system_fingerprint(self, _: str | None) -> None:  # vLLM's own, of its settings
        pass


class _Chat(_Versioned, OpenAIServingChat):  # type: ignore[inconsistent-inheritance]
    pass


class _Completion(_Versioned, OpenAIServingCompletion):  # type: ignore[inconsistent-inheritance]
    pass


class _Responses(OpenAIServingResponses):
    """Finds the conversation of a `previous_response_id` in the session, which is the only store."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.response_store = cast(Any, SimpleNamespace(get=self._earlier))
        self.msg_store = cast(Any, SimpleNamespace(get=self._earlier_messages))

    @staticmethod
    def _earlier(response_id: str) -> Any:
        is_one = len(EXCHANGE.get().http_session.answered(response_id)) == 1  # a chat may have several answers
        return SimpleNamespace(id=response_id, output=[]) if is_one else None

    @staticmethod
    def _earlier_messages(response_id: str) -> list[dict[str, Any]]:
        (turn,) = EXCHANGE.get().http_session.answered(response_id)
        return [*(message.as_dict() for message in turn.request.messages), {"role": "assistant", **turn.message}]


class _Engine(EngineClient):
    """Answers requests from their sessions."""

    def __init__(self, vllm_config: VllmConfig):
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.renderer = renderer_from_config(vllm_config)
        self.input_processor = cast(Any, None)

    is_running = True  # type: ignore[bad-override]
    is_stopped = errored = False  # type: ignore[bad-override]
    dead_error = None  # type: ignore[bad-override]

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Refuse what the session's limits do not allow, while the response can still have a status."""
        exchange = EXCHANGE.get()
        if exchange.call is None or exchange.call.work is not None or exchange.http_session.recorded(exchange.call):
            return
        try:
            with exchange.http_session.session.sampling(n):
                pass
        except (SessionExhausted, SessionBusy) as error:
            raise as_refusal(error) from error

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        exchange = EXCHANGE.get()
        assert exchange.ask is not None
        assert exchange.call is not None
        served, tokens = exchange.http_session, list(prompt["prompt_token_ids"])
        try:
            if not exchange.ask.streams:
                exchange.returned = list(await served.answers(exchange.call, exchange.ask))
                wholes = [Reader().rest(turn) for turn in exchange.returned]
                outputs = [_output(number, whole, whole.content) for number, whole in enumerate(wholes)]
                yield RequestOutput(request_id, None, tokens, None, outputs, finished=True)
                return
            async with aclosing(served.pieces(exchange.call, exchange.ask)) as pieces:
                async for number, piece in pieces:
                    deltas = _deltas(piece)
                    for at, delta in enumerate(deltas):
                        exchange.delta, text = delta, "" if delta is None else delta.content or ""
                        output = _output(number, piece, text, first=at == 0, last=at == len(deltas) - 1)
                        yield RequestOutput(request_id, None, tokens, None, [output], finished=False)
        except Exception as error:
            raise as_refusal(error) from error


def _output(number: int, piece: Piece, text: str, first: bool = True, last: bool = True) -> CompletionOutput:
    """A piece of an answer, or a part of it; the first part has its tokens, the last one its end."""
    ended = None if piece.finish is None else "length" if piece.finish is Finish.LENGTH else "stop"
    tokens, logprobs = (piece.tokens, piece.logprobs) if first else ([], [])
    return CompletionOutput(
        index=number,
        text=text,
        token_ids=tokens,
        cumulative_logprob=None,
        logprobs=[{token: Logprob(value, rank=None)} for token, value in zip(tokens, logprobs, strict=True)],
        finish_reason=ended if last else None,
    )


# The engine's other methods are of no use here: no route reaches them.
_Engine.__abstractmethods__ = frozenset()  # type: ignore[missing-attribute]
