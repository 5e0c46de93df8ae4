"""Actors that are replaced: what their callers get, and when a run gives up."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from monarch.actor import ActorError

from goaly.base.actors import SupervisionError
from goaly.base.errors import RunFailed
from goaly.journal.checkpoint_folder import Checkpoint
from goaly.run.replaceable_actors import Lost, ReplaceableActors, Restarts
from goaly.run.trainer_stage import CriticStage, TrainerStage
from tests import virtual_time
from tests.unit.run.keeping import keep
from tests.virtual_time import turns


class Kept:
    """A role whose actors are their own names, and what happened to it."""

    def __init__(self, limit: int = 3, *, has_peers: bool = True, on_death: bool = False):
        self.version = 0
        self.one = ReplaceableActors[str]("trainer", "trainer")
        self.events: list[str] = []
        self.errors: list[Exception] = []
        self.may_replace = asyncio.Event()
        self.may_replace.set()
        self.restarts = Restarts(limit, lambda: self.version)
        self.task = asyncio.ensure_future(
            self.one.keep(
                self.replace,
                kill=self.kill,
                restarts=self.restarts,
                say=self.events.append,
                report_seconds=5.0,
                has_peers=has_peers,
                on_death=(lambda: self.events.append("told")) if on_death else lambda: None,
            )
        )

    async def replace(self, name: str) -> str:
        self.events.append(f"replace {name}")
        await self.may_replace.wait()
        if self.errors:
            raise self.errors.pop()
        return name

    async def kill(self, name: str) -> None:
        self.events.append(f"kill {name}")


async def echo(actors: str) -> str:
    return actors


async def never(actors: str) -> str:
    return await asyncio.Future()


async def test_a_call_to_actors_that_die_is_lost_and_the_next_one_waits_for_their_replacement() -> None:
    kept = Kept()
    await turns()
    hanging = asyncio.ensure_future(kept.one.call("trainer.step", never))
    await turns()
    kept.may_replace.clear()
    assert kept.one.lost("trainer", "process 7 ended")
    with pytest.raises(Lost, match="trainer died: process 7 ended"):
        await hanging  # run-5
    waiting = asyncio.ensure_future(kept.one.call("trainer.step", echo))
    await turns()
    assert not kept.one.serves
    assert not waiting.done()
    kept.may_replace.set()
    assert await waiting == "trainer-1"
    assert kept.one.serves
    assert kept.events == [
        "trainer died: process 7 ended; it is being replaced",
        "kill trainer",
        "replace trainer-1",
        "trainer-1 serves in its place",
    ]
    kept.task.cancel()


async def test_a_death_is_counted_once_however_late_it_is_reported_again() -> None:
    kept = Kept()
    await turns()
    assert kept.one.lost("trainer", "process 7 ended")
    assert kept.one.lost("trainer", "the same, from another source")
    await turns()
    assert kept.one.lost("trainer", "half a minute later")
    await turns()
    assert await kept.one.call("trainer.step", echo) == "trainer-1"
    assert not kept.one.lost("critic", "another role")
    kept.task.cancel()


async def test_actors_that_die_while_they_are_replaced_are_replaced_again() -> None:
    kept = Kept()
    await turns()
    kept.may_replace.clear()
    kept.one.lost("trainer", "first")
    await turns()
    kept.one.lost("trainer-1", "second")
    await turns()
    kept.may_replace.set()
    assert await kept.one.call("trainer.step", echo) == "trainer-2"
    assert kept.events[3:] == [
        "trainer-1 died: second; it is being replaced",
        "kill trainer-1",
        "replace trainer-2",
        "trainer-2 serves in its place",
    ]
    kept.task.cancel()


@virtual_time.jumps
async def test_the_error_of_an_actor_whose_peer_has_died_is_the_peers_death_also_if_that_is_reported_later() -> None:
    kept = Kept()
    await turns()

    async def broken(actors: str) -> str:
        asyncio.get_running_loop().call_later(1.0, kept.one.lost, "trainer", "rank 1 ended")
        raise RunFailed("trainer.step failed: connection closed by peer")

    with pytest.raises(Lost, match="rank 1 ended"):
        await kept.one.call("trainer.step", broken)
    kept.task.cancel()


@virtual_time.jumps
async def test_an_error_that_the_death_of_the_hub_caused_is_not_the_actors_also_if_it_has_no_peers() -> None:
    kept = Kept(has_peers=False)
    await turns()

    async def broken(actors: str) -> str:
        asyncio.get_running_loop().call_later(1.0, kept.one.lost, "trainer", "the hub died")
        raise RunFailed("trainer.step failed") from ActorError(SupervisionError("the hub died"))

    with pytest.raises(Lost, match="the hub died"):
        await kept.one.call("trainer.step", broken)  # run-5

    async def ill(actors: str) -> str:
        raise RunFailed("trainer.step failed") from ActorError(ValueError("the loss is NaN"))

    began = asyncio.get_running_loop().time()
    with pytest.raises(RunFailed):
        await kept.one.call("trainer.step", ill)
    assert asyncio.get_running_loop().time() == began  # it waits for no report
    kept.task.cancel()


@virtual_time.jumps
async def test_an_actors_own_error_is_the_callers_and_nothing_is_replaced() -> None:
    kept = Kept()
    await turns()

    async def broken(actors: str) -> str:
        raise RunFailed("trainer.step failed: the loss is NaN")

    with pytest.raises(RunFailed, match="the loss is NaN"):
        await kept.one.call("trainer.step", broken)
    assert await kept.one.call("trainer.step", echo) == "trainer"
    kept.task.cancel()


@virtual_time.jumps
async def test_a_death_that_only_the_call_reports_counts() -> None:
    kept = Kept()
    await turns()

    async def dead(actors: str) -> str:
        if actors == "trainer":
            raise RunFailed("trainer died during trainer.step") from SupervisionError("no such process")
        return actors

    with pytest.raises(Lost):
        await kept.one.call("trainer.step", dead)
    assert await kept.one.call("trainer.step", dead) == "trainer-1"
    kept.task.cancel()


async def test_a_role_that_dies_too_often_without_a_step_in_between_ends_the_run() -> None:
    kept = Kept(limit=2)
    for death in range(5):  # a step after every second one
        await turns()
        kept.version = death // 2
        kept.one.lost(kept.one.name, f"death {death}")
    await turns()
    assert await kept.one.call("trainer.step", echo) == "trainer-5"
    for death in (5, 6):
        kept.one.lost(kept.one.name, f"death {death}")
        await turns()
    with pytest.raises(RunFailed, match=r"trainer died 3 times .*checkpoint.restarts=2.*the last time: death 6"):
        await kept.task


async def test_actors_that_die_with_another_role_do_not_use_up_their_own_budget() -> None:
    kept = Kept(limit=1)
    await turns()
    for death in range(5):
        waiting = asyncio.ensure_future(kept.one.call("trainer.step", never))
        await turns()
        kept.one.lost(kept.one.name, "the hub died", is_own=False)
        with pytest.raises(Lost) as lost:
            await waiting
        assert not lost.value.is_own
        await turns()
        assert await kept.one.call("trainer.step", echo) == f"trainer-{death + 1}"
    kept.errors.append(Lost("the next hub died meanwhile"))
    kept.one.lost("trainer-5", "the hub died", is_own=False)
    assert await kept.one.call("trainer.step", echo) == "trainer-7"
    kept.one.lost("trainer-7", "process 7 ended")
    await turns()
    assert not kept.task.done()
    kept.task.cancel()


async def test_those_who_call_actors_are_told_of_their_death_once_and_before_they_are_killed() -> None:
    kept = Kept(on_death=True)
    await turns()
    kept.errors.append(RunFailed("no memory"))
    kept.one.lost("trainer", "process 7 ended")
    assert await kept.one.call("trainer.step", echo) == "trainer-2"
    kept.one.lost("trainer-2", "process 8 ended")
    await turns()
    assert [event for event in kept.events if event == "told" or event.startswith("kill")] == [
        "told",
        "kill trainer",
        "kill trainer-1",
        "told",
        "kill trainer-2",
    ]
    kept.task.cancel()


async def test_a_replacement_that_cannot_be_brought_up_counts_as_a_death() -> None:
    kept = Kept(limit=2)
    await turns()
    kept.errors.append(RunFailed("trainer.start failed: no memory"))
    kept.one.lost("trainer", "process 7 ended")
    assert await kept.one.call("trainer.step", echo) == "trainer-2"
    kept.errors += [RunFailed("trainer.start failed: no memory")] * 2
    kept.one.lost("trainer-2", "process 8 ended")
    with pytest.raises(RunFailed, match=r"trainer died 3 times .*the last time: process 8 ended"):
        await kept.task


async def test_once_nobody_replaces_them_a_call_to_dead_actors_fails() -> None:
    kept = Kept()
    await turns()
    kept.may_replace.clear()
    kept.one.lost("trainer", "process 7 ended")
    waiting = asyncio.ensure_future(kept.one.call("trainer.step", echo))
    await turns()
    kept.task.cancel()
    with pytest.raises(RunFailed, match="trainer died: process 7 ended"):
        await waiting
    assert not ReplaceableActors("critic", "critic").lost("critic", "before anyone keeps it")


async def test_a_cancelled_call_is_cancelled_at_the_actors() -> None:
    kept = Kept()
    await turns()
    ended = asyncio.Event()

    async def call(actors: str) -> str:
        try:
            return await asyncio.Future()
        finally:
            ended.set()

    calling = asyncio.ensure_future(kept.one.call("trainer.step", call))
    await turns()
    calling.cancel()
    await asyncio.wait_for(ended.wait(), 5)
    assert calling.cancelled()
    kept.task.cancel()


class Ranks:
    """A model that counts the batches that it trains; its `hangs`-th step never ends."""

    def __init__(self, hangs: int | None = None):
        self.trained: list[int] = []
        self.published: list[int] = []
        self._hangs = hangs
        self.written: list[Path] = []
        for name in ("start", "step", "publish", "digest", "stage", "write"):
            endpoint = SimpleNamespace(stream=self._stream(getattr(self, f"_{name}")))
            setattr(self, name, endpoint)

    def _stream(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., list[Awaitable[Any]]]:
        return lambda *arguments: [method(*arguments)]

    async def _start(self, folder: Path | None) -> int:
        self.trained = list(range(0 if folder is None else int(folder.name)))
        return len(self.trained)

    async def _step(self, batch: Any) -> dict[str, float]:
        if batch.id == self._hangs:
            await asyncio.Future()
        assert batch.id == len(self.trained)
        self.trained.append(batch.id)
        return {"loss": float(batch.id)}

    async def _publish(self) -> int:
        self.published.append(len(self.trained))
        return len(self.trained)

    async def _stage(self) -> int:
        return len(self.trained)

    async def _write(self, folder: Path) -> None:
        self.written.append(folder)

    async def _digest(self) -> str:
        return f"digest of {self.trained}"


async def logged(reader: str, first: int, end: int) -> Any:
    for batch in range(first, end):
        yield SimpleNamespace(id=batch)


async def replaced_in_step(stage: Any, newer: Ranks, checkpoint: Checkpoint | None) -> dict[str, float]:
    """The metrics of step 5, during which the stage's ranks die."""

    async def replace(name: str) -> Ranks:
        await stage.restore(newer, checkpoint, logged)
        return newer

    keeping = keep(stage.ranks, replace)
    for batch in range(3, 5):
        await stage.step(SimpleNamespace(id=batch))
    step = asyncio.ensure_future(stage.step(SimpleNamespace(id=5)))
    await turns()
    stage.ranks.lost(stage.ranks.role, "process 7 ended")
    metrics = await step
    keeping.cancel()
    return metrics


