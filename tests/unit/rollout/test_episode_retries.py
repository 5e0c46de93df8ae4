"""Episodes that begin again because their environment failed: what an earlier attempt asked for never reaches a later
one, and everything is counted once."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_group_runner import PROMPT, TICKET, FakeQueue, FakeSampler, ask_once, runner

from goaly.base.telemetry.metrics import count as counted
from goaly.environments.protocol import (
    ActionRefused,
    Disconnected,
    EnvironmentDied,
    EnvironmentFailed,
    EnvironmentTimeout,
    Unsent,
)
from goaly.generate.request import Finish, Sample, seed_of
from goaly.prompts.prompt import Prompt
from goaly.rollout.episode import Episode, EpisodeContext
from goaly.rollout.group_runner import GroupSummary
from goaly.trajectory import Trajectory

LOST = (EnvironmentDied, EnvironmentTimeout, Disconnected, Unsent, EnvironmentFailed)
RETRIES = "rollout/episode_retries"


@dataclass
class Named:
    """Answers each request with its own id, after some turns of the event loop."""

    pauses: int
    asked: list[str] = field(default_factory=list)
    seeds: list[int | None] = field(default_factory=list)
    under_way: set[str] = field(default_factory=set)

    async def generate(self, request_id: str, tokens: Any, sampling: Any, *_: Any) -> Sample:
        self.asked.append(request_id)
        self.seeds.append(sampling.seed)
        self.under_way.add(request_id)
        try:
            for _ in range(self.pauses):
                await asyncio.sleep(0)
        finally:
            self.under_way.discard(request_id)
        answer = torch.tensor(list(map(ord, request_id)))
        size = answer.shape
        logprobs, versions = torch.full(size, -0.5), torch.zeros(size, dtype=torch.int32)
        return Sample(tokens=answer, logprobs=logprobs, versions=versions, finish=Finish.STOP)


class Plays:
    """Episodes whose attempts end so: with an answer, or with an error while another request is under way."""

    def __init__(self, fates: list[list[Exception | None]]):
        self._fates = fates
        self.attempts = [0] * len(fates)
        self._late: list[asyncio.Task[Any]] = []

    async def episode(self, prompt: Prompt, context: EpisodeContext) -> Trajectory:
        sample = context.sample_index
        fate = self._fates[sample][self.attempts[sample]]
        self.attempts[sample] += 1
        counted("game/attempts")
        recorded = Episode(prompt, context.render(prompt))
        recorded.wrote(await context.policy.sample(recorded.tokens))
        if fate is not None:
            self._late.append(asyncio.create_task(context.policy.sample(recorded.tokens)))
            await asyncio.sleep(0)
            raise fate
        recorded.wrote(await context.policy.sample(recorded.tokens))
        return recorded.finish(1.0)

    async def late_answers(self) -> list[Any]:
        """What became of the requests that were under way."""
        return await asyncio.gather(*self._late, return_exceptions=True)


def is_lost(end: Exception | None) -> bool:
    """Whether an attempt that ends so is made again."""
    return isinstance(end, LOST) and not isinstance(end, ActionRefused)


ends = st.sampled_from([*(kind("gone") for kind in LOST), None, None, ActionRefused("no"), ValueError("a mistake")])


@settings(max_examples=150, deadline=None)
@given(
    fates=st.lists(st.lists(ends, min_size=3, max_size=3), min_size=1, max_size=3),
    retries=st.integers(0, 2),
    pauses=st.integers(8, 12),
    repeatable=st.booleans(),
)
def test_of_an_episode_that_begins_again_only_the_last_attempt_is_trained_and_all_are_counted(
    fates: list[list[Exception | None]], retries: int, pauses: int, repeatable: bool
) -> None:
    """rollout-5."""

    async def run() -> tuple[Named, FakeQueue, list[int], GroupSummary]:
        sampler, queue, plays = Named(pauses), FakeQueue(), Plays(fates)
        limits: Any = {"episode_retries": retries, "repeatable": repeatable}
        group = runner(sampler, queue, plays.episode, group_size=len(fates), max_context=200, **limits)
        summary = await group.run(TICKET, PROMPT)
        assert sampler.under_way == set()
        assert all("has ended" in str(end) for end in await plays.late_answers())  # generate-15
        return sampler, queue, plays.attempts, summary

    def last(of: list[Exception | None]) -> int:
        """The attempt with which this sample ends, if no other fails the group before."""
        return next((at for at in range(retries) if not is_lost(of[at])), retries)

    sampler, queue, attempts, summary = asyncio.run(run())
    assert len(sampler.asked) == len(set(sampler.asked))
    assert len(queue.reports) == 1  # rollout-1
    expected = [last(of) for of in fates]
    assert all(made <= 1 + at for made, at in zip(attempts, expected, strict=True))
    if repeatable:
        assert None not in sampler.seeds
        assert len(set(sampler.seeds)) == len(sampler.seeds)
        again = asyncio.run(run())[0]
        assert dict(zip(again.asked, again.seeds, strict=True)) == dict(zip(sampler.asked, sampler.seeds, strict=True))
    if any(of[at] is not None for of, at in zip(fates, expected, strict=True)):
        assert summary.failed is not None
        return
    assert attempts == [1 + at for at in expected]
    (group,) = queue.groups
    begun_again = sum(expected)
    assert group.counts == {
        "game/attempts": len(fates) + begun_again,
        **({RETRIES: begun_again, "agents/sessions_abandoned": begun_again} if begun_again else {}),
    }
    for sample, at in enumerate(expected):
        name = f"4.{sample}.retry{at}" if at else f"4.{sample}"
        (trajectory,) = group.episodes[sample]
        trained = trajectory.tokens["tokens"][trajectory.tokens["trained"]].tolist()
        assert "".join(map(chr, trained)) == f"{name}.0{name}.1"


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 80), st.integers(8, 10))
def test_cancelled_in_any_attempt_the_ticket_is_reported_once_and_no_request_is_left(turns: int, pauses: int) -> None:
    """rollout-1, rollout-5."""

    async def cancel_after() -> None:
        sampler, queue = Named(pauses), FakeQueue()
        plays = Plays([[EnvironmentDied("gone"), EnvironmentDied("gone"), None]] * 2)
        limits: Any = {"episode_retries": 2, "group_size": 2, "max_context": 200}
        task = asyncio.create_task(runner(sampler, queue, plays.episode, **limits).run(TICKET, PROMPT))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await plays.late_answers()
        assert sampler.under_way == set()
        assert len(queue.reports) == 1

    asyncio.run(cancel_after())


async def test_the_seeds_of_an_attempt_are_made_of_its_number() -> None:
    sampler, plays = Named(8), Plays([[EnvironmentDied("gone"), None]])
    limits: Any = {"episode_retries": 1, "repeatable": True, "seed": 1, "group_size": 1, "max_context": 200}
    await runner(sampler, FakeQueue(), plays.episode, **limits).run(TICKET, PROMPT)
    await plays.late_answers()
    assert dict(zip(sampler.asked, sampler.seeds, strict=True)) == {
        name: seed_of(f"1/{name}") for name in ("4.0.0", "4.0.1", "4.0.retry1.0", "4.0.retry1.1")
    }


async def test_a_verifier_that_fails_does_not_begin_an_episode_again() -> None:
    async def broken(prompt: Prompt, response: str) -> float:
        raise RuntimeError("no score")

    sampler = FakeSampler()
    summary = await runner(sampler, FakeQueue(), episode_retries=2, score=broken, group_size=1).run(TICKET, PROMPT)
    assert summary.failed == "prompt q1: RuntimeError: no score"
    assert [name for name, *_ in sampler.asked] == ["4.0.0"]


async def test_a_score_that_an_earlier_attempt_asked_for_says_nothing_of_a_later_one() -> None:
    async def fails(verdict: asyncio.Future[float]) -> None:
        with pytest.raises(RuntimeError):
            await running.judged(verdict)

    running, *_ = runner(FakeSampler(), FakeQueue())._trained_group(TICKET).episodes
    early, late = asyncio.Future[float](), asyncio.Future[float]()
    running.begin(0)
    first = asyncio.create_task(fails(early))
    await asyncio.sleep(0)
    running.begin(1)
    early.set_exception(RuntimeError("no score"))
    await first
    assert not running.is_unjudged
    late.set_exception(RuntimeError("no score"))
    await fails(late)
    assert running.is_unjudged


async def test_an_evaluations_episode_begins_again_too(caplog: pytest.LogCaptureFixture) -> None:
    failures = [EnvironmentDied("its process ended")]

    async def fails_once(prompt: Prompt, context: EpisodeContext) -> Trajectory:
        if failures:
            raise failures.pop()
        return await ask_once(prompt, context)

    sampler = FakeSampler()
    assert await runner(sampler, FakeQueue(), fails_once, episode_retries=1).evaluate(PROMPT, 1) == [1.0]
    assert [name for name, *_ in sampler.asked] == ["rollout-0.evaluation-1.0.retry1.0"]
    assert caplog.messages == ["episode 0 of prompt q1 begins again: EnvironmentDied: its process ended"]
