"""What the script's stages make of groups that fail, that are rejected, and that take long: with fake workers."""

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from monarch.actor import ActorError

from goaly.backlog.events import Ticket
from goaly.backlog.group_statistics import Wait
from goaly.base import wait_reports
from goaly.base.errors import RunFailed
from goaly.generate.connection import POISON_DEATHS
from goaly.prompts.prompt import Message, Prompt
from goaly.rollout.group_runner import GroupSummary
from goaly.rollout.running_episodes import DONE, GENERATING, EvaluationFailed, Failed, GroupProgress
from goaly.run.backlog_stage import BacklogStage
from goaly.run.replaceable_actors import Lost, ReplaceableActors
from goaly.run.rollout_stage import FAILURES_IN_A_ROW, POISONED, TOO_LONG_IN_A_ROW, RolloutStage
from goaly.run.run import Run
from goaly.run.trainer_stage import TrainerStage
from tests import virtual_time

PROMPT = Prompt(id="q1", source="sums", messages=(Message(role="user", content="abc"),))
TOO_LONG = "prompt_too_long: 900 tokens leave no room, generator.max_context"
FULL = "context_full: 1025 tokens leave no room, generator.max_context"
WAIT = Wait(ticket=17, finished=5, needed=8, rejected=2, failed=1)


def endpoint(answer):
    return SimpleNamespace(call_one=answer, broadcast=lambda *arguments: None)


class FakeWorker:
    """Ends groups as told, one after the other."""

    def __init__(self, *ends):
        self._ends = list(ends)
        self.cancel = endpoint(None)
        self.run_group = endpoint(self._run_group)
        self.evaluate = endpoint(self._evaluate)

    async def _evaluate(self, *arguments) -> list[float | None]:
        end = self._ends.pop(0)
        if isinstance(end, Exception):
            raise end if isinstance(end, Lost) else ActorError(end)
        return end

    async def _run_group(self, ticket: Ticket, prompt: Prompt) -> GroupSummary:
        return GroupSummary(ticket=ticket.index, prompt_id=prompt.id, **self._ends.pop(0))


COMPLETED, FAILED, REJECTED = {"rewards": (1.0,)}, {"failed": "episode_timeout: …"}, {"rejected": TOO_LONG}
REFUSED = {"rewards": (1.0,), "failed": "prompt q1: SchemaError"}
NEITHER = {"rejected": "it had ended before it started"}


async def after(*ends: dict) -> RolloutStage:
    rollouts = RolloutStage([ReplaceableActors("rollout-0", FakeWorker(*ends))])
    for index in range(len(ends)):
        await rollouts.group(Ticket(index=index, min_version=0), PROMPT)
    return rollouts


async def test_failures_in_a_row_end_the_run_and_only_a_completed_group_breaks_the_row():
    row = [FAILED] * (FAILURES_IN_A_ROW - 1)
    await after(*row, COMPLETED, *row)
    for between in (REJECTED, NEITHER, REFUSED):
        with pytest.raises(RunFailed, match=f"{FAILURES_IN_A_ROW} groups failed in a row; the last: episode_timeout"):
            await after(*row[1:], between, FAILED, *([] if between is REFUSED else [FAILED]))


async def test_episodes_that_fail_in_a_row_end_their_evaluation_and_those_in_between_do_not():
    async def rewards(*ends):
        rollouts = RolloutStage([ReplaceableActors("rollout-0", FakeWorker(*ends))])
        return await rollouts.rewards([PROMPT] * len(ends), 3, {}, 0)

    failed, half = [Failed("no such tool")] * 3, FAILURES_IN_A_ROW // 3
    row = [failed] * half
    assert await rewards(*row, [0.0, *failed[:2]], *row[1:]) == [[0.0] * 3] * 2 * half
    with pytest.raises(EvaluationFailed, match="16 episodes failed in a row; the last: no such tool"):
        await rewards(*row, failed)
    with pytest.raises(EvaluationFailed, match="prompt q1: VerifierError: it is down"):
        await rewards(failed, EvaluationFailed("prompt q1: VerifierError: it is down"))
    with pytest.raises(RunFailed, match=r"rollout\.evaluate failed: ValueError: ours"):
        await rewards(ValueError("ours"))


