"""The server-sent events of a stream: those of vLLM's code, errors in the middle, and what keeps a silent one alive."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.responses.api_router import _convert_stream_to_sse_events
from vllm.entrypoints.serve import create_error_response

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 10.0
"""A stream sends something after so many seconds of silence, such as while its request waits or a tool call is
sampled: clients and proxies give up a connection on which nothing comes."""
COMMENT, PING = ": keep-alive\n\n", 'event: ping\ndata: {"type": "ping"}\n\n'
_DATA = "data: "
_FAILED = _DATA + '{"error"'


async def kept_alive(events: AsyncIterator[str], silence: str) -> AsyncGenerator[str]:
    """The events, and something else after each `KEEP_ALIVE_SECONDS` without one."""
    coming = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            await asyncio.wait([coming], timeout=KEEP_ALIVE_SECONDS)
            if not coming.done():
                yield silence
            elif (event := coming.result()) is None:
                return
            else:
                coming = asyncio.ensure_future(anext(events, None))
                yield event
    finally:
        coming.cancel()


async def response_events(stream: AsyncGenerator[Any]) -> AsyncGenerator[str]:
    """The stream of a response. An error in the middle is its last event, as vLLM sends it in the other APIs."""
    try:
        async for event in _convert_stream_to_sse_events(stream):
            yield event
    except Exception as error:
        logger.exception("a streamed response")
        found = create_error_response(error).error
        failed = {"type": "error", "code": found.type, "message": found.message, "param": found.param}
        yield f"event: error\ndata: {json.dumps({**failed, 'error': found.model_dump()})}\n\n"


class Messages(AnthropicServingMessages):
    """Tells an error in the middle of a stream, which vLLM's converter would take for a chunk that it cannot read."""

    async def message_stream_converter(self, generator: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        failed = []

        async def chunks() -> AsyncGenerator[str, None]:
            async for chunk in generator:
                if chunk.startswith(_FAILED):
                    failed.append(json.loads(chunk.removeprefix(_DATA))["error"]["message"])
                    return
                yield chunk

        async for event in super().message_stream_converter(chunks()):
            yield event
        for message in failed:
            error = {"type": "error", "error": {"type": "api_error", "message": message}}
            yield f"event: error\ndata: {json.dumps(error)}\n\n"
