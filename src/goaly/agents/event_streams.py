"""The server-sent events of a stream: those of vLLM's code, errors in the middle, and what keeps a silent one alive."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Send
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesResponse
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.openai.responses.api_router import _convert_stream_to_sse_events
from vllm.entrypoints.serve import create_error_response

from goaly.agents.answer_parser import is_object
from goaly.agents.conversation import MALFORMED_INPUT
from goaly.agents.refusals import kind_of

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 10.0
"""Seconds of silence after which a stream sends a sign of life, such as while its request waits or a tool call is
sampled: clients and proxies give up a silent connection."""
COMMENT, PING = ": keep-alive\n\n", 'event: ping\ndata: {"type": "ping"}\n\n'
_DATA = "data: "
_FAILED = _DATA + '{"error"'
_THINKING = '"content_block":{"type":"thinking","thinking":""}'
_SIGNED = '"content_block":{"type":"thinking","thinking":"","signature":""}'
_CALLS = '"tool_calls":[{'


class EventStream(StreamingResponse):
    """Sends events, and something else after each `KEEP_ALIVE_SECONDS` without one."""

    def __init__(self, events: AsyncGenerator[str], silence: str):
        super().__init__(events, media_type="text/event-stream")
        self._events, self._silence = events, silence.encode()

    async def stream_response(self, send: Send) -> None:
        loop, self._sent, self._send = asyncio.get_running_loop(), 0.0, send
        self._speaks: asyncio.Task[None] | None = None
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._sent, self._timer = loop.time(), loop.call_later(KEEP_ALIVE_SECONDS, self._look)
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    self._sent = loop.time()
                    await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        finally:
            self._timer.cancel()
            if self._speaks is not None:
                await asyncio.wait({self._speaks})  # unblocked by the client, or the end of its connection
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() >= self._sent + KEEP_ALIVE_SECONDS:
            self._sent = loop.time()
            self._speaks = loop.create_task(self._speak())
        self._timer = loop.call_at(self._sent + KEEP_ALIVE_SECONDS, self._look)

    async def _speak(self) -> None:
        if not self._timer.cancelled():  # the last event comes
            await self._send({"type": "http.response.body", "body": self._silence, "more_body": True})


async def response_events(stream: AsyncGenerator[Any]) -> AsyncGenerator[str]:
    """The stream of a response. An error in the middle is its last event, as vLLM sends it in the other APIs."""
    try:
        async for event in _convert_stream_to_sse_events(stream):
            yield event
    except Exception as error:
        logger.exception("a streamed response")
        found = create_error_response(error).error
        failed = {"type": "error", "code": kind_of(found.code).code, "message": found.message, "param": found.param}
        yield f"event: error\ndata: {json.dumps({**failed, 'error': found.model_dump()})}\n\n"


class Messages(AnthropicServingMessages):
    """Returns malformed calls, and tells errors in the middle of a stream: vLLM's converters can read neither."""

    def messages_full_converter(self, generator: ChatCompletionResponse) -> AnthropicMessagesResponse:
        for choice in generator.choices:
            for call in choice.message.tool_calls:
                call.function.arguments = _as_input(call.function.arguments)
        return super().messages_full_converter(generator)

    async def message_stream_converter(self, generator: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        failed = []

        async def chunks() -> AsyncGenerator[str, None]:
            async for chunk in generator:
                if chunk.startswith(_FAILED):
                    failed.append(json.loads(chunk.removeprefix(_DATA))["error"]["message"])
                    return
                yield _with_inputs(chunk) if _CALLS in chunk else chunk

        async for event in super().message_stream_converter(chunks()):
            yield event.replace(_THINKING, _SIGNED)  # its clients want all fields of a block
        for message in failed:
            error = {"type": "error", "error": {"type": "api_error", "message": message}}
            yield f"event: error\ndata: {json.dumps(error)}\n\n"


def _as_input(arguments: str) -> str:
    """The arguments of a call as the input of an Anthropic block, which must be an object."""
    return arguments if is_object(arguments) else json.dumps({MALFORMED_INPUT: arguments})


def _with_inputs(chunk: str) -> str:
    """A chunk of a stream, with the arguments of its calls as inputs. A call comes whole, in one chunk."""
    content = json.loads(chunk.removeprefix(_DATA))
    for choice in content["choices"]:
        for call in choice["delta"].get("tool_calls") or ():
            call["function"]["arguments"] = _as_input(call["function"]["arguments"])
    return f"{_DATA}{json.dumps(content)}\n\n"
