"""Rollout workers that die: their groups run again, and their replacements know the replicas."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from goaly.agents.session_files import SessionFiles
from goaly.backlog.events import CANCELLED, Ticket
from goaly.generate.connection import POISON_DEATHS
from goaly.prompts.prompt import Prompt
from goaly.rollout.group_runner import GroupSummary
from goaly.run.replaceable_actors import ReplaceableActors
from goaly.run.rollout_stage import CANCEL_SECONDS, RolloutStage
from tests import virtual_time
from tests.unit.run.keeping import keep
from tests.virtual_time import turns


class Worker:
    """A rollout worker that runs groups until it dies."""

    def __init__(self, name: str, *, answers: bool):
        self.ran: list[int] = []
        self.running: list[int] = []
        self.name = name
        self._answers = answers
        self.tables: list[Any] = []
        for endpoint in ("run_group", "evaluate", "start", "replicas"):
            setattr(self, endpoint, SimpleNamespace(call_one=getattr(self, f"_{endpoint}")))
        self.cancel = SimpleNamespace(broadcast=lambda keys: None)

    async def _run_group(self, ticket: Ticket, prompt: Prompt) -> GroupSummary:
        self.ran.append(ticket.index)
        if not self._answers:
            self.running.append(ticket.index)
            await asyncio.Future()
        return GroupSummary(ticket=ticket.index, prompt_id=prompt.id, rewards=(1.0,))

    async def _evaluate(self, *_: Any) -> list[float]:
        if not self._answers:
            await asyncio.Future()
        return [1.0]

    async def _start(self) -> None: ...

    async def _replicas(self, replicas: Any) -> None:
        self.tables.append(replicas)


class Backlog:
    """The tickets that run, and those that were dropped."""

    def __init__(self, is_running: bool = True):
        self._is_running = is_running
        self.hub = "hub"
        self.dropped: list[tuple[int, str]] = []

    def hub_of(self, ticket: int) -> str:
        return self.hub

    async def is_running(self, ticket: int, hub: str) -> bool:
        return self._is_running and hub == self.hub

    def drop(self, ticket: int, hub: str, why: str) -> None:
        if hub == self.hub:
            self.dropped.append((ticket, why))


PROMPT = Prompt(id="q", source="sums", messages=())


class Rollouts:
    """Two workers, of which those named in `deadly` never answer; each may be replaced by one of the same kind."""

    def __init__(
        self, backlog: Backlog, deadly: str = "rollout-0 ", *, fixed: bool = False, sessions: Path | None = None
    ):
        self.spawned: dict[str, Worker] = {}
        self.may_replace = asyncio.Event()
        self.may_replace.set()
        self._deadly = deadly
        workers = [ReplaceableActors(name, self.spawn(name)) for name in ("rollout-0", "rollout-1")]
        self.stage = RolloutStage(workers, backlog=backlog, fixed=fixed, sessions=sessions)
        self.keeping = [keep(worker, self.replace, limit=9) for worker in workers]

    def spawn(self, name: str) -> Worker:
        self.spawned[name] = Worker(name, answers=f"{name} " not in self._deadly)
        return self.spawned[name]

    async def replace(self, name: str) -> Worker:
        worker = self.spawn(name)
        await self.stage.restore(worker)
        await self.may_replace.wait()
        return worker

    def close(self) -> None:
        for keeping in self.keeping:
            keeping.cancel()


@pytest.mark.parametrize("is_running", [True, False])
async def test_the_groups_of_a_worker_that_dies_run_elsewhere_unless_they_were_reported(is_running: bool) -> None:
    rollouts = Rollouts(Backlog(is_running))
    await rollouts.stage.use({"generator-0": "replica"})
    await turns()
    group = asyncio.ensure_future(rollouts.stage.group(Ticket(index=0, min_version=0), PROMPT))
    await turns()
    assert rollouts.spawned["rollout-0"].ran == [0]
    rollouts.may_replace.clear()
    rollouts.stage.workers[0].lost("rollout-0", "process 7 ended")
    await asyncio.wait_for(group, 5)
    assert rollouts.spawned["rollout-1"].ran == ([0] if is_running else [])  # run-7
    rollouts.may_replace.set()
    await turns(20)
    new = rollouts.spawned["rollout-0-1"]
    assert new.tables == [{"generator-0": "replica"}]  # it has the routing table when it serves
    await rollouts.stage.group(Ticket(index=1, min_version=0), PROMPT)
    assert new.ran == [1]
    rollouts.close()


async def test_a_group_whose_agents_know_its_worker_waits_for_the_one_in_its_place() -> None:
    rollouts = Rollouts(Backlog(), deadly="rollout-1 ", fixed=True)
    await turns()
    rollouts.stage._running[0] = 9
    group = asyncio.ensure_future(rollouts.stage.group(Ticket(index=6, min_version=0), PROMPT))
    await turns()
    rollouts.stage._running[0] = 0
    rollouts.may_replace.clear()
    rollouts.stage.workers[1].lost("rollout-1", "process 7 ended")
    await turns()
    await rollouts.stage.group(Ticket(index=7, min_version=0), PROMPT)  # does not wait
    rollouts.may_replace.set()
    await asyncio.wait_for(group, 5)
    assert rollouts.spawned["rollout-1-1"].ran == [6]
    assert rollouts.spawned["rollout-0"].ran == [7]
    assert rollouts.stage._homes == {}
    rollouts.close()


async def test_a_group_whose_agents_know_its_worker_returns_to_it_with_the_next_hub() -> None:
    backlog = Backlog()
    rollouts = Rollouts(backlog, deadly="rollout-1 ", fixed=True)
    await turns()
    rollouts.stage._running[0] = 9
    group = asyncio.ensure_future(rollouts.stage.group(Ticket(index=6, min_version=0), PROMPT))
    await turns()
    rollouts.stage._running[0] = 0
    backlog.hub = "hub-1"
    rollouts.stage.workers[1].lost("rollout-1", "the hub died")
    await asyncio.wait_for(group, 5)
    await asyncio.wait_for(rollouts.stage.group(Ticket(index=6, min_version=0), PROMPT), 5)
    assert rollouts.spawned["rollout-1-1"].ran == [6]
    rollouts.close()


async def test_the_groups_of_a_hub_that_died_do_not_run_again_because_their_tickets_are_given_out_again() -> None:
    backlog = Backlog()
    rollouts = Rollouts(backlog, deadly="rollout-0 rollout-1 ")
    await turns()
    rollouts.may_replace.clear()
    running = asyncio.ensure_future(rollouts.stage.group(Ticket(index=0, min_version=0), PROMPT))
    await turns()
    for worker in rollouts.stage.workers:  # which call the hub, and so die with it
        worker.lost(worker.name, "the hub died")
    waiting = asyncio.ensure_future(rollouts.stage.group(Ticket(index=1, min_version=0), PROMPT))
    await turns()
    backlog.hub = "hub-1"
    again = asyncio.ensure_future(rollouts.stage.group(Ticket(index=1, min_version=0), PROMPT))
    await turns()  # the same ticket twice, before a worker serves
    rollouts.may_replace.set()
    await asyncio.wait_for(asyncio.gather(running, waiting, again), 5)  # run-7
    assert sorted(rollouts.spawned["rollout-0-1"].ran + rollouts.spawned["rollout-1-1"].ran) == [1]
    rollouts.close()


async def test_an_evaluation_outlives_any_number_of_hubs() -> None:
    rollouts = Rollouts(
        Backlog(), deadly=" ".join(f"rollout-{worker}{number} " for worker in "01" for number in ("", "-1", "-2", "-3"))
    )
    await turns()
    evaluation = asyncio.ensure_future(rollouts.stage.rewards([PROMPT], 1, {}, 0))
    for _ in range(POISON_DEATHS + 1):
        await turns(20)
        for worker in rollouts.stage.workers:
            worker.lost(worker.name, "the hub died", is_own=False)
    assert await asyncio.wait_for(evaluation, 5) == [[1.0]]
    rollouts.close()


async def test_a_routing_table_reaches_a_worker_that_is_being_replaced_and_does_not_wait_for_it() -> None:
    rollouts = Rollouts(Backlog())
    await turns()
    rollouts.may_replace.clear()
    rollouts.stage.workers[0].lost("rollout-0", "process 7 ended")
    await turns()
    await asyncio.wait_for(rollouts.stage.use({"generator-1": "replica"}), 5)
    assert rollouts.spawned["rollout-1"].tables == [{"generator-1": "replica"}]
    rollouts.may_replace.set()
    await turns(20)
    assert rollouts.spawned["rollout-0-1"].tables[-1] == {"generator-1": "replica"}
    rollouts.close()


async def test_a_group_under_which_workers_keep_dying_fails(tmp_path: Path) -> None:
    backlog, files = Backlog(), SessionFiles(tmp_path)
    for name in ("4.0", "4.1", "44.0"):
        files.begin(name)
    deadly = "rollout-0 rollout-1 rollout-0-1 rollout-1-1 rollout-0-2 "
    rollouts = Rollouts(backlog, deadly=deadly, sessions=tmp_path)
    await turns()
    group = asyncio.ensure_future(rollouts.stage.group(Ticket(index=4, min_version=0), PROMPT))
    for _ in range(POISON_DEATHS):
        await turns(20)
        (name,) = [name for name, worker in rollouts.spawned.items() if worker.running == [4]]
        rollouts.spawned[name].running.clear()
        rollouts.stage.workers[int(name.split("-")[1])].lost(name, "process 7 ended")
    await asyncio.wait_for(group, 5)
    assert backlog.dropped == [(4, "its worker died 3 times")]
    assert set(files.begun().values()) == {"44.0"}
    rollouts.close()


async def test_a_group_that_was_reported_before_its_worker_died_leaves_no_session(tmp_path: Path) -> None:
    files = SessionFiles(tmp_path)
    files.begin("0.0")
    rollouts = Rollouts(Backlog(is_running=False), sessions=tmp_path)
    await turns()
    group = asyncio.ensure_future(rollouts.stage.group(Ticket(index=0, min_version=0), PROMPT))
    await turns()
    rollouts.stage.workers[0].lost("rollout-0", "process 7 ended")
    await asyncio.wait_for(group, 5)
    assert not files.begun()
    rollouts.close()


@virtual_time.jumps
async def test_a_group_that_is_cancelled_while_its_worker_is_being_replaced_ends(tmp_path: Path) -> None:
    backlog, files = Backlog(), SessionFiles(tmp_path)
    for ticket in (4, 5):
        files.begin(f"{ticket}.0")
    rollouts = Rollouts(backlog, deadly="rollout-0 rollout-1 ", sessions=tmp_path)
    await turns()
    rollouts.may_replace.clear()
    for worker in rollouts.stage.workers:
        worker.lost(worker.name, "process 7 ended")
    group = asyncio.ensure_future(rollouts.stage.group(Ticket(index=4, min_version=0), PROMPT))
    await turns()
    group.cancel()
    await asyncio.sleep(CANCEL_SECONDS + 1)
    assert backlog.dropped == [(4, CANCELLED)]
    assert list(files.begun().values()) == ["5.0"]
    group = asyncio.ensure_future(rollouts.stage.group(Ticket(index=5, min_version=0), PROMPT))
    await turns()
    group.cancel()
    backlog.hub = "hub-1"  # which gives the ticket out again
    await asyncio.sleep(CANCEL_SECONDS + 1)
    assert list(files.begun().values()) == ["5.0"]
    rollouts.close()