async def test_an_evaluations_prompt_whose_workers_keep_dying_counts_as_failed():
    worker = FakeWorker(
        *[Lost("rollout-0 died")] * (POISON_DEATHS - 1), [1.0] * 3, *[Lost("rollout-0 died")] * POISON_DEATHS
    )
    rollouts = RolloutStage([ReplaceableActors("rollout-0", worker)])
    assert await rollouts.rewards([PROMPT], 3, {}, 0) == [[1.0] * 3]
    (failed,) = await rollouts.rewards([PROMPT], 3, {}, 0)
    assert [(one, type(one), one.why) for one in failed] == [(0.0, Failed, f"prompt q1: {POISONED}")] * 3


@pytest.mark.parametrize("why", [TOO_LONG, FULL])
async def test_groups_without_room_for_an_answer_end_the_run_with_the_key_that_would_help(why: str):
    rejected = {"rejected": why}
    row = [rejected] * (TOO_LONG_IN_A_ROW - 1)
    await after(*row, COMPLETED, *row)
    for between in (FAILED, NEITHER):
        with pytest.raises(RunFailed, match=f"{TOO_LONG_IN_A_ROW} groups were rejected in a row; the last: {why}"):
            await after(*row, between, rejected)


async def test_a_prompt_that_is_too_long_is_told_and_then_whenever_their_number_has_doubled(caplog):
    await after(*[REJECTED, COMPLETED] * 9)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.split(" so far")[0] for line in told] == [
        "group 0 (q1) rejected, 1", "group 2 (q1) rejected, 2", "group 6 (q1) rejected, 4", "group 14 (q1) rejected, 8"
    ]  # fmt: skip
    assert TOO_LONG in told[0]


async def test_a_group_under_way_is_described_by_its_prompt_its_worker_and_its_episodes():
    progress = GroupProgress(seconds=51.2, doing={DONE: 3, GENERATING: 1})
    answers: list = [progress, None]

    async def run_group(ticket, prompt):
        return await asyncio.Future()

    async def answer(ticket):
        return answers.pop(0)

    worker = FakeWorker()
    worker.run_group, worker.progress = endpoint(run_group), endpoint(answer)
    rollouts = RolloutStage([ReplaceableActors("rollout-0", FakeWorker()), ReplaceableActors("rollout-1", worker)])
    rollouts._running[0] = 1  # the other one is busier
    group = asyncio.create_task(rollouts.group(Ticket(index=17, min_version=0), PROMPT))
    await asyncio.sleep(0)
    named = "group 17 (prompt q1, source sums)"
    assert await rollouts.describe(17) == (
        f"{named}: 3 of 4 episodes done, 1 generating, running for 51 s on rollout-1"
    )
    assert await rollouts.describe(17) == f"{named}, which rollout-1 does not run"
    assert await rollouts.describe(18) == "group 18, which has no prompt yet"
    group.cancel()
    await asyncio.wait([group])
    assert await rollouts.describe(17) == "group 17, which has no prompt yet"


def test_a_worker_that_does_not_answer_is_described_as_such():
    async def never(*arguments):
        return await asyncio.Future()

    async def main() -> str:
        worker = FakeWorker()
        worker.run_group, worker.progress = endpoint(never), endpoint(never)
        rollouts = RolloutStage([ReplaceableActors("rollout-0", worker)])
        group = asyncio.create_task(rollouts.group(Ticket(index=17, min_version=0), PROMPT))
        await asyncio.sleep(0)
        found = await rollouts.describe(17)
        group.cancel()
        return found

    assert virtual_time.run(main()) == "group 17 (prompt q1, source sums), whose worker rollout-0 does not answer"


@virtual_time.jumps
async def test_a_long_wait_is_told_whenever_it_has_doubled_and_at_least_once_an_hour():
    told: list[float] = []

    async def tell(seconds: float) -> None:
        told.append(seconds)
        raise RuntimeError("what can't be told is no reason to end a run")

    async with wait_reports.reporting(tell):
        await asyncio.sleep(29)
    assert told == []
    async with wait_reports.reporting(tell):
        await asyncio.sleep(4 * 3600)
    await asyncio.sleep(9 * 3600)
    assert told == [30, 60, 120, 240, 480, 960, 1920, 3840, 3840 + 3600, 3840 + 7200]


