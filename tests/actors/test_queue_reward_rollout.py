"""Queue, reward pool and rollout worker as real actors in real processes; only the generator is a fake."""

import asyncio
import os
import select
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from monarch.actor import Actor, ActorError, concurrent_endpoint
from spawned import spawn

from goaly.backlog.settings import BacklogSettings
from goaly.base import actors
from goaly.base.errors import RunFailed
from goaly.generate.connection import Clients, Leave, Submit, Withdraw, client_of, own_name
from goaly.generate.request import Finish, Sample
from goaly.generate.settings import SamplingSettings
from goaly.journal.log_writer import LogWriter
from goaly.journal.logged_queue import LoggedQueue
from goaly.prompts.prompt import Message, Prompt
from goaly.prompts.settings import ChatSettings
from goaly.reward.pool_actor import RewardPool
from goaly.reward.settings import AdvantageSettings, RewardSettings
from goaly.rollout.episode import Episode, EpisodeContext
from goaly.rollout.rollout_worker import RolloutWorker, pickled
from goaly.rollout.running_episodes import GENERATING, EvaluationFailed, Failed
from goaly.rollout.settings import RolloutSettings
from goaly.run.replaceable_actors import ReplaceableActors
from goaly.run.rollout_stage import RolloutStage
from goaly.trajectory import Trajectory

PROMPT = Prompt(id="q1", source="sums", messages=(Message(role="user", content="1+1="),), answer="2")
# The first test starts all processes, which takes a minute on a machine that is busy with other things.
pytestmark = pytest.mark.timeout(180)
SETTINGS = BacklogSettings(groups_per_step=1, group_size=4, max_staleness=1, window=2, row_length=64)


class FakeGenerator(Actor):
    """Answers "22" and a stop token by weights of the version asked for; holds back what is told to hang."""

    def __init__(self) -> None:
        self.under_way: set[str] = set()
        self.cancelled: list[str] = []
        self.seeds: list[int | None] = []
        self._changed = asyncio.Event()
        self._clients = Clients(self._told)
        self._answering: set[asyncio.Task[None]] = set()

    @concurrent_endpoint
    async def connect(self, client, ways) -> None:
        await self._clients.serve(client, ways, asyncio.Event())

    @concurrent_endpoint
    async def tell(self, client, message) -> None:
        self._told(client, message)

    def _told(self, client, message) -> None:
        match message:
            case Submit(requests):
                for asked in requests:
                    self._answering.add(asyncio.create_task(self._answer(client, asked)))
            case Withdraw(request_ids):
                self.cancelled += request_ids
                self._wake()
            case Leave():
                self._clients.disconnect(client)
                self.cancelled += [name for name in self.under_way if client_of(name) == client]
                self._wake()

    async def _answer(self, client, asked) -> None:
        self.under_way.add(asked.request_id)
        self.seeds.append(asked.sampling.seed)
        self._wake()
        while asked.sampling.max_tokens == 7 and asked.request_id not in self.cancelled:
            await self._changed.wait()
        self.under_way.discard(asked.request_id)
        self._wake()  # `when_under_way` may wait before this request did
        tokens = torch.tensor([4, 4, 1])
        versions = torch.full((3,), asked.min_version, dtype=torch.int32)
        sample = Sample(tokens=tokens, logprobs=torch.full((3,), -0.5), versions=versions, finish=Finish.STOP)
        self._clients.send(client, [(asked.request_id, sample)])

    @concurrent_endpoint
    async def take_seeds(self) -> list[int | None]:
        taken, self.seeds = self.seeds, []
        return taken

    @concurrent_endpoint
    async def when_under_way(self, count: int) -> list[str]:
        while len(self.under_way) != count:
            await self._changed.wait()
        return sorted(map(own_name, self.under_way))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def episode(prompt: Prompt, context: EpisodeContext) -> Trajectory | list[Trajectory]:
    if prompt.answer == "no environment" and context.sample_index == 1:
        raise LookupError("no environment")
    if prompt.answer == "chat":
        said = list(prompt.messages)
        for _ in range(2):
            said += [await context.chat.say(said), Message(role="user", content="2")]
        await context.chat.say([Message(role="user", content="3")])
        return context.chat.finish(float(context.sample_index))
    question = context.render(prompt)
    answer = await context.policy.sample(question)
    return Episode(prompt, question).wrote(answer).finish(await context.reward(prompt, answer.text))


