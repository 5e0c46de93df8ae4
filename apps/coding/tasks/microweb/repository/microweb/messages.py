"""Requests and responses."""

import json
from dataclasses import dataclass, field
from urllib.parse import parse_qsl


@dataclass(frozen=True)
class Request:
    """What a client asks for; `path` is as the client encoded it."""

    method: str
    path: str
    query: dict
    body: bytes

    @classmethod
    def from_environ(cls, environ):
        """The request of a WSGI environ."""
        length = int(environ.get("CONTENT_LENGTH") or 0)
        return cls(
            method=environ["REQUEST_METHOD"],
            path=environ["RAW_PATH"],
            query=dict(parse_qsl(environ.get("QUERY_STRING", ""))),
            body=environ["wsgi.input"].read(length) if length else b"",
        )


@dataclass
class Response:
    """What a client gets."""

    body: bytes = b""
    status: int = 200
    headers: dict = field(default_factory=dict)

    @classmethod
    def of(cls, result):
        """The response for what a handler returned."""
        if isinstance(result, Response):
            return result
        if isinstance(result, dict):
            return cls(json.dumps(result).encode(), headers={"Content-Type": "application/json"})
        if isinstance(result, str):
            return cls(result.encode(), headers={"Content-Type": "text/plain; charset=utf-8"})
        if isinstance(result, bytes):
            return cls(result)
        raise TypeError(f"a handler must return text, bytes, a dict or a Response, not {type(result).__name__}")
