"""The stages as a script sees them, over queues that answer as they are told."""

import itertools
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from monarch.actor import ActorError

from goaly.backlog.admission import Ticket
from goaly.errors import RunFailed
from goaly.run.replaceable import Replaceable
from goaly.run.stages import QUEUE_LOST, BacklogStage, TrainerStage


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
    backlog = BacklogStage(queue)
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


@pytest.mark.parametrize("calls", [1, 2, 3])
async def test_a_run_ends_with_the_error_that_started_it_however_many_actor_calls_it_came_through(calls: int) -> None:
    """The trainer's publish calls the store."""

    async def publish() -> Any:
        error: Exception = RuntimeError("sabotage")
        for _ in range(calls):
            error = pickle.loads(pickle.dumps(ActorError(error)))
        raise error

    ranks = SimpleNamespace(publish=SimpleNamespace(stream=lambda: [publish()]))
    trainer = TrainerStage(Replaceable("trainer", ranks), steps=1, folder=Path())
    with pytest.raises(RunFailed) as failed:
        await trainer.publish()
    assert str(failed.value) == "trainer.publish failed: RuntimeError: sabotage"
