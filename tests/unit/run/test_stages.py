"""The stages as a script sees them, over queues that answer as they are told."""

import asyncio
import itertools
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from monarch.actor import ActorError

from goaly.backlog.events import Dropped, Ticket
from goaly.base.actors import SupervisionError
from goaly.base.errors import RunFailed
from goaly.journal.records import Published
from goaly.run.backlog_stage import QUEUE_LOST, BacklogStage
from goaly.run.replaceable_actors import ReplaceableActors
from goaly.run.trainer_stage import TrainerStage
from tests.unit.run.keeping import keep
from tests.virtual_time import turns


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
    backlog = BacklogStage(ReplaceableActors("hub", SimpleNamespace(queue=queue)))
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

    ranks = SimpleNamespace(
        publish=SimpleNamespace(stream=lambda: [publish()]),
        digest=SimpleNamespace(stream=lambda: [asyncio.sleep(60)]),
    )
    trainer = TrainerStage(ReplaceableActors("trainer", ranks), steps=1, folder=Path())
    with pytest.raises(RunFailed) as failed:
        await trainer.publish()
    assert str(failed.value) == "trainer.publish failed: RuntimeError: sabotage"


class Hub:
    """A hub whose queue gives out batches from one number on, and dies when it is asked for the one after `last`."""

    def __init__(self, first: int = 0, last: int = 9):
        self.opened: list[tuple[Any, ...]] = []
        self.trained: list[int] = []
        self.closed = False
        self.reported: list[Dropped] = []
        self._next, self._last = first, last
        endpoints = ("open", "next_batch", "trained", "is_running", "close")
        self.queue: Any = SimpleNamespace(
            **{name: SimpleNamespace(call_one=getattr(self, f"_{name}")) for name in endpoints}
        )
        self.queue.report = SimpleNamespace(broadcast=self.reported.append)
        self.queue.record = SimpleNamespace(broadcast=lambda record: None)

    async def _open(self, *arguments: Any) -> str:
        self.opened.append(pickle.loads(pickle.dumps(arguments)))
        return "recovered"

    async def _next_batch(self) -> Any:
        if self._next > self._last:
            raise SupervisionError("the hub died")
        self._next += 1
        return SimpleNamespace(id=self._next - 1)

    async def _trained(self, batch: int, version: int) -> None:
        self.trained.append(batch)

    async def _is_running(self, ticket: int) -> bool:
        return True

    async def _close(self) -> None:
        assert self.opened, "a closed queue replays nothing"
        self.closed = True


async def test_a_training_loop_goes_on_with_the_next_hub_which_has_what_the_dead_one_had_given_out(
    tmp_path: Path,
) -> None:
    hubs = [Hub(first=3, last=4), Hub(first=5)]
    kept: ReplaceableActors[Any] = ReplaceableActors("hub", hubs[0])
    backlog = BacklogStage(kept)

    async def replace(name: str) -> Hub:
        assert await backlog.restore(hubs[1]) == "recovered"  # type: ignore[bad-argument-type]
        return hubs[1]

    keeping = keep(kept, replace)
    await turns()
    await backlog.open(tmp_path, 3, {"lr": 1.0})
    seen = []
    async for batch in backlog.batches(7):
        seen.append(batch.id)
        backlog.record(Published(version=batch.id + 1, digest=f"d{batch.id + 1}"))
        if batch.id != 4:  # whose step goes on meanwhile
            await backlog.trained(batch, batch.id + 1)
    assert seen == [3, 4, 5, 6]  # run-6
    assert not hubs[0].closed
    not_on_disk = [Published(version=5, digest="d5")]  # unlike that of version 4: a batch was given out since
    assert hubs[1].opened == [(tmp_path, 4, {"lr": 1.0}, 5, not_on_disk)]
    assert (hubs[0].trained, hubs[1].trained) == ([3], [5, 6])
    assert backlog.hub == "hub-1"
    assert hubs[1].closed
    third = Hub()
    await backlog.restore(third)  # type: ignore[bad-argument-type]
    assert third.closed  # or somebody would wait for its batches
    assert [await backlog.is_running(0, hub) for hub in ("hub", "hub-1")] == [False, True]
    for hub in ("hub", "hub-1"):  # the dead one's ticket is given out again
        backlog.drop(0, hub, "cancelled")
    assert [end.ticket for end in hubs[1].reported] == [0]
    keeping.cancel()
