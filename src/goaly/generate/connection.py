"""How requests travel from a client to a replica, and samples back.

A message between actors costs either side about half a millisecond, as much as a dozen tokens. So the requests of one
turn of the client's event loop leave in one message, and the samples that end in one step of the engine come in one,
together with the parts that this step added to streamed answers.

A replica's death does not tell which of its requests caused it, and a request that kills engines (a poison request)
must neither kill one replica after another nor fail the requests beside it. So each request counts the deaths of
replicas under it:

    0, 1 deaths  It runs like any other request: most deaths have nothing to do with a request, and they cost no speed.
    2 deaths     It is a suspect. A replica runs one suspect at a time (`Quarantine`); the others wait outside of the
                 engine, so that a death counts for one of them only.
    3 deaths     It fails alone with a `PoisonRequest`. Two of the deaths may be chance or another request's fault; at
                 the third it was the only suspect.

Invariants
    LI-1  Every request ends once: with its sample, with its own error, or with `ReplicaLost` when the connection broke
          or the replica was closed, even if it is submitted after that.
    LI-2  A request that is cancelled before it was sent is never sent. A sent one is cancelled at the replica.
    LI-3  At the replica no two requests have one name, also if a request of a client that died comes again from another
          one.
"""

import asyncio
import uuid
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from monarch.actor import Channel, Port, PortReceiver

from goaly.errors import ReplicaLost, root_cause
from goaly.generate.request import Request, Sample, Sampling, settle
from goaly.generate.streamed_answer import OnPart, Part
from goaly.liveness import this_process
from goaly.process import vital_task

if TYPE_CHECKING:
    from goaly.generate.generator import Generator

SUSPECT_DEATHS = 2
POISON_DEATHS = 3

Results = list[tuple[str, Part | Sample | Exception | None]]
"""Request ids, each with a part of its answer, its sample or its error. None tells a suspect that its turn has come."""


class Connection:
    """The client's end: submit requests, and await the futures."""

    def __init__(self, replica: "Generator"):
        """`replica` is the handle of a generator, or of its first rank."""
        self._replica = replica
        self._name = uuid.uuid4().hex[:12]
        self._futures: dict[str, asyncio.Future[Any]] = {}
        self._streams: dict[str, OnPart] = {}
        self._unsent: list[Request] = []
        self._ended: Exception | None = None
        port, samples = Channel[Results].open()
        self._tasks = (
            vital_task(self._connect(port), "connection: open"),
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
    ) -> asyncio.Future[Sample]:
        """The replica's answer to this prompt, sampled under weights of at least `min_version`. `on_part` gets its parts
        before; `written` is as in `Request`."""
        future = self._expect(request_id)
        if self._ended is None:
            if not self._unsent:
                asyncio.get_running_loop().call_soon(self._send)
            sent, streams = self._sent(request_id), on_part is not None
            self._unsent.append(Request(sent, prompt, sampling, min_version, streams, written))
            if on_part is not None:
                self._streams[request_id] = on_part
        return future

    def wait_turn(self, request_id: str) -> asyncio.Future[None]:
        """Wait until the replica runs no other suspect. Then `submit` this request, or `cancel` it."""
        future = self._expect(request_id)
        if self._ended is None:
            self._replica.isolate.broadcast(self._name, self._sent(request_id))
        return future

    def cancel(self, request_id: str) -> None:
        """Cancel a request, here and at the replica. Unknown and ended requests are ignored."""
        future = self._futures.pop(request_id, None)
        self._streams.pop(request_id, None)
        if future is None:
            return
        future.cancel()
        unsent = [request for request in self._unsent if request.request_id != self._sent(request_id)]
        if len(unsent) == len(self._unsent):
            self._replica.cancel.broadcast([self._sent(request_id)])
        self._unsent = unsent  # LI-2

    def close(self) -> None:
        """Cancel all requests, here and, if the replica lives, there."""
        for task in self._tasks:
            task.cancel()
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
        requests, self._unsent = self._unsent, []
        try:
            if requests:
                self._replica.submit.broadcast(self._name, requests)
        except Exception:  # one of them cannot be pickled; a message to a dead replica does not raise
            for request in requests:
                self._send_alone(request)

    def _send_alone(self, request: Request) -> None:
        try:
            self._replica.submit.broadcast(self._name, [request])
        except Exception as error:
            self._streams.pop(own_name(request.request_id), None)
            settle(self._futures.pop(own_name(request.request_id)), error)  # LI-1

    async def _connect(self, port: Port[Results]) -> None:
        try:
            await self._replica.connect.call_one(
                self._name, port, this_process()
            )  # unblocked by the replica's close, or its death
            self._ended = ReplicaLost("the generator was closed")
        except Exception as error:  # it died, or only the connection broke
            self._disconnect()
            self._ended = ReplicaLost(f"the connection to it broke: {root_cause(error)}")
        self._end_all(self._ended)  # LI-1

    async def _receive(self, samples: PortReceiver[Results]) -> None:
        while True:
            for sent, result in await samples.recv():  # unblocked by the replica, or by `close`
                request_id = own_name(sent)
                future = self._futures.get(request_id)
                if future is None:
                    continue  # cancelled
                if isinstance(result, Part):
                    self._streams[request_id](result)
                    continue
                if result is not None:  # a suspect's turn lasts until `submit` or `cancel`
                    del self._futures[request_id]
                    self._streams.pop(request_id, None)
                settle(future, result)

    def _sent(self, request_id: str) -> str:
        """The name of a request at the replica (LI-3)."""
        return f"{self._name}.{request_id}"

    def _disconnect(self) -> None:
        unsent = {request.request_id for request in self._unsent}
        sent = [name for name in map(self._sent, self._futures) if name not in unsent]
        self._replica.disconnect.broadcast(self._name, sent)  # LI-2; a dead replica ignores it

    def _end_all(self, error: Exception | None) -> None:
        futures, self._futures, self._unsent, self._streams = self._futures, {}, [], {}
        for future in futures.values():
            if error is None:
                future.cancel()
            else:
                settle(future, error)


def own_name(sent: str) -> str:
    """The client's name of a request that was sent."""
    return sent.partition(".")[2]


def client_of(sent: str) -> str:
    """The name of the client that sent a request."""
    return sent.partition(".")[0]


class Clients:
    """The replica's end: the clients that are connected, and the results to send to each."""

    def __init__(self) -> None:
        self._ports: dict[str, Port[Results]] = {}
        self._unsent: dict[str, Results] = {}

    def connect(self, client: str, port: Port[Results]) -> None:
        """Send this client's results to the port."""
        self._ports[client] = port

    def disconnect(self, client: str) -> None:
        """Send nothing more to this client."""
        self._ports.pop(client, None)

    def deliver(self, client: str, request_id: str, result: Part | Sample | Exception | None) -> None:
        """Send a result, or None for a suspect's turn, in one message with the others of this event loop turn."""
        results = self._unsent.setdefault(client, [])
        if not results:
            asyncio.get_running_loop().call_soon(self._send, client)
        results.append((request_id, result))

    def _send(self, client: str) -> None:
        results = self._unsent.pop(client)
        port = self._ports.get(client)
        if port is not None:
            port.send(results)


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