@pytest.fixture(scope="module")
def procs():
    return SimpleNamespace(
        hub=spawn("rollout", name="hub"),
        worker=spawn("rollout", name="worker"),
    )


def worker_on(mesh: Any, name: str, folder: Path, runs: Any, settings: RolloutSettings, **options: Any) -> Any:
    """A worker that runs these episodes."""
    return mesh.spawn(
        name,
        RolloutWorker,
        "rollout-0",
        settings,
        pickled(runs),
        tokenizer=str(folder),
        sampling=SamplingSettings(max_tokens=8),
        group_size=4,
        max_context=64,
        **options,
    )


@pytest.fixture
async def stack(procs, tiny_model_folder: Path, tmp_path: Path):
    name = tmp_path.name.replace("_", "-")
    queue = procs.hub.spawn(f"queue-{name}", LoggedQueue, SETTINGS, AdvantageSettings(), 1, 0)
    verifier = "tests.unit.reward.verifiers_under_test:by_answer"
    reward_settings = RewardSettings(verifier=verifier, workers=2, time_limit_seconds=2.0)
    rewards = procs.hub.spawn(f"rewards-{name}", RewardPool, reward_settings)
    generator = procs.hub.spawn(f"generator-{name}", FakeGenerator)
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for one in messages %}{{ one.content }}{{ '<eos>' if one.role == 'assistant' }}{% endfor %}"
    )
    chat = ChatSettings(template_file=str(template))
    options = {"queue": queue, "rewards": rewards, "chat": chat, "evaluation_context": 128}
    worker = worker_on(procs.worker, f"worker-{name}", tiny_model_folder, episode, RolloutSettings(), **options)
    await rewards.start.call_one()
    await worker.replicas.call_one({"generator-0": generator})
    yield SimpleNamespace(queue=queue, rewards=rewards, generator=generator, worker=worker, folder=tmp_path)
    await worker.close.call_one()
    await rewards.close.call_one()


async def test_an_evaluation_asks_a_prompt_that_is_too_long_to_be_trained(stack):
    long = replace(PROMPT, messages=(Message(role="user", content="1" * 80),))
    summary = await stack.worker.run_group.call_one(await stack.queue.admit.call_one(), long)
    assert summary.rejected.startswith("prompt_too_long: 80 tokens leave no room in a context of 64")
    assert await stack.worker.evaluate.call_one("evaluation", long, 1) == [2.0]


async def test_a_prompt_goes_from_its_ticket_through_the_worker_into_a_trained_batch(stack):
    ticket = await stack.queue.admit.call_one()
    summary = await stack.worker.run_group.call_one(ticket, PROMPT)
    assert (summary.ticket, summary.rewards, summary.failed) == (0, (2.0,) * 4, None)
    batch = await stack.queue.next_batch.call_one()
    assert (batch.id, batch.sequences, batch.trained_tokens, batch.tokens) == (0, 4, 12, 28)
    packed_rows = await stack.queue.rows.call_one(batch.id, 0)
    assert packed_rows.rows["tokens"].shape == (1, 64)
    assert packed_rows.rows["positions"][0, :9].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    await stack.queue.annotate.call_one(batch.id, 0, "reference_logprobs", torch.full((1, 64), -1.0))
    assert "reference_logprobs" in (await stack.queue.rows.call_one(batch.id, 0)).rows
    await stack.queue.trained.call_one(batch.id, 1)
    counts = await stack.queue.settle.call_one()
    assert (counts["admitted"], counts["trained"]) == (1, 1)


async def test_an_episode_that_chats_makes_a_trajectory_of_each_branch_and_is_one_sample(stack):
    ticket = await stack.queue.admit.call_one()
    chatting = Prompt(id="q6", source="sums", messages=PROMPT.messages, answer="chat")
    summary = await stack.worker.run_group.call_one(ticket, chatting)
    assert (summary.rewards, summary.failed) == ((0.0, 1.0, 2.0, 3.0), None)
    batch = await stack.queue.next_batch.call_one()
    assert (batch.sequences, batch.trained_tokens) == (8, 4 * 3 * 3)
    assert batch.metrics["reward/mean"] == 1.5
    rows = (await stack.queue.rows.call_one(batch.id, 0)).rows
    advantages = rows["advantages"][rows["trained"]]
    assert advantages.unique().numel() == 4
    assert float(advantages.sum()) == pytest.approx(0.0, abs=1e-5)


