"""The stages as a script sees them, over queues that answer as they are told."""

import itertools
from typing import Any

import pytest

from goaly.backlog.admission import Ticket
from goaly.run.stages import QUEUE_LOST, Backlog


class Queue:
    """A queue that admits for as long as it lives."""

    def __init__(self) -> None:
        self.tickets = itertools.count()
        self.alive = True

    def __getattr__(self, name: str) -> Any:
        return _Endpoint(self, name)


class _Endpoint:
    def __init__(self, queue: Queue, name: str):
        self._queue, self._name = queue, name

    async def call_one(self) -> Any:
        if not self._queue.alive:
            raise ConnectionError("the hub is gone")
        if self._name == "admit":
            return Ticket(index=next(self._queue.tickets), min_version=0)
        if self._name == "reasons":
            return {"rejected: no signal": 1}
        return {"admitted": 4, "waiting": 0, "running": 1, "queued": 0, "trained": 2, "rejected": 1, "failed": 0}


@pytest.mark.parametrize("alive", [True, False])
async def test_the_accounting_of_a_run_is_closed_also_when_the_queue_is_lost(alive: bool) -> None:
    queue = Queue()
    backlog = Backlog(queue)
    tickets = backlog.tickets()
    await anext(tickets)
    await backlog.counts()
    for _ in range(5):
        await anext(tickets)
    await tickets.aclose()
    queue.alive = alive
    if alive:
        await backlog.close()
        assert backlog.final_reasons == {"rejected: no signal": 1}
        return
    with pytest.raises(ConnectionError):
        await backlog.close()
    counts = backlog.final_counts
    assert counts == {"admitted": 6, "trained": 2, "rejected": 1, "failed": 3}
    assert backlog.final_reasons == {QUEUE_LOST: 3}
