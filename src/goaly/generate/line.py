"""How a client's requests travel to a replica and samples come back: all of one moment in one message.

A message between actors costs either side about half a millisecond, as much as a dozen tokens. Requests that are asked
in one turn of the client's event loop leave together, and samples that end in one step of the engine come together.

Invariants
    LI-1  Every request ends: with its sample, with its own error, or, when the line broke or the replica was closed,
          with `ReplicaLost`, also if it is asked only then. None ends twice.
    LI-2  A request that is withdrawn before it left never leaves; one that left is cancelled at a replica that lives.
"""

import asyncio
import uuid
from dataclasses import dataclass
from typing import Any

from monarch.actor import Channel

from goaly.errors import ReplicaLost, root_cause
from goaly.generate.request import Sample, Sampling
from goaly.process import vital_task

News = list[tuple[str, Sample | Exception | None]]
"""What became of requests; None: it is this suspect's turn."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request on its way."""

    request_id: str
    prompt: list[int]
    sampling: Sampling
    min_version: int


class Line:
    """A client's end: ask here, and await what is handed back."""

    def __init__(self, replica: Any):
        """`replica` is the handle of a generator, or of the first rank of one."""
        self._replica = replica
        self._name = uuid.uuid4().hex
        self._under_way: dict[str, asyncio.Future[Any]] = {}
        self._leaving: list[Asked] = []
        self._over: Exception | None = None
        port, samples = Channel[News].open()
        self._tasks = (
            vital_task(self._connected(port), "line: connected"),
            vital_task(self._receive(samples), "line: samples"),
        )

    def ask(
        self, request_id: str, prompt: list[int], sampling: Sampling, min_version: int = 0
    ) -> asyncio.Future[Sample]:
        """Have the replica sample an answer to these tokens, under weights of at least `min_version`."""
        future = self._expect(request_id)
        if self._over is None:
            if not self._leaving:
                asyncio.get_running_loop().call_soon(self._send)
            self._leaving.append(Asked(request_id, prompt, sampling, min_version))
        return future

    def turn(self, request_id: str) -> asyncio.Future[None]:
        """Wait until the replica has no other suspect under way; then `ask` for this one, or `cancel` it."""
        future = self._expect(request_id)
        if self._over is None:
            self._replica.isolate.broadcast(self._name, request_id)
        return future

    def cancel(self, request_id: str) -> None:
        """Withdraw a request; nothing comes of it any more."""
        future = self._under_way.pop(request_id, None)
        if future is None:
            return
        future.cancel()
        left = [asked for asked in self._leaving if asked.request_id != request_id]
        if len(left) == len(self._leaving):
            self._replica.cancel.broadcast([request_id])
        self._leaving = left  # LI-2

    def close(self) -> None:
        """Hang up: what is under way is cancelled, here and, if the replica lives, there."""
        for task in self._tasks:
            task.cancel()
        if self._over is None:
            self._disconnect()
            self._over = ReplicaLost("this client hung up")
        self._end_all(None)

    def _expect(self, request_id: str) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._over is None:
            self._under_way[request_id] = future
        else:
            future.set_exception(self._over)
        return future

    def _send(self) -> None:
        leaving, self._leaving = self._leaving, []
        try:
            if leaving:
                self._replica.submit.broadcast(self._name, leaving)
        except Exception:  # one of them can't be pickled; to a dead replica this is nothing
            for asked in leaving:
                self._send_alone(asked)

    def _send_alone(self, asked: Asked) -> None:
        try:
            self._replica.submit.broadcast(self._name, [asked])
        except Exception as error:
            future = self._under_way.pop(asked.request_id)
            if not future.done():
                future.set_exception(error)  # LI-1

    async def _connected(self, port: Any) -> None:
        try:
            await self._replica.connect.call_one(self._name, port)  # unblocked by the replica's close, or its death
            self._over = ReplicaLost("the generator was closed")
        except Exception as error:  # it died, or only the way to it broke
            self._disconnect()
            self._over = ReplicaLost(f"the line to it broke: {root_cause(error)}")
        self._end_all(self._over)  # LI-1

    async def _receive(self, samples: Any) -> None:
        while True:
            for request_id, result in await samples.recv():  # unblocked by the replica, or by `close`
                future = self._under_way.get(request_id)
                if future is None or future.done():
                    continue  # withdrawn
                if result is not None:  # a turn lasts until `ask`, or `cancel`
                    del self._under_way[request_id]
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    def _disconnect(self) -> None:
        leaving = {asked.request_id for asked in self._leaving}
        left = [request_id for request_id in self._under_way if request_id not in leaving]
        self._replica.disconnect.broadcast(self._name, left)  # LI-2; to a dead replica this is nothing

    def _end_all(self, error: Exception | None) -> None:
        under_way, self._under_way, self._leaving = self._under_way, {}, []
        for future in under_way.values():
            if future.done():
                continue
            if error is None:
                future.cancel()
            else:
                future.set_exception(error)


class Switchboard:
    """A replica's end: who asked for what, and where samples go."""

    def __init__(self) -> None:
        self._ports: dict[str, Any] = {}
        self._news: dict[str, News] = {}

    def connect(self, client: str, port: Any) -> None:
        """Send this client's samples to the port."""
        self._ports[client] = port

    def disconnect(self, client: str) -> None:
        """Send nothing more to this client."""
        self._ports.pop(client, None)

    def deliver(self, client: str, request_id: str, result: Sample | Exception | None) -> None:
        """Send a result, or None for a suspect's turn, together with the others of this turn of the event loop."""
        news = self._news.setdefault(client, [])
        if not news:
            asyncio.get_running_loop().call_soon(self._send, client)
        news.append((request_id, result))

    def _send(self, client: str) -> None:
        news = self._news.pop(client)
        port = self._ports.get(client)
        if port is not None:
            port.send(news)
