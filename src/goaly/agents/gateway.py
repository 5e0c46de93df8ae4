"""The HTTP endpoint of a rollout worker: agents send requests of OpenAI's and Anthropic's APIs to their session.

It runs on the worker's event loop, in front of the worker's router. The API key names the session.

A request to a session of an earlier worker waits until the session goes on here, or gets an answer that asks for a
retry.

Invariants
    agents-8: A request reaches the session of its key and no other. An unknown key gets 401.
"""

import asyncio
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

from goaly.agents.answer_parser import AnswerParser
from goaly.agents.http_server import HttpServer
from goaly.agents.http_session import HttpSession, Repeats
from goaly.agents.listeners import listener_of, port_of
from goaly.agents.refusals import Refusal
from goaly.agents.session import Session
from goaly.agents.session_files import SessionFiles
from goaly.agents.settings import EndpointSettings
from goaly.base.access import listening
from goaly.generate.policy import Policy

REOPEN_SECONDS = 60.0
"""Longest wait of a request for its session to go on in this worker; SDKs repeat it then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where the agents of one episode send their requests."""

    base_url: str
    """As `openai.OpenAI(base_url=...)` takes it. Anthropic's client wants it without `/v1` (`root_url`)."""
    api_key: str
    session_id: str
    """The name of the session in `POST /sessions/{id}/reward`."""

    @property
    def root_url(self) -> str:
        """The URL without the version, which Anthropic's client adds itself."""
        return self.base_url.removesuffix("/v1")


class Gateway(HttpServer):
    """Serves the sessions of a run's episodes by HTTP."""

    def __init__(
        self,
        settings: EndpointSettings,
        worker: int,
        folder: str,
        max_context: int,
        files: SessionFiles | None = None,
        listener: str | None = None,
    ):
        """`worker` counts the run's rollout workers; `folder` is the policy's model folder. `files` makes keys that
        the next worker knows, too, and `listener` names the socket that it takes over (`Listeners`)."""
        own = partial(listening, settings.host, port_of(settings, worker))
        listen = own if listener is None else partial(listener_of, listener)
        super().__init__(settings.host, listen, folder, max_context)
        self._untrained = settings.untrained
        self._files = files
        self._sessions: dict[str, HttpSession] = {}
        self._begun = {} if files is None else files.begun()
        """The names of the sessions that an earlier worker had, by their keys."""
        self._awaited = {key: asyncio.Event() for key in self._begun}
        """Set when the session of this key, which an earlier worker had, goes on here."""

    @contextmanager
    def serve(self, session: Session, policy: Policy, parser: AnswerParser) -> Iterator[Endpoint]:
        """Let agents with the endpoint's key reach this session, until the block ends."""
        key = secrets.token_hex(24) if self._files is None else self._files.api_key(policy.name)
        served = self._sessions[key] = HttpSession(
            session=session, policy=policy, parser=parser, secret=key, untrained=self._untrained
        )
        if (awaited := self._awaited.pop(key, None)) is not None:
            awaited.set()
        try:
            yield Endpoint(base_url=self.url, api_key=key, session_id=served.id)
        finally:
            del self._sessions[key]
            served.close()

    async def check(self, key: str, headers: Mapping[str, str]) -> None:
        """Raise a Refusal if no open session has this key; wait for one that is about to go on here."""
        if (awaited := self._awaited.get(key)) is not None:
            if self._files is None or not self._files.goes_on(self._begun[key]):  # its group ended in another worker
                del self._awaited[key]
                self.session(key)
            try:
                await asyncio.wait_for(awaited.wait(), REOPEN_SECONDS)
            except TimeoutError:
                not_yet = "the session of this key does not go on yet; ask again"
                raise Refusal(not_yet, HTTPStatus.SERVICE_UNAVAILABLE, "session_not_ready") from None
        self.session(key)

    def session(self, key: str, path: str = "", body: bytes = b"", repeats: Repeats | None = None) -> HttpSession:
        """The session of this key (agents-8)."""
        if (served := self._sessions.get(key)) is not None:
            return served
        unknown = "the API key names no session that is open; use the key of `context.endpoint`"
        raise Refusal(unknown, HTTPStatus.UNAUTHORIZED, "invalid_api_key")
