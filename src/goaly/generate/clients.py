"""The replica's end of connections: the clients that are connected, what they tell, and whose turn it is.

`connection.py` is the other end.
"""

import asyncio
from collections.abc import Callable, Collection
from functools import partial

from monarch.actor import Port

from goaly.generate.connection import Leave, Results, ToReplica, Ways
from goaly.generate.line import Line, open_line
from goaly.generate.request import Sample
from goaly.generate.streamed_answer import AnswerPart
from goaly.liveness import ExitWatch, this_host


class Clients:
    """The replica's end: the clients that are connected, what they tell, and the results to send to each."""

    def __init__(self, told: Callable[[str, ToReplica], None]) -> None:
        """`told(client, message)` is called for what comes on lines. The end of a connection is a `Leave`."""
        self._told = told
        self._open: dict[str, Line | Port[Results]] = {}
        self._unsent: dict[str, Results] = {}

    async def serve(self, client: str, ways: Ways, until: asyncio.Event) -> None:
        """Connect to a client; returns when the event is set."""
        line, watch = await self._line_to(client, ways), None
        if line is None:
            ways.port.send([])
        if ways.process.host == this_host():
            watch = ExitWatch(ways.process, partial(self._told, client, Leave()))  # GE-5
        self._open[client] = line or ways.port
        try:
            await until.wait()
        finally:
            self._told(client, Leave())  # LI-2
            if watch is not None:
                watch.close()

    def disconnect(self, client: str) -> None:
        """Send nothing more to this client."""
        way = self._open.pop(client, None)
        if isinstance(way, Line):
            way.close()

    def deliver(self, client: str, request_id: str, result: AnswerPart | Sample | Exception | None) -> None:
        """Send a result, or None for a suspect's turn, in one message with the others of this event loop turn."""
        results = self._unsent.setdefault(client, [])
        if not results:
            asyncio.get_running_loop().call_soon(self._send, client)
        results.append((request_id, result))

    async def _line_to(self, client: str, ways: Ways) -> Line | None:
        try:
            return await open_line(ways.line, partial(self._told, client), partial(self._told, client, Leave()))
        except OSError:  # the client is on another host, or in another network
            return None

    def _send(self, client: str) -> None:
        results = self._unsent.pop(client)
        way = self._open.get(client)
        if way is not None:
            way.send(results)


class Quarantine:
    """A replica's suspects: lets them in one at a time, in the order in which they came."""

    def __init__(self) -> None:
        self._suspects: dict[str, Callable[[], None]] = {}

    @property
    def suspects(self) -> Collection[str]:
        """The names of those that run or wait here."""
        return self._suspects

    def enter(self, request_id: str, begin: Callable[[], None]) -> None:
        """Call `begin` when it is this request's turn, at once if no other suspect is here."""
        self._suspects[request_id] = begin
        if len(self._suspects) == 1:
            begin()

    def leave(self, request_id: str) -> None:
        """Let the next suspect in after this one ended or was cancelled. Unknown requests are ignored."""
        had_its_turn = next(iter(self._suspects), None) == request_id
        self._suspects.pop(request_id, None)
        if had_its_turn and self._suspects:
            next(iter(self._suspects.values()))()
