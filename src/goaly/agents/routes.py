"""The HTTP routes of the agents' endpoint: OpenAI's and Anthropic's APIs by vLLM's handlers, and rewards."""

import logging
import re
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Annotated, Any

import torch
from fastapi import APIRouter, FastAPI, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.security import APIKeyHeader, HTTPBearer
from openai.types.shared import ErrorObject
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicCountTokensResponse,
    AnthropicErrorResponse,
    AnthropicMessagesRequest,
    AnthropicMessagesResponse,
)
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse, ModelList
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.exceptions import VLLMClientError

from goaly.agents.answer_parser import AnswerParser
from goaly.agents.client_request import refuse_unknown, refused_parameters
from goaly.agents.event_streams import COMMENT, PING, EventStream, response_events
from goaly.agents.http_session import EXCHANGE
from goaly.agents.refusals import HEALTH, SCHEMA, Refusal, as_refusal, error_response
from goaly.agents.session import SessionExhausted
from goaly.agents.vllm_handlers import MODEL, VllmHandlers
from goaly.base.errors import GoalyError

logger = logging.getLogger(__name__)

_LARGEST = torch.finfo(torch.float32).max
KEYS = [Security(HTTPBearer(auto_error=False)), Security(APIKeyHeader(name="x-api-key", auto_error=False))]
"""Dependencies of a route that needs a key, which the gateway has checked before."""
OWN = "own"
"""In place of a session's id: the session of the API key. Agents that know only the key send their reward there."""


class OpenAIErrorResponse(BaseModel):
    """An error in the format of OpenAI's API."""

    error: ErrorObject


class RewardRequest(BaseModel):
    """A reward for the session's episode."""

    reward: Annotated[float, Field(ge=-_LARGEST, le=_LARGEST, allow_inf_nan=False)]
    response_id: str | None = None
    """The response whose turns get it, as a process reward; without one it is for the whole episode."""


def _responses(model: type[BaseModel], *, errors: type[BaseModel] = OpenAIErrorResponse, streams: bool = True) -> Any:
    """The responses of a route: this type, or server-sent events, or an error."""
    content = {"content": {"text/event-stream": {}}} if streams else {}
    return {200: {"model": model, **content}, "default": {"model": errors, "description": "The request failed"}}


def app(folder: str, max_context: int, parser: AnswerParser) -> FastAPI:
    """The routes, for the model in this folder. Each request with a key needs an `EXCHANGE`."""
    serving = VllmHandlers(folder, max_context, parser)
    routes = APIRouter(dependencies=KEYS)
    api = FastAPI(title="goaly", openapi_url=None)

    @api.get(HEALTH, responses={503: {"description": "Requests would wait"}})
    async def health(request: Request) -> Response:
        return Response(status_code=HTTPStatus.OK if request.state.is_open else HTTPStatus.SERVICE_UNAVAILABLE)

    @api.get(SCHEMA)
    def schema() -> Response:  # in a thread: it takes seconds
        return JSONResponse(_schema(api))

    @routes.post("/v1/chat/completions", responses=_responses(ChatCompletionResponse))
    @with_cancellation
    async def chat(request: ChatCompletionRequest, raw_request: Request) -> Response:
        _asked_of(request, raw_request)
        return await _response(serving.chat.create_chat_completion(request, raw_request))

    @routes.post("/v1/completions", responses=_responses(CompletionResponse))
    @with_cancellation
    async def completions(request: CompletionRequest, raw_request: Request) -> Response:
        _asked_of(request, raw_request)
        return await _response(serving.completions.create_completion(request, raw_request))

    @routes.post("/v1/responses", responses=_responses(ResponsesResponse))
    @with_cancellation
    async def responses(request: ResponsesRequest, raw_request: Request) -> Response:
        call = EXCHANGE.get().call
        assert call is not None
        request.request_id = f"resp_{call.id}"  # a retry gets the same id
        _asked_of(request, raw_request)
        return await _response(serving.responses.create_responses(request, raw_request), response_events)

    @routes.post("/v1/messages", responses=_responses(AnthropicMessagesResponse, errors=AnthropicErrorResponse))
    @with_cancellation
    async def messages(request: AnthropicMessagesRequest, raw_request: Request) -> Response:
        _asked_of(request, raw_request)
        return await _response(serving.messages.create_messages(request, raw_request), silence=PING)

    @routes.post(
        "/v1/messages/count_tokens",
        responses=_responses(AnthropicCountTokensResponse, errors=AnthropicErrorResponse, streams=False),
    )
    @with_cancellation
    async def count_tokens(request: AnthropicCountTokensRequest, raw_request: Request) -> Response:
        request.model = MODEL
        return await _response(serving.messages.count_tokens(request, raw_request))

    @routes.get("/v1/models", responses=_responses(ModelList, streams=False))
    async def models() -> Response:
        shown = await serving.models.show_available_models()
        for model in shown.data:
            model.max_model_len = EXCHANGE.get().http_session.policy.max_context  # shorter in training than elsewhere
        return JSONResponse(shown.model_dump())

    @routes.post(
        "/sessions/{session_id}/reward",
        status_code=HTTPStatus.NO_CONTENT,
        responses={"default": {"model": OpenAIErrorResponse}},
    )
    async def reward(session_id: str, request: RewardRequest) -> Response:
        served, call = EXCHANGE.get().http_session, EXCHANGE.get().call
        turns = [] if request.response_id is None else served.answered(request.response_id)
        if session_id not in (served.id, OWN):
            unknown = f"session_id={session_id}: the API key is that of session {served.id}"
            raise Refusal(unknown, HTTPStatus.NOT_FOUND, "unknown_session")
        if request.response_id is not None and not turns:
            unknown = f"response_id={request.response_id}: this session has no such response"
            raise Refusal(unknown, HTTPStatus.NOT_FOUND, "unknown_response", "response_id")
        assert call is not None
        if call.key not in served.session.rewarded:
            try:
                if turns:
                    served.session.credit(turns, request.reward, call.key)
                else:
                    served.session.add_reward(request.reward, call.key)
            except SessionExhausted as error:
                raise as_refusal(error) from error
        return Response(status_code=HTTPStatus.NO_CONTENT)

    for kind in (
        Refusal,
        RequestValidationError,
        HTTPException,
        ValueError,
        TypeError,
        OverflowError,
        VLLMClientError,
        Exception,
    ):
        api.exception_handler(kind)(_error)
    api.include_router(routes)
    return api