async def test_a_batch_whose_records_cannot_be_written_is_not_given_out(stack):  # journal-5
    log = stack.folder / "log"
    LogWriter(log).close()
    (log / "000000.log").unlink()
    (log / "000000.log").symlink_to("/dev/full")
    await stack.queue.open.call_one(log, 0, {})
    ticket = await stack.queue.admit.call_one()
    await stack.worker.run_group.call_one(ticket, PROMPT)
    with pytest.raises(ActorError, match=r"the run's log cannot be written: .*No space left on device"):
        await stack.queue.next_batch.call_one()


async def test_waiting_endpoints_hold_up_no_others_and_close_wakes_them(stack):
    for _ in range(2):
        await stack.queue.admit.call_one()
    waiting = [asyncio.ensure_future(_answer(stack.queue.admit.call_one())) for _ in range(3)]
    waiting.append(asyncio.ensure_future(_answer(stack.queue.next_batch.call_one())))
    counts = await stack.queue.counts.call_one()
    assert counts["admitted"] == 2
    await stack.queue.close.call_one()
    assert await asyncio.gather(*waiting) == [None] * 4


async def test_a_failing_episode_fails_its_group_with_prompt_and_cause_and_the_worker_goes_on(stack):
    ticket = await stack.queue.admit.call_one()
    broken = Prompt(id="q2", source="sums", messages=PROMPT.messages, answer="no environment")
    summary = await stack.worker.run_group.call_one(ticket, broken)
    assert summary.failed == "prompt q2: LookupError: no environment"
    assert await stack.queue.reasons.call_one() == {"failed: prompt q2: LookupError: no environment": 1}
    ticket = await stack.queue.admit.call_one()
    assert (await stack.worker.run_group.call_one(ticket, PROMPT)).failed is None


async def test_an_actors_own_words_reach_the_reason_not_the_report_about_them(stack):
    await stack.rewards.close.call_one()
    ticket = await stack.queue.admit.call_one()
    summary = await stack.worker.run_group.call_one(ticket, PROMPT)
    assert summary.failed == "prompt q1: VerifierError: the reward pool was closed"


async def test_a_groups_progress_is_known_and_cancelling_it_cancels_its_requests_and_fails_its_ticket(stack):
    ticket = await stack.queue.admit.call_one()
    long = Prompt(id="q3", source="sums", messages=(Message(role="user", content="1" * 57),))
    group = asyncio.ensure_future(_answer(stack.worker.run_group.call_one(ticket, long)))  # 7 tokens left: it hangs
    requests = await stack.generator.when_under_way.call_one(4)
    assert requests == ["0.0.0", "0.1.0", "0.2.0", "0.3.0"]
    assert (await stack.worker.progress.call_one(ticket.index)).doing == {GENERATING: 4}
    assert (await stack.queue.wait.call_one()).ticket == ticket.index
    await stack.worker.cancel.call_one([ticket.index])
    assert (await group).failed == "cancelled"
    assert await stack.worker.progress.call_one(ticket.index) is None
    assert await stack.generator.when_under_way.call_one(0) == []
    assert await stack.queue.reasons.call_one() == {"failed: cancelled": 1}


async def test_a_request_that_is_cancelled_by_name_frees_the_hubs_verifier(procs):
    settings = RewardSettings(verifier="tests.unit.reward.verifiers_under_test:by_answer", time_limit_seconds=600.0)
    rewards = procs.hub.spawn("rewards-cancelled", RewardPool, settings)
    await rewards.start.call_one()
    hanging = Prompt(id="q5", source="sums", messages=PROMPT.messages, answer="hang")
    score = asyncio.ensure_future(_answer(rewards.score.call_one(hanging, "1", "rollout-0.7")))
    await rewards.cancel.call_one("rollout-0.7")
    await rewards.cancel.call_one("rollout-0.8")  # has ended, or never was: nothing to cancel
    with pytest.raises(ActorError, match=r"request rollout-0\.7 was cancelled"):
        await score
    assert await asyncio.wait_for(_answer(rewards.score.call_one(PROMPT, "123", "rollout-0.9")), 60) == 3.0
    assert (await rewards.stats.call_one()).timeouts == 0
    await rewards.close.call_one()


