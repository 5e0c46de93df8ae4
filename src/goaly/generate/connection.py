"""How requests travel from a client to a replica, and samples back.

The requests of one turn of the client's event loop leave in one message, and the samples that end in one step of the
engine come in one, together with the parts that this step added to streamed answers. On one host messages travel on a
`MessageSocket`. Between hosts they are calls of the actor: a call costs either side half a millisecond, as much as a
dozen tokens.

A replica's death does not tell which of its requests caused it, and a request that kills engines (a poison request)
must neither kill one replica after another nor fail the requests beside it. So each request counts the deaths of
replicas under it:

    0, 1 deaths  It runs like any other request: most deaths have nothing to do with a request, and they cost no speed.
    2 deaths     It is a suspect. A replica runs one suspect at a time (`Quarantine`); the others wait outside of the
                 engine, so that a death counts for one of them only.
    3 deaths     It fails alone with a `PoisonRequest`. Two of the deaths may be chance or another request's fault; at
                 the third it was the only suspect.

Names of requests at the replica are unique, also if a request of a client that died is retried by another client. A
client's messages to a replica arrive in order, because a connection takes one way for as long as it lives.

    generate-1: Every request ends once: with its sample, with its own error, or with `ReplicaLost` when the connection
        broke or the replica was closed, even if it is submitted after that.
    generate-2: A request that is cancelled before it was sent is never sent. A sent one is cancelled at the replica.
"""

import asyncio
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from monarch.actor import Channel, Port, PortReceiver

from goaly.base.errors import ReplicaLost, root_cause
from goaly.base.message_socket import Listener, MessageSocket, open_socket
from goaly.base.process import ExitWatch, ProcessMark, this_host, this_process, vital_task
from goaly.generate.request import Request, Sample, Sampling, settle
from goaly.generate.streamed_answer import OnPart
from goaly.generate.versioned_tokens import VersionedTokens

if TYPE_CHECKING:
    from goaly.generate.generator import Generator

SUSPECT_DEATHS = 2
POISON_DEATHS = 3

Results = list[tuple[str, VersionedTokens | Sample | Exception | None]]
"""Request ids, each with a part of its answer, its sample or its error. None tells a suspect to start."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Sample answers to these requests."""

    requests: list[Request]


