"""The HTTP endpoint outside of training: clients with a token ask the policy, and nothing is recorded for a trainer.

Each request has a session of its own. The last ones are kept for retries, and those of OpenAI's Responses API for
`previous_response_id`.

With tokens, a request without one of them gets 401. No token reaches the responses of another. A retry of a request, by
the client's word, gets the answer of that request, as long as its session is kept. Without tokens, only requests to a
name or an address of this machine are answered, and only of pages that came from one: no page of another machine
reaches the policy through its reader's browser, not even one whose name leads here (DNS rebinding).
"""

import json
import secrets
import socket
from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import partial
from http import HTTPStatus
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from goaly.agents.answer_parser import AnswerParser
from goaly.agents.http_server import REWARDED, SAMPLED, HttpServer
from goaly.agents.http_session import HttpSession, Repeats, request_digest
from goaly.agents.refusals import Refusal
from goaly.agents.session import Session
from goaly.base.access import is_loopback, is_one_of, listening
from goaly.generate.policy import Policy, TokenSampler
from goaly.generate.request import Sampling
from goaly.prompts.tokenizer import ChatTokenizer

KEPT_REQUESTS = 1024
"""Number of the last requests whose retries are not sampled again."""
RESPONSES = "/v1/responses"
KEPT_RESPONSES = 1024
"""Number of the last conversations of the Responses API that can be continued by id."""


class PublicGateway(HttpServer):
    """Serves a policy by HTTP."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tokens: Collection[str],
        chat: ChatTokenizer,
        parser: AnswerParser,
        sampling: Sampling,
        max_context: int,
        sampler: TokenSampler,
        listen: Callable[[], socket.socket] | None = None,
    ):
        """Without `tokens` every client is served. `sampling` has the parameters that a request does not name. `listen`
        gives a socket that listens at `host` already."""
        super().__init__(host, listen or partial(listening, host, port), str(chat.folder), max_context)
        self.is_open = False  # until the sampler answers; requests before wait
        self._tokens = tokens
        self._chat = chat
        self._parser = parser
        self._sampling = sampling
        self._sampler = sampler
        self._numbers = count()
        self._kept: deque[tuple[str, HttpSession]] = deque(maxlen=KEPT_RESPONSES)
        self._recent: dict[tuple[str, str], HttpSession] = {}
        """By API key, and idempotency key or request; the oldest first."""

    async def check(self, key: str, headers: Mapping[str, str]) -> None:
        """Raise a Refusal if this is not one of the tokens, or if no token is set and a page of another machine may
        have sent the request."""
        if not self._tokens:
            self._check_here("host", f"//{headers.get('host', '')}")
            self._check_here("origin", headers.get("origin", "//localhost"))
        if self._tokens and not is_one_of(key, self._tokens):
            raise Refusal("the API key is not one of this server's tokens", HTTPStatus.UNAUTHORIZED, "invalid_api_key")

    def _check_here(self, name: str, url: str) -> None:
        """Raise a Refusal unless this header names this machine."""
        try:
            host = urlsplit(url).hostname or ""
        except ValueError:
            host = ""
        if host != self._host and not is_loopback(host):
            here = " or ".join(sorted({"localhost", self._host}))
            foreign = f"{name}={url.removeprefix('//')}: must be {here}, as this server has no tokens"
            raise Refusal(foreign, HTTPStatus.FORBIDDEN, "host_not_allowed")

    def session(self, key: str, path: str, body: bytes, repeats: Repeats) -> HttpSession:
        """A new session, or the one of the request that this one repeats, or of the response that it continues."""
        if path.endswith(REWARDED):
            raise Refusal("this server trains nothing: it takes no rewards", HTTPStatus.NOT_FOUND, "unknown_session")
        if path not in SAMPLED:
            return self._new(key, body)
        name = (key, f"key {repeats.idempotency_key}" if repeats.idempotency_key else request_digest(path, body))
        known = self._recent.pop(name, None)
        if known is None or not any(repeats):
            known = self._continued(key, body) if path == RESPONSES else self._new(key, body)
        self._recent[name] = known
        if len(self._recent) > KEPT_REQUESTS:
            del self._recent[next(iter(self._recent))]
        return known

    def _continued(self, key: str, body: bytes) -> HttpSession:
        earlier = _previous(body)
        if earlier is not None:
            for owner, served in self._kept:
                if owner == key and served.answered(earlier):
                    return served
        served = self._new(key, body)
        self._kept.append((key, served))
        return served

    def _new(self, key: str, body: bytes) -> HttpSession:
        """The session of a request with this key and body."""
        name = f"request-{next(self._numbers)}"
        session, secret = Session(self._chat, prompt_id=name), secrets.token_hex()
        return HttpSession(session=session, policy=self._policy(name), parser=self._parser, secret=secret)

    def _policy(self, name: str) -> Policy:
        return Policy(
            sampler=self._sampler,
            name=name,
            session=name,
            sampling=self._sampling,
            min_version=0,
            max_context=self._max_context,
            decode=self._chat.decode,
            evaluation=True,
        )


def _previous(body: bytes) -> str | None:
    try:
        asked: Any = json.loads(body)
    except (ValueError, RecursionError):
        return None  # refused later, as any request that is no JSON
    earlier = asked.get("previous_response_id") if isinstance(asked, dict) else None
    return earlier if isinstance(earlier, str) else None
