"""The HTTP server of live traffic: the endpoint of `apps.serve`, which also records, and takes feedback.

Beside the APIs of OpenAI and Anthropic it has

    POST /sessions/ID/reward      {"reward": 1.0, "response_id": ...}
    POST /sessions/ID/feedback    {"score": 1.0, "text": ..., "corrected": ..., "response_id": ...}
    POST /sessions/ID/end

`ID` is the session's, which each response has in the header `x-session-id`; with a `response_id` it may be `own`.
Without a `response_id` all turns of the session without a reward get it. Each response names the policy version that
answered in the header `x-policy-version`, and chats and completions in `system_fingerprint`.
"""

import json
import math
import secrets
from collections.abc import Callable, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse, Response

from goaly.agents.http_server import Receive, Scope, Send, body_of, key_of
from goaly.agents.http_session import EXCHANGE, Call, HttpSession
from goaly.agents.public_gateway import PublicGateway
from goaly.agents.refusals import Refusal, error_response
from goaly.agents.session import Session
from goaly.base.json_text import bounded_json
from goaly.generate.policy import Completion
from goaly.generate.request import Sampling
from goaly.live.keys import LOCAL
from goaly.live.recorded_request import RecordedRequest
from goaly.live.settings import LiveSettings
from goaly.live.traffic import Client, Traffic
from goaly.live.turn import Reaction, ReactionKind

SESSIONS = "/sessions/"
SESSION_HEADER, VERSION_HEADER = "x-session-id", "x-policy-version"

_HEADERS: ContextVar[Mapping[str, str]] = ContextVar("HEADERS")
"""The headers of the request under way."""


@dataclass(slots=True, kw_only=True, eq=False)
class LiveHttpSession(HttpSession):
    """A session that names the policy version of its answers."""

    traffic: Traffic

    def version(self, call: Call | None) -> int:
        """The newest version of the call's answers, or of all answers so far while it has none."""
        versions = (
            [] if call is None else [int(turn.versions.max()) for turn in self.recorded(call) if len(turn.tokens)]
        )
        return max(versions, default=self.traffic.newest)

    def fingerprint(self, call: Call | None) -> str | None:
        """The name of the policy version that answers this call."""
        return f"policy-{self.version(call)}"


