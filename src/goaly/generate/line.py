"""How a client's requests travel to a replica and samples come back: all of one moment in one message.

A message between actors costs either side about half a millisecond, as much as a dozen tokens. Requests that are asked
in one turn of the client's event loop leave together, and samples that end in one step of the engine come together.

Invariants
    LI-1  Every request ends: with its sample, with its own error, or, when the replica was closed or died, with an
          error that says so, also if it is asked only then. None ends twice.
    LI-2  A request that is withdrawn before it left never leaves.
"""

import asyncio
import uuid
from dataclasses import dataclass
from typing import Any

from monarch.actor import Channel

from goaly.generate.request import EngineFailed, Sample, Sampling

Ended = list[tuple[str, Sample | Exception]]


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
        self._under_way: dict[str, asyncio.Future[Sample]] = {}
        self._leaving: list[Asked] = []
        self._over: Exception | None = None
        port, samples = Channel[Ended].open()
        self._tasks = (
            asyncio.create_task(self._connected(port), name="line: connected"),
            asyncio.create_task(self._receive(samples), name="line: samples"),
        )

    def ask(
        self, request_id: str, prompt: list[int], sampling: Sampling, min_version: int = 0
    ) -> asyncio.Future[Sample]:
        """Have the replica sample an answer to these tokens, under weights of at least `min_version`."""
        future: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
        if self._over is not None:
            future.set_exception(self._over)
            return future
        self._under_way[request_id] = future
        if not self._leaving:
            asyncio.get_running_loop().call_soon(self._send)
        self._leaving.append(Asked(request_id, prompt, sampling, min_version))
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
        """Hang up: what is under way is cancelled here, whatever becomes of it there."""
        for task in self._tasks:
            task.cancel()
        self._end_all(None)

    def _send(self) -> None:
        leaving, self._leaving = self._leaving, []
        if leaving:
            self._replica.submit.broadcast(self._name, leaving)

    async def _connected(self, port: Any) -> None:
        try:
            await self._replica.connect.call_one(self._name, port)  # unblocked by the replica's close, or its death
            self._over = EngineFailed("the generator was closed")
        except Exception as error:
            self._over = error
        self._end_all(self._over)  # LI-1

    async def _receive(self, samples: Any) -> None:
        while True:
            for request_id, result in await samples.recv():  # unblocked by the replica, or by `close`
                future = self._under_way.pop(request_id, None)
                if future is None or future.done():
                    continue  # withdrawn
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)

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
        self._ended: dict[str, Ended] = {}

    def connect(self, client: str, port: Any) -> None:
        """Send this client's samples to the port."""
        self._ports[client] = port

    def disconnect(self, client: str) -> None:
        """Send nothing more to this client."""
        self._ports.pop(client, None)

    def deliver(self, client: str, request_id: str, result: Sample | Exception) -> None:
        """Send a result, together with the others of this turn of the event loop."""
        ended = self._ended.setdefault(client, [])
        if not ended:
            asyncio.get_running_loop().call_soon(self._send, client)
        ended.append((request_id, result))

    def _send(self, client: str) -> None:
        ended = self._ended.pop(client)
        port = self._ports.get(client)
        if port is not None:
            port.send(ended)