@pytest.mark.parametrize("step", [None, 4])
async def test_ranks_that_replace_lost_ones_train_the_logged_batches_and_then_the_step_that_was_lost(
    step: int | None, tmp_path: Path
) -> None:
    checkpoint = None if step is None else Checkpoint(tmp_path / str(step), step, {})
    for stage_of in (
        lambda ranks: TrainerStage(ranks, steps=9, folder=tmp_path),
        lambda ranks: CriticStage(ranks),
    ):
        newer = Ranks()
        stage = stage_of(ReplaceableActors("model", Ranks(hangs=5)))
        await stage.start(Checkpoint(tmp_path / "3", 3, {}))
        assert await replaced_in_step(stage, newer, checkpoint) == {"loss": 5.0}
        assert newer.trained == [0, 1, 2, 3, 4, 5]
        assert stage.steps_done == 6
        if isinstance(stage, TrainerStage):
            assert newer.published == [5]


async def test_a_version_that_is_made_again_with_another_digest_is_told(tmp_path: Path) -> None:
    said: list[str] = []
    stage = TrainerStage(ReplaceableActors("trainer", Ranks()), said.append, steps=9, folder=tmp_path)
    await stage.start(None)
    await stage.step(SimpleNamespace(id=0))
    await stage.publish()
    await stage.restore(Ranks(), None, logged)
    assert said == ["trainer trains 1 batches again"]
    other = Ranks()
    other.digest = SimpleNamespace(stream=lambda: [echo("another digest")])
    await stage.restore(other, None, logged)
    assert said[2:] == ["policy version 1 has digest another digest, but had digest of [0] when it was made first"]


async def test_a_copy_of_the_state_that_died_with_its_ranks_is_not_written_by_the_new_ones(tmp_path: Path) -> None:
    stage = CriticStage(ReplaceableActors("critic", Ranks()))
    newer = Ranks()

    async def replace(name: str) -> Ranks:
        return newer

    keeping = keep(stage.ranks, replace)
    await turns()
    assert await stage.stage() == 0
    stage.ranks.lost("critic", "process 7 ended")
    await turns()
    with pytest.raises(Lost, match="critic died with its copy of the state"):
        await stage.write(tmp_path)
    await stage.stage()
    await stage.write(tmp_path)
    assert newer.written == [tmp_path]
    keeping.cancel()