class LiveGateway(PublicGateway):
    """Serves a policy, records the conversations of trained keys, and takes feedback."""

    def __init__(
        self,
        settings: LiveSettings,
        traffic: Traffic,
        name: str,
        soon: Callable[[Callable[[], None]], object],
        **served: Any,
    ):
        """`name` begins the names of its requests, which no other server of the run may have. `soon` calls a function
        on the event loop. `served` is as in `PublicGateway`."""
        self._keys = settings.keys
        super().__init__(tokens=tuple(self._keys), **served)
        self._settings = settings
        self._traffic = traffic
        self._name = name
        self._soon = soon
        self.answered = 0
        """Requests that were answered."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if scope["path"].startswith(SESSIONS):
            response = await self._feedback(scope["method"], scope["path"], headers, receive)
            return await response(scope, receive, send)

        async def named(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and message["status"] == HTTPStatus.OK:
                self.answered += 1
                message = {**message, "headers": [*message["headers"], *_named(EXCHANGE.get(None))]}
            await send(message)

        token = _HEADERS.set(headers)
        try:
            await super()._answer(scope, receive, named)
        finally:
            _HEADERS.reset(token)

    def _new(self, key: str, body: bytes) -> HttpSession:
        name = f"{self._name}.request-{next(self._numbers)}"
        client, policy = self._client(key, body), self._policy(name)

        def stay(session: str) -> None:
            policy.session = session  # requests of one conversation prefer the same replica

        if client.key in self._settings.trained_keys:
            of_client = (self._traffic, client, name)
            session: Session = RecordedRequest(*of_client, self._reason, _response_under_way, self._soon, stay)
        else:
            session = Session(self._chat, prompt_id=name)
            self._traffic.left_out["key_not_trained"] += 1
        return LiveHttpSession(
            session=session,
            policy=policy,
            parser=self._parser,
            secret=secrets.token_hex(),
            untrained=self._settings.opt_out,
            traffic=self._traffic,
        )

    def _client(self, key: str, body: bytes) -> Client:
        try:
            asked: Any = json.loads(body)
        except (ValueError, RecursionError):
            asked = None  # refused later
        asked = asked if isinstance(asked, dict) else {}
        metadata = asked.get("metadata")
        metadata = metadata if isinstance(metadata, dict) else {}
        named = _HEADERS.get({}).get(SESSION_HEADER) or metadata.get("session_id")
        user = asked.get("user") or metadata.get("user_id")
        return Client(
            key=self._keys.get(key, LOCAL),
            session=named if isinstance(named, str) else None,
            user=user if isinstance(user, str) else None,
        )

    def _reason(self, completion: Completion) -> str | None:
        """Why the answer of the request under way is not recorded; None if nothing speaks against it."""
        if not completion.trained:
            return "opted_out"
        ask = EXCHANGE.get().ask
        asked = Sampling() if ask is None else Sampling(**ask.given)
        run, drawn = self._sampling.distribution, self._sampling.changed(asked).distribution
        return "other_distribution" if any(drawn[key] != run[key] for key in run) else None

    async def _feedback(self, method: str, path: str, headers: Mapping[str, str], receive: Receive) -> Response:
        key = key_of(headers)
        try:
            await self.check(key, headers)
            _, _, session, what = path.split("/", 3)
            if what not in ("reward", "feedback", "end"):
                raise Refusal(f"{path}: there is no such route", HTTPStatus.NOT_FOUND, "no_such_route")
            if method != "POST":
                raise Refusal(f"{method}: must be POST for this route", HTTPStatus.METHOD_NOT_ALLOWED)
            name, body = self._keys.get(key, LOCAL), await body_of(receive)
            if what == "end":
                if not self._traffic.end(name, session):
                    raise _unknown("session_id", session, "unknown_session")
                return JSONResponse({})
            response, reaction = _reaction_of(what, body)
            turns = self._traffic.feedback(name, session, response, reaction)
            if turns is None:
                if response is None:
                    raise _unknown("session_id", session, "unknown_session")
                raise _unknown("response_id", response, "unknown_response")
            return JSONResponse({"turns": turns})
        except ValueError as error:  # a Refusal, or a path without its parts
            refused = error if isinstance(error, Refusal) else Refusal(str(error), HTTPStatus.BAD_REQUEST)
            return error_response(path, refused)


def _named(exchange: Any) -> list[tuple[bytes, bytes]]:
    if exchange is None or not isinstance(exchange.http_session, LiveHttpSession):
        return []
    version = exchange.http_session.version(exchange.call)
    found = [(VERSION_HEADER.encode(), str(version).encode())]
    session = exchange.http_session.session
    if isinstance(session, RecordedRequest) and session.place is not None:
        found.append((SESSION_HEADER.encode(), session.place.session.encode()))
    return found


def _response_under_way() -> str:
    call = EXCHANGE.get().call
    assert call is not None, "only calls are answered"
    return call.id


def _unknown(what: str, name: str, code: str) -> Refusal:
    gone = f"{what}={name}: this key has none that waits for feedback"
    return Refusal(gone, HTTPStatus.NOT_FOUND, code, what)


def _reaction_of(what: str, body: bytes) -> tuple[str | None, Reaction]:
    """The response that a feedback is about, and what it says; a Refusal if it says nothing."""
    said: Any = bounded_json(body.decode("utf-8", "replace"))
    if not isinstance(said, dict):
        raise Refusal("the body must be a JSON object", HTTPStatus.BAD_REQUEST)
    score = said.get("reward" if what == "reward" else "score")
    if score is not None and (
        isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score)
    ):
        raise Refusal(f"{what}: the score must be a finite number", HTTPStatus.BAD_REQUEST)
    texts = {name: said.get(name) for name in ("text", "corrected", "response_id")}
    for name, text in texts.items():
        if text is not None and not isinstance(text, str):
            raise Refusal(f"{name}: must be a text", HTTPStatus.BAD_REQUEST)
    text, corrected, response = texts["text"], texts["corrected"], texts["response_id"]
    if score is None and text is None and corrected is None:
        needed = "reward" if what == "reward" else "score, text or corrected"
        raise Refusal(f"the body must have {needed}", HTTPStatus.BAD_REQUEST)
    score = None if score is None else float(score)
    last = None if response is None else response.rpartition("-")[2].rpartition("_")[2]
    return last, Reaction(kind=ReactionKind.FEEDBACK, score=score, text=text, corrected=corrected)