@virtual_time.jumps
async def test_the_training_loop_tells_what_it_waits_for_and_only_while_it_waits():
    told: list[tuple] = []

    async def tell(seconds: float, wait: Wait) -> None:
        told.append((asyncio.get_running_loop().time(), seconds, wait))

    batches = iter([SimpleNamespace(id=0), SimpleNamespace(id=1)])

    async def next_batch():
        await asyncio.sleep(40)
        return next(batches)

    async def asked():
        return WAIT

    async def closed():
        return None

    queue = SimpleNamespace(next_batch=endpoint(next_batch), wait=endpoint(asked), close=endpoint(closed))
    stage = BacklogStage(ReplaceableActors("hub", SimpleNamespace(queue=queue)), tell)
    async for _ in stage.batches(2):
        await asyncio.sleep(1000)  # a training step
    await asyncio.sleep(1000)
    assert told == [(30, 30, WAIT), (1070, 30, WAIT)]


def test_a_long_evaluation_tells_how_many_prompts_are_done():
    said: list[str] = []

    async def evaluate(name, prompt, samples, temperature, version):
        await asyncio.sleep(70 if prompt.id == "slow" else 1)
        return [1.0]

    worker = FakeWorker()
    worker.evaluate = endpoint(evaluate)
    slow = Prompt(id="slow", source="sums", messages=PROMPT.messages)
    rewards = virtual_time.run(
        RolloutStage([ReplaceableActors("rollout-0", worker)], said.append).rewards([PROMPT, slow], 1, 0.0, 0)
    )
    assert rewards == [[1.0], [1.0]]
    assert said == [f"evaluating for {at} s: 1 of 2 prompts are done; waiting for prompt slow" for at in (30, 60)]


def test_a_long_start_tells_what_is_not_up_yet():
    said: list[str] = []
    work = {"rollouts": asyncio.sleep(1), "trainer": asyncio.sleep(50), "generators": asyncio.sleep(70)}
    virtual_time.run(wait_reports.run_all(work, "starting", said.append))
    assert said == ["starting for 30 s: waiting for trainer, generators", "starting for 60 s: waiting for generators"]


def test_a_call_to_the_trainer_that_takes_more_than_twice_as_long_as_ever_is_told():
    said: list[str] = []
    batch = SimpleNamespace(id=0)

    async def main(*steps: float) -> None:
        seconds = iter(steps)

        async def step(batch):
            await asyncio.sleep(next(seconds))
            return {"loss": 1.0}

        actors = SimpleNamespace(step=SimpleNamespace(stream=lambda *arguments: [step(*arguments)]))
        trainer = TrainerStage(ReplaceableActors("trainer", actors), said.append, steps=10, folder=Path("policy"))
        for _ in steps:
            assert await trainer.step(batch) == {"loss": 1.0}

    virtual_time.run(main(50, 90, 200, 300))
    assert said == [f"waiting {seconds} s for trainer.step" for seconds in (30, 180)]


@pytest.mark.parametrize(
    ("ticket", "held"), [(17, "the group's description"), (None, "prompts, no group is under way")]
)
async def test_a_run_shows_what_it_waits_for_on_its_display_and_in_its_log(ticket, held, caplog):
    caplog.set_level(logging.INFO)

    async def describe(ticket: int) -> str:
        return "the group's description"

    notes: list[str] = []
    run = object.__new__(Run)
    run.rollouts = SimpleNamespace(describe=describe)
    run.progress = SimpleNamespace(note=notes.append)
    await run.report_wait(45.0, Wait(ticket=ticket, finished=5, needed=8, rejected=2, failed=1))
    text = f"waiting 45 s for {held}; 5 complete groups wait for a batch of 8; 2 groups were rejected, 1 failed so far"
    assert notes == [text]
    assert text in caplog.messages
