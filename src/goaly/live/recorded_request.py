"""The session of one request to the live server: its answers go into the session of its conversation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from goaly.agents.session import Session
from goaly.agents.turn import Continuation, RecordedTurn
from goaly.generate.policy import Completion
from goaly.live.traffic import Client, RequestPlace, Traffic
from goaly.prompts.tokenizer import Room


class RecordedRequest(Session):
    """The session of one request, and of its retries, whose answers are recorded in that of its conversation."""

    def __init__(
        self,
        traffic: Traffic,
        client: Client,
        name: str,
        reason: Callable[[Completion], str | None],
        response: Callable[[], str],
        soon: Callable[[Callable[[], None]], object],
        on_place: Callable[[str], None],
    ):
        """`reason` says why a completion is not recorded, `response` the id of the response under way. `soon` calls a
        function on the event loop: a long request is placed on a thread. `on_place` gets the session that the request
        continues."""
        super().__init__(traffic.chat, prompt_id=name)
        self.place: RequestPlace | None = None
        """Where it goes on."""
        self._traffic = traffic
        self._client = client
        self._reason = reason
        self._response = response
        self._soon = soon
        self._on_place = on_place
        self._places: dict[int, RequestPlace] = {}
        self._heard: set[bytes] = set()

    def extend(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
        room: Room | None = None,
    ) -> Continuation:
        """The place of the request in the tree of its conversation."""
        place = self._traffic.place(self._client, messages, tools, template_args, room)
        self.place = self._places[id(place.continuation)] = place
        self._on_place(place.session)
        if (digest := place.continuation.request.digests[-1]) not in self._heard:  # else a retry of the same call
            self._heard.add(digest)
            self._soon(lambda: self._traffic.said(place))
        return place.continuation

    def record(
        self,
        continuation: Continuation,
        completion: Completion,
        message: Mapping[str, Any],
        key: str | None = None,
        *,
        malformed: int = 0,
    ) -> RecordedTurn:
        """Record the answer in its conversation, or only for retries of this request if it is left out."""
        place = self._places.get(id(continuation))
        turn = None
        if place is not None:  # else it is a text without messages
            turn = self._traffic.record(
                self._client,
                place,
                completion,
                message,
                response=self._response(),
                malformed=malformed,
                reason=self._reason(completion),
            )
        if turn is None:
            return super().record(continuation, completion, message, key, malformed=malformed)
        if key is not None:
            self._by_key[key] = turn
        return turn
