"""Groups under which workers have died: the one that kills them fails alone, and one cause does not end the run."""

import asyncio
from typing import Any

import pytest

from goaly.backlog.events import Ticket
from goaly.base.errors import RunFailed
from goaly.rollout.group_runner import GroupSummary
from goaly.run.replaceable_actors import ReplaceableActors
from goaly.run.rollout_stage import FAILURES_IN_A_ROW, POISONED, RolloutStage
from goaly.run.suspect_groups import SUSPECT_SECONDS, SuspectGroups
from tests import virtual_time
from tests.unit.run.test_replaced_workers import PROMPT, Backlog, Rollouts, Worker
from tests.unit.run.test_wait_reports import COMPLETED, FAILED, FakeWorker

DEADLY = 3
SECONDS = 20.0


class Mortal(Worker):
    """A worker that takes a while for each group, and is killed by one of them."""

    stage: RolloutStage

    async def _run_group(self, ticket: Ticket, prompt: Any) -> GroupSummary:
        self.ran.append(ticket.index)
        if ticket.index == DEADLY:
            await asyncio.sleep(1.0)
            self.stage.workers[int(self.name.split("-")[1])].lost(self.name, "process 7 ended")
            await asyncio.Future()
        await asyncio.sleep(SECONDS)
        return GroupSummary(ticket=ticket.index, prompt_id=prompt.id, rewards=(1.0,))


class MortalRollouts(Rollouts):
    """Two of them."""

    def spawn(self, name: str) -> Worker:
        self.spawned[name] = worker = Mortal(name, answers=True)
        if hasattr(self, "stage"):
            worker.stage = self.stage
        return worker


def tickets(count: int) -> list[Ticket]:
    return [Ticket(index=index, min_version=0) for index in range(count)]


@virtual_time.jumps
async def test_a_group_that_kills_its_workers_fails_alone_however_many_run_beside_it() -> None:
    backlog = Backlog()
    rollouts = MortalRollouts(backlog)
    for worker in rollouts.spawned.values():
        worker.stage = rollouts.stage  # type: ignore[attr-defined]
    await asyncio.wait_for(asyncio.gather(*(rollouts.stage.group(one, PROMPT) for one in tickets(40))), 3600)
    assert backlog.dropped == [(DEADLY, POISONED)]
    rollouts.close()


@virtual_time.jumps
async def test_suspects_begin_one_after_the_other_and_a_long_one_does_not_hold_up_the_next() -> None:
    suspects, began = SuspectGroups(), []

    async def run(name: str, seconds: float) -> None:
        async with suspects.turn(name) as turn:
            turn.begin()
            began.append((name, round(asyncio.get_running_loop().time() - start)))
            await asyncio.sleep(seconds)

    start = asyncio.get_running_loop().time()
    running = [asyncio.ensure_future(run(name, seconds)) for name, seconds in zip("abcd", (5, 1000, 5, 5), strict=True)]
    await asyncio.sleep(1)
    running[2].cancel()  # while it waits
    await asyncio.gather(*running, return_exceptions=True)
    assert began == [("a", 0), ("b", 5), ("d", 5 + SUSPECT_SECONDS)]


class Gate(FakeWorker):
    """Ends its groups once it may."""

    def __init__(self, *ends: Any) -> None:
        super().__init__(*ends)
        self.open = asyncio.Event()

    async def _run_group(self, ticket: Ticket, prompt: Any) -> GroupSummary:
        await self.open.wait()
        return await super()._run_group(ticket, prompt)


async def test_groups_that_ran_at_once_may_all_fail_for_one_reason_and_the_run_ends_if_the_next_fails_too() -> None:
    many = 3 * FAILURES_IN_A_ROW
    for after, ends_run in ((COMPLETED, False), (FAILED, True)):
        worker = Gate(*[FAILED] * many, after)
        stage = RolloutStage([ReplaceableActors("rollout-0", worker)])  # type: ignore[arg-type]
        *first, last = tickets(many + 1)
        running = [asyncio.ensure_future(stage.group(one, PROMPT)) for one in first]
        await asyncio.sleep(0)
        worker.open.set()
        await asyncio.gather(*running)
        if ends_run:
            with pytest.raises(RunFailed, match=f"{many + 1} groups failed in a row"):
                await stage.group(last, PROMPT)
        else:
            await stage.group(last, PROMPT)
