"""Errors as the clients of OpenAI's and Anthropic's APIs expect them."""

from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse

from goaly.agents.session import SessionBusy, SessionExhausted
from goaly.generate.request import InvalidRequest
from goaly.rollout.policy import ImpossibleSampling

HEALTH = "/health"
"""Answers without a key: status 200 once requests can be answered, 503 before."""
SCHEMA = "/openapi.json"
"""The schema of all routes, without a key."""
ANTHROPIC = "/v1/messages"
"""Start of the paths of Anthropic's API."""
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
RETRY_SECONDS = 1


class Refusal(ValueError):
    """A request that is answered with this status and code."""

    def __init__(self, message: str, status: HTTPStatus, code: str, parameter: str | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.parameter = parameter


def as_refusal(error: Exception) -> Exception:
    """The error of a session as the client gets it; any other error is the same."""
    match error:
        case ImpossibleSampling() | InvalidRequest():
            return Refusal(str(error), HTTPStatus.BAD_REQUEST, "invalid_request")
        case SessionExhausted():
            return Refusal(str(error), HTTPStatus.BAD_REQUEST, "session_exhausted")
        case SessionBusy():
            return Refusal(str(error), HTTPStatus.TOO_MANY_REQUESTS, "session_busy")
    return error


def error_response(path: str, error: Refusal) -> JSONResponse:
    """The response in the format of the API that this path belongs to."""
    content: dict[str, Any]
    status = int(error.status)
    if path.startswith(ANTHROPIC):
        kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        content = {"type": "error", "error": {"type": kind, "message": str(error)}}
    else:
        kind = "invalid_request_error" if status < 500 else "server_error"
        content = {
            "error": {"message": str(error), "type": kind, "param": error.parameter, "code": error.code},
        }
    headers = {"retry-after": str(RETRY_SECONDS)} if status == HTTPStatus.TOO_MANY_REQUESTS else None
    return JSONResponse(content, status, headers)
