"""Errors as the clients of OpenAI's and Anthropic's APIs expect them."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

from starlette.responses import JSONResponse

from goaly.agents.session import SessionBusy, SessionExhausted
from goaly.generate.policy import ImpossibleSampling
from goaly.generate.request import InvalidRequest

HEALTH = "/health"
"""Answers without a key: status 200 once requests can be answered, 503 before."""
SCHEMA = "/openapi.json"
"""The schema of all routes, without a key."""
ANTHROPIC = "/v1/messages"
"""Start of the paths of Anthropic's API."""


class ErrorKind(NamedTuple):
    """How an error with some status is called."""

    code: str
    """In OpenAI's format, unless a refusal names another."""
    anthropic: str
    """The type in Anthropic's format."""


ERRORS: Mapping[int, ErrorKind] = {
    400: ErrorKind("invalid_request", "invalid_request_error"),
    401: ErrorKind("invalid_api_key", "authentication_error"),
    403: ErrorKind("forbidden", "permission_error"),
    404: ErrorKind("not_found", "not_found_error"),
    405: ErrorKind("method_not_allowed", "invalid_request_error"),
    408: ErrorKind("request_timeout", "timeout_error"),
    413: ErrorKind("request_too_large", "request_too_large"),
    415: ErrorKind("unsupported_media_type", "invalid_request_error"),
    422: ErrorKind("unprocessable", "invalid_request_error"),
    429: ErrorKind("rate_limit_exceeded", "rate_limit_error"),
    500: ErrorKind("internal_error", "api_error"),
    501: ErrorKind("not_implemented", "api_error"),
    503: ErrorKind("overloaded", "overloaded_error"),
}
"""By status. OpenAI's format has the type `server_error` from 500 on, and `invalid_request_error` below."""
RETRY_SECONDS = 1


def kind_of(status: int) -> ErrorKind:
    """How an error with this status is called."""
    return ERRORS.get(status, ERRORS[400 if status < 500 else 500])


class Refusal(ValueError):
    """A request that is answered with this status and code."""

    def __init__(self, message: str, status: HTTPStatus, code: str | None = None, parameter: str | None = None):
        """Without a `code` it is the one of its status."""
        super().__init__(message)
        self.status = status
        self.code = code or kind_of(status).code
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
        content = {"type": "error", "error": {"type": kind_of(status).anthropic, "message": str(error)}}
    else:
        kind = "invalid_request_error" if status < 500 else "server_error"
        content = {
            "error": {"message": str(error), "type": kind, "param": error.parameter, "code": error.code},
        }
    headers = {"retry-after": str(RETRY_SECONDS)} if status == HTTPStatus.TOO_MANY_REQUESTS else None
    return JSONResponse(content, status, headers)