def _schema(routes: FastAPI) -> dict[str, Any]:
    """The OpenAPI schema: vLLM's own types, without the parameters that this endpoint refuses. Takes seconds."""
    schema = routes.openapi()
    for request in (ChatCompletionRequest, CompletionRequest, ResponsesRequest):
        properties = schema["components"]["schemas"][request.__name__]["properties"]
        for refused in refused_parameters(request):
            properties.pop(refused, None)
    return schema


def _asked_of(request: Any, raw_request: Request) -> None:
    """Whatever model the request names, the policy answers; whether that is trained may depend on the name."""
    refuse_unknown(request)
    exchange, metadata = EXCHANGE.get(), getattr(request, "metadata", None)
    exchange.trained = not exchange.http_session.untrained.apply_to(request.model, raw_request.headers, metadata)
    request.model = MODEL


async def _response(
    work: Awaitable[Any], events: Callable[[Any], Any] = lambda stream: stream, silence: str = COMMENT
) -> Response:
    """The response that vLLM's code makes of a request; a stream sends `silence` where it has nothing to send."""
    try:
        made = await work
    except Refusal:
        raise
    except Exception as error:
        made = create_error_response(error)
        if made.error.code >= HTTPStatus.INTERNAL_SERVER_ERROR and EXCHANGE.get().is_read:
            raise
        if made.error.code >= HTTPStatus.INTERNAL_SERVER_ERROR or isinstance(error, TypeError | OverflowError):
            raise _unreadable(error) from error
    if isinstance(made, ErrorResponse):
        refused = _refused(made)
        if refused.status >= HTTPStatus.INTERNAL_SERVER_ERROR and not EXCHANGE.get().is_read:
            refused = _unreadable(refused)
        raise refused
    if hasattr(made, "model_dump"):
        return JSONResponse(_content(made))
    return EventStream(events(made), silence)


def _content(made: BaseModel) -> dict[str, Any]:
    """The body of a response, in Anthropic's API without the fields that have no value, as its own server sends it."""
    if isinstance(made, AnthropicMessagesResponse):
        ended = {"stop_reason": made.stop_reason, "stop_sequence": made.stop_sequence}
        return {**made.model_dump(mode="json", exclude_none=True), **ended}
    return made.model_dump(mode="json", by_alias=True, exclude_none=isinstance(made, AnthropicCountTokensResponse))


def _refused(error: ErrorResponse) -> Refusal:
    found = error.error
    return Refusal(_PARAMETER.sub("", found.message), HTTPStatus(found.code), parameter=found.param)


def _unreadable(error: Exception) -> Refusal:
    """The refusal of a request over which vLLM's code has failed with this error, which says nothing to clients."""
    logger.warning("a request cannot be read", exc_info=error)
    return Refusal("the request can't be read: one of its values is not complete, or too large", HTTPStatus.BAD_REQUEST)


async def _error(request: Request, error: Exception) -> JSONResponse:
    match error:
        case Refusal():
            refused = error
        case RequestValidationError():
            refused = _invalid(request, error.errors()[0])
        case HTTPException(status_code=404):
            refused = Refusal(f"{request.url.path}: there is no such route", HTTPStatus.NOT_FOUND, "no_such_route")
        case HTTPException(status_code=405):
            allowed = (error.headers or {}).get("Allow", "POST")
            refused = Refusal(f"{request.method}: must be {allowed} for this route", HTTPStatus.METHOD_NOT_ALLOWED)
        case HTTPException():  # FastAPI's, for a body that it cannot parse
            refused = Refusal("the body must be JSON in UTF-8", HTTPStatus.BAD_REQUEST)
        case GoalyError() | ValueError() | VLLMClientError():
            refused = _refused(create_error_response(error))
        case TypeError() | OverflowError():
            refused = _unreadable(error)
        case _:
            refused = Refusal(f"the endpoint failed: {type(error).__name__}", HTTPStatus.INTERNAL_SERVER_ERROR)
    return error_response(request.url.path, refused)


def _invalid(request: Request, first: Any) -> Refusal:
    """The refusal of a request whose first error pydantic describes so."""
    if not request.headers.get("content-type", "").startswith("application/json"):
        return Refusal("content-type: must be application/json", HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
    if first["type"] == "json_invalid":
        return Refusal("the body must be JSON", HTTPStatus.BAD_REQUEST)
    at = ".".join(str(part) for part in first["loc"] if _FIELD.fullmatch(str(part))) or None
    problem = first["msg"].removeprefix("Value error, ")
    return Refusal(f"{at or 'the body'}: {problem}", HTTPStatus.BAD_REQUEST, parameter=at)


_FIELD = re.compile(r"(?!(?:body|str|int|float|bool|dict|list)$)[a-z_][a-z0-9_]*|\d+")
"""A field or an index in the place of an error; other parts are names of types."""
_PARAMETER = re.compile(r" \(parameter=[^()]*\)$")
"""The text that vLLM adds to the message of an error."""
