"""A server's address, and who may use it: clients with one of its tokens, or without tokens those on this machine."""

import os
import secrets
import socket
from collections.abc import Collection, Iterator
from ipaddress import ip_address
from pathlib import Path

from goaly.base.config.settings import Section

BACKLOG = 1024
"""Clients that may wait for the server to accept them."""


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens; OSError if another process has the port, which 0 lets the system choose. A small part of a
    response is sent at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach this address or name."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def tokens_of(file: str | None, variable: str) -> tuple[str, ...]:
    """The tokens in the lines of a file, or without one those of an environment variable, separated by commas."""
    texts = Path(file).read_text("utf-8").split("\n") if file is not None else os.environ.get(variable, "").split(",")
    return tuple(text.strip() for text in texts if text.strip())


def is_one_of(given: str, tokens: Collection[str]) -> bool:
    """Whether this is one of the tokens. It compares all of them in constant time, so that the time reveals nothing."""
    found = [secrets.compare_digest(given.encode(errors="replace"), token.encode()) for token in tokens]
    return any(found)


def token_problems(at: Section, host: str, file: str | None, variable: str) -> Iterator[str]:
    """A line for each error in the `host` and the `tokens_file` of a server's settings."""
    try:
        tokens = tokens_of(file, variable)
    except (OSError, UnicodeDecodeError) as error:
        yield f"{at.tokens_file}: cannot be read: {error}"
        return
    if file is not None and not tokens:
        yield f"{at.tokens_file}: has no token, must have one in each line"
    if not tokens and not is_loopback(host):
        yield f"{at.host}: must be 127.0.0.1 without tokens; set tokens_file, or the environment variable {variable}"
    if any(not token.isascii() or " " in token for token in tokens):
        yield f"{at.tokens_file}: a token must be of ASCII letters, digits and signs, without spaces"
