"""The replica's end of connections: the clients that are connected, what they tell, and whose turn it is.

`connection.py` is the other end.
"""

import asyncio
from collections.abc import Callable, Collection
from functools import partial

from goaly.base.process import ExitWatch, this_host
from goaly.generate.connection import Leave, Results, ToReplica, Ways
from goaly.generate.line import Line, open_line


class Clients:
    """The replica's end: the clients that are connected, what they tell, and the results to send to each."""

    def __init__(self, told: Callable[[str, ToReplica], None]) -> None:
        """`told(client, message)` is called for what comes on lines. The end of a connection is a `Leave`."""
        self._told = told
        self._open: dict[str, tuple[Callable[[Results], None], Line | None]] = {}
        """How to send to each, in any thread."""

    async def serve(self, client: str, ways: Ways, until: asyncio.Event) -> None:
        """Connect to a client; returns when the event is set."""
        line, watch = await self._line_to(client, ways), None
        if line is None:
            ways.port.send([])
            send = partial(asyncio.get_running_loop().call_soon_threadsafe, ways.port.send)
        else:
            send = line.send
        if ways.process.host == this_host():
            watch = ExitWatch(ways.process, partial(self._told, client, Leave()))
        self._open[client] = send, line
        try:
            await until.wait()
        finally:
            self._told(client, Leave())  # generate-2
            if watch is not None:
                watch.close()

    def disconnect(self, client: str) -> None:
        """Send nothing more to this client."""
        _, line = self._open.pop(client, (None, None))
        if line is not None:
            line.close()

    def send(self, client: str, results: Results) -> None:
        """Send these results in one message, in any thread. Nothing happens if the client has left."""
        send, _ = self._open.get(client, (None, None))
        if send is not None:
            send(results)

    async def _line_to(self, client: str, ways: Ways) -> Line | None:
        try:
            return await open_line(ways.line, partial(self._told, client), partial(self._told, client, Leave()))
        except OSError:  # the client is on another host, or in another network
            return None


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