@dataclass(frozen=True, slots=True)
class Isolate:
    """Tell the client when it is this suspect's turn; the client then submits the request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Withdraw:
    """End these requests with the tokens sampled so far. Unknown and ended ones are ignored."""

    request_ids: list[str]


@dataclass(frozen=True, slots=True)
class Leave:
    """Send nothing more to this client, and end its requests."""


ToReplica = Submit | Isolate | Withdraw | Leave


@dataclass(frozen=True, slots=True)
class Ways:
    """The ways to a client."""

    process: ProcessMark
    socket: str
    """The address of its listener, for a replica on its host."""
    port: Port[Results]
    """For a replica elsewhere, whose first message is empty: it confirms the connection."""


class Connection:
    """The client's end: submit requests, and await the futures."""

    def __init__(self, replica: "Generator"):
        """`replica` is the handle of a generator, or of its first rank."""
        self._replica = replica
        self._name = uuid.uuid4().hex[:12]
        self._futures: dict[str, asyncio.Future[Any]] = {}
        self._streams: dict[str, OnPart] = {}
        self._unsent: list[Request] = []
        self._unsent_suspects: list[str] = []
        self._tell: Callable[[ToReplica], None] | None = None
        """The way to the replica, once one is open."""
        self._socket: MessageSocket | None = None
        self._ended: Exception | None = None
        port, samples = Channel[Results].open()
        self._listener = Listener()
        ways = Ways(this_process(), self._listener.address, port)
        self._listening = vital_task(self._listen(), "connection: socket")
        self._listening.add_done_callback(lambda _: self._listener.close())
        self._tasks = (
            vital_task(self._connect(ways), "connection: open"),
            vital_task(self._receive(samples), "connection: samples"),
        )

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        sampling: Sampling,
        min_version: int = 0,
        on_part: OnPart | None = None,
        written: int = 0,
        begun_at: int | None = None,
    ) -> asyncio.Future[Sample]:
        """The replica's answer to this prompt, under weights of at least `min_version`. `on_part` gets its parts
        before; `written` and `begun_at` are as in `Request`."""
        future = self._expect(request_id)
        if self._ended is None:
            if not self._unsent:
                asyncio.get_running_loop().call_soon(self._send)
            sent, streams = self._sent(request_id), on_part is not None
            self._unsent.append(Request(sent, prompt, sampling, min_version, streams, written, begun_at))
            if on_part is not None:
                self._streams[request_id] = on_part
        return future

    def wait_turn(self, request_id: str) -> asyncio.Future[None]:
        """Wait until the replica runs no other suspect. Then `submit` this request, or `cancel` it."""
        future = self._expect(request_id)
        if self._ended is None and self._tell is not None:
            self._tell(Isolate(self._sent(request_id)))
        elif self._ended is None:
            self._unsent_suspects.append(self._sent(request_id))
        return future

    def cancel(self, request_id: str) -> None:
        """Cancel a request, here and at the replica. Unknown and ended requests are ignored."""
        future = self._futures.pop(request_id, None)
        self._streams.pop(request_id, None)
        if future is None:
            return
        future.cancel()
        sent = self._sent(request_id)
        unsent = [request for request in self._unsent if request.request_id != sent]
        if sent in self._unsent_suspects:
            self._unsent_suspects.remove(sent)
        elif len(unsent) == len(self._unsent) and self._tell is not None:
            self._tell(Withdraw([sent]))
        self._unsent = unsent  # generate-2

    def close(self) -> None:
        """Cancel all requests, here and, if the replica lives, there."""
        for task in self._tasks:
            task.cancel()
        self._listening.cancel()
        if self._ended is None:
            self._disconnect()
            self._ended = ReplicaLost("this client has disconnected")
        self._end_all(None)

    def _expect(self, request_id: str) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._ended is None:
            self._futures[request_id] = future
        else:
            future.set_exception(self._ended)
        return future

    def _send(self) -> None:
        if self._tell is None:
            return  # `_open` sends them
        requests, self._unsent = self._unsent, []
        try:
            if requests:
                self._tell(Submit(requests))
        except Exception:  # one of them cannot be pickled; a message to a dead replica does not raise
            for request in requests:
                try:
                    self._tell(Submit([request]))
                except Exception as error:
                    self._streams.pop(own_name(request.request_id), None)
                    settle(self._futures.pop(own_name(request.request_id)), error)  # generate-1

    async def _connect(self, ways: Ways) -> None:
        try:
            await self._replica.connect.call_one(self._name, ways)  # unblocked by the replica's close, or its death
            self._end(ReplicaLost("the generator was closed"))
        except Exception as error:  # it died, or only the connection broke
            self._break(root_cause(error))

    async def _listen(self) -> None:
        ended = partial(self._break, "the replica's end of its socket was closed")
        self._socket = await self._listener.take(self._take, ended)  # unblocked by the replica, or by `close`
        self._open(self._socket.send)

    async def _receive(self, samples: PortReceiver[Results]) -> None:
        while True:
            results = await samples.recv()  # unblocked by the replica, or by `close`
            if self._tell is None:
                self._open(lambda message: self._replica.tell.broadcast(self._name, message))
            self._take(results)

    def _open(self, tell: Callable[[ToReplica], None]) -> None:
        """Take this way to the replica from now on."""
        self._tell = tell
        suspects, self._unsent_suspects = self._unsent_suspects, []  # a sent one is withdrawn in another way
        for name in suspects:
            tell(Isolate(name))
        self._send()

    def _take(self, results: Results) -> None:
        for sent, result in results:
            request_id = own_name(sent)
            future = self._futures.get(request_id)
            if future is None:
                continue  # cancelled
            if isinstance(result, VersionedTokens):
                self._give(request_id, result)
                continue
            if result is not None:  # a suspect's turn lasts until `submit` or `cancel`
                del self._futures[request_id]
                self._streams.pop(request_id, None)
            settle(future, result)

    def _give(self, request_id: str, part: VersionedTokens) -> None:
        try:
            self._streams[request_id](part)
        except Exception as error:  # the caller's own: its request fails alone
            future = self._futures[request_id]
            settle(future, error)
            self.cancel(request_id)

    def _sent(self, request_id: str) -> str:
        """The name of a request at the replica."""
        return f"{self._name}.{request_id}"

    def _break(self, why: object) -> None:
        if self._ended is None:
            self._disconnect()
            self._end(ReplicaLost(f"the connection to it broke: {why}"))

    def _end(self, error: Exception) -> None:
        if self._ended is None:
            self._ended = error
            self._listening.cancel()
            self._end_all(error)  # generate-1

    def _disconnect(self) -> None:
        """Let the replica end this client's requests (generate-2); a dead one ignores it."""
        if self._socket is not None:
            self._socket.close()
        else:
            self._replica.tell.broadcast(self._name, Leave())

    def _end_all(self, error: Exception | None) -> None:
        futures, self._futures, self._unsent, self._streams = self._futures, {}, [], {}
        for future in futures.values():
            if error is None:
                future.cancel()
            else:
                settle(future, error)


class Clients:
    """The replica's end: takes the messages of connected clients, and sends each its results."""

    def __init__(self, told: Callable[[str, ToReplica], None]) -> None:
        """`told(client, message)` is called for what comes on sockets. The end of a connection is a `Leave`."""
        self._told = told
        self._open: dict[str, tuple[Callable[[Results], None], MessageSocket | None]] = {}
        """How to send to each, in any thread."""

    async def serve(self, client: str, ways: Ways, until: asyncio.Event) -> None:
        """Connect to a client; returns when the event is set."""
        socket, watch = None, None
        try:
            socket = await open_socket(ways.socket, partial(self._told, client), partial(self._told, client, Leave()))
            send = socket.send
        except OSError:  # the client is on another host, or in another network
            ways.port.send([])
            send = partial(asyncio.get_running_loop().call_soon_threadsafe, ways.port.send)
        if ways.process.host == this_host():
            watch = ExitWatch(ways.process, partial(self._told, client, Leave()))
        self._open[client] = send, socket
        try:
            await until.wait()
        finally:
            self._told(client, Leave())  # generate-2
            if watch is not None:
                watch.close()

    def disconnect(self, client: str) -> None:
        """Send nothing more to this client."""
        _, socket = self._open.pop(client, (None, None))
        if socket is not None:
            socket.close()

    def send(self, client: str, results: Results) -> None:
        """Send these results in one message, in any thread. Nothing happens if the client has left."""
        send, _ = self._open.get(client, (None, None))
        if send is not None:
            send(results)


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


def own_name(sent: str) -> str:
    """The client's name of a request that was sent."""
    return sent.partition(".")[2]


def client_of(sent: str) -> str:
    """The name of the client that sent a request."""
    return sent.partition(".")[0]
