"""The HTTP routes of the agents' endpoint: OpenAI's and Anthropic's APIs by vLLM's handlers, and rewards."""

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, FiniteFloat
from starlette.exceptions import HTTPException
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.api_router import _convert_stream_to_sse_events
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import with_cancellation

from goaly.agents.refusals import Refusal, error_response
from goaly.agents.served import EXCHANGE
from goaly.agents.serving import MODEL, Serving


class RewardRequest(BaseModel):
    """A reward for the session's episode."""

    reward: FiniteFloat
    response_id: str | None = None
    """The response whose turns get it, as a process reward; without one it is for the whole episode."""


def app(folder: str, max_context: int, reads_calls: bool) -> FastAPI:
    """The routes, for the model in this folder. Each request needs an `EXCHANGE`."""
    serving = Serving(folder, max_context, reads_calls)
    routes = FastAPI(title="goaly", docs_url=None, redoc_url=None)

    @routes.post("/v1/chat/completions")
    @with_cancellation
    async def chat(request: ChatCompletionRequest, raw_request: Request) -> Response:
        _identify(request)
        return _response(await serving.chat.create_chat_completion(request, raw_request))

    @routes.post("/v1/completions")
    @with_cancellation
    async def completions(request: CompletionRequest, raw_request: Request) -> Response:
        _identify(request)
        return _response(await serving.completions.create_completion(request, raw_request))

    @routes.post("/v1/responses")
    @with_cancellation
    async def responses(request: ResponsesRequest, raw_request: Request) -> Response:
        _identify(request, "resp_")
        return _response(await serving.responses.create_responses(request, raw_request), _convert_stream_to_sse_events)

    @routes.post("/v1/messages")
    @with_cancellation
    async def messages(request: AnthropicMessagesRequest, raw_request: Request) -> Response:
        request.model = MODEL
        return _response(await serving.messages.create_messages(request, raw_request))

    @routes.post("/v1/messages/count_tokens")
    @with_cancellation
    async def count_tokens(request: AnthropicCountTokensRequest, raw_request: Request) -> Response:
        request.model = MODEL
        return _response(await serving.messages.count_tokens(request, raw_request))

    @routes.get("/v1/models")
    async def models() -> Response:
        return _response(await serving.models.show_available_models())

    @routes.post("/sessions/{session_id}/reward")
    async def reward(session_id: str, request: RewardRequest) -> Response:
        served, call = EXCHANGE.get().served, EXCHANGE.get().call
        turns = [] if request.response_id is None else served.answered(request.response_id)
        if session_id != served.id:
            unknown = f"session_id={session_id}: the API key is that of session {served.id}"
            raise Refusal(unknown, HTTPStatus.NOT_FOUND, "unknown_session")
        if request.response_id is not None and not turns:
            unknown = f"response_id={request.response_id}: this session has no such response"
            raise Refusal(unknown, HTTPStatus.NOT_FOUND, "unknown_response", "response_id")
        assert call is not None
        if call.key not in served.session.rewarded:
            for turn in turns:
                served.session.credit(turn, request.reward, call.key)
            if not turns:
                served.session.add_reward(request.reward, call.key)
        return Response(status_code=HTTPStatus.NO_CONTENT)

    for kind in (
        Refusal,
        RequestValidationError,
        HTTPException,
        ValueError,
        TypeError,
        OverflowError,
        Exception,
    ):
        routes.exception_handler(kind)(_error)
    return routes


def _identify(request: Any, prefix: str = "") -> None:
    """Give the response the id of its call, so that a retry gets the same."""
    call = EXCHANGE.get().call
    assert call is not None
    request.request_id = f"{prefix}{call.id}"
    request.model = MODEL


def _response(made: Any, events: Callable[[Any], Any] = lambda stream: stream) -> Response:
    if isinstance(made, ErrorResponse):
        raise _refused(made)
    if hasattr(made, "model_dump"):
        return JSONResponse(made.model_dump(mode="json", by_alias=True, exclude_none=False))
    return StreamingResponse(events(made), media_type="text/event-stream")


def _refused(error: ErrorResponse) -> Refusal:
    found = error.error
    return Refusal(found.message, HTTPStatus(found.code), found.type, found.param)


async def _error(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"][1:])
        error = Refusal(f"{at}: {first['msg']}" if at else first["msg"], HTTPStatus.BAD_REQUEST, "invalid_request", at)
    elif isinstance(error, HTTPException):
        error = Refusal(str(error.detail), HTTPStatus(error.status_code), "no_such_route")
    elif not isinstance(error, Refusal):
        error = _refused(create_error_response(error))
    return error_response(request.url.path, error)