async def test_an_evaluation_takes_no_ticket_and_asks_the_same_when_it_is_repeated(stack):
    seeds = []
    for name in ("evaluation-0", "evaluation-1"):
        assert await stack.worker.evaluate.call_one(name, PROMPT, 3, {"temperature": 0.5}) == [2.0] * 3
        seeds.append(sorted(await stack.generator.take_seeds.call_one()))
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3
    assert (await stack.queue.counts.call_one())["admitted"] == 0
    await stack.worker.run_group.call_one(await stack.queue.admit.call_one(), PROMPT)
    assert await stack.generator.take_seeds.call_one() == [None] * 4


async def test_an_evaluation_that_nobody_waits_for_ends_in_its_worker_with_its_requests(stack):
    """rollout-9"""
    long = Prompt(id="q3", source="sums", messages=(Message(role="user", content="1" * 121),))  # 7 tokens left: hangs
    evaluation = asyncio.create_task(
        RolloutStage([ReplaceableActors("rollout-0", stack.worker)]).rewards([long, long], 2, {}, 0)
    )
    assert len(await stack.generator.when_under_way.call_one(4)) == 4
    evaluation.cancel()
    assert await asyncio.wait_for(_answer(stack.generator.when_under_way.call_one(0)), 30) == []
    with pytest.raises(asyncio.CancelledError):
        await evaluation
    failing = Prompt(id="q2", source="sums", messages=PROMPT.messages, answer="no environment")
    assert await stack.worker.evaluate.call_one("evaluation", failing, 2) == [2.0, Failed("LookupError")]
    unscored = replace(PROMPT, answer="raise")
    with pytest.raises(EvaluationFailed, match="prompt q1: VerifierError: "):
        await asyncio.wait_for(
            RolloutStage([ReplaceableActors("rollout-0", stack.worker)]).rewards([long, unscored], 2, {}, 0), 30
        )
    assert await asyncio.wait_for(_answer(stack.generator.when_under_way.call_one(0)), 30) == []


class AsksElsewhere(Actor):
    """Raises an error of a client's library, which pickle cannot build again."""

    @actors.concurrent_endpoint
    async def ask(self) -> None:
        import httpx
        import openai

        request = httpx.Request("POST", "http://elsewhere/v1")
        raise openai.RateLimitError("slow down", response=httpx.Response(429, request=request), body=None)


async def test_an_error_of_another_library_reaches_the_caller_of_an_actor_as_text(procs):
    asks = procs.hub.spawn("asks-elsewhere", AsksElsewhere)
    with pytest.raises(RunFailed, match=r"asks\.ask failed: RateLimitError: slow down"):
        await actors.ask("asks.ask", asks.ask.call_one())


async def test_an_episode_that_blocks_its_workers_event_loop_ends_the_worker(tiny_model_folder: Path, procs):
    async def blocks(prompt: Prompt, context: EpisodeContext) -> Trajectory:
        if prompt.answer != "pid":
            time.sleep(1000)  # noqa: ASYNC251 - the point of this test
        return Episode(prompt, context.render(prompt)).finish(float(os.getpid()))

    mesh = spawn("rollout", name="blocked")
    queue = procs.hub.spawn("queue-blocked", LoggedQueue, SETTINGS, AdvantageSettings(), 1, 0)
    rewards = RewardSettings(verifier="tests.unit.reward.verifiers_under_test:by_answer")
    settings, options = (
        RolloutSettings(blocked_seconds=1.0),
        {"queue": queue, "rewards": rewards, "chat": ChatSettings()},
    )
    worker = worker_on(mesh, "worker-blocked", tiny_model_folder, blocks, settings, **options)
    await worker.start.call_one()
    asks_for_pid = Prompt(id="q6", source="sums", messages=PROMPT.messages, answer="pid")
    (process,) = await worker.evaluate.call_one("evaluation-0", asks_for_pid, 1)
    watch = os.pidfd_open(int(process))
    group = asyncio.ensure_future(_answer(worker.run_group.call_one(await queue.admit.call_one(), PROMPT)))
    gone, _, _ = await asyncio.to_thread(select.select, [watch], [], [], 60.0)
    os.close(watch)
    assert gone
    group.cancel()


async def _answer(call):
    return await call
