"""Time limits of episodes and groups, in virtual time: what hangs fails its own group and holds up nothing else."""

import asyncio
import logging
from types import SimpleNamespace

import pytest
import torch
from test_episode import completion
from test_group_runner import PROMPT, TICKET, FakeQueue, FakeSampler, ask_once, runner

from goaly.backlog.events import Ticket
from goaly.base.config.check import check
from goaly.base.errors import EpisodeError
from goaly.prompts.prompt import Prompt
from goaly.rollout import running_episodes as running
from goaly.rollout.episode import Episode, EpisodeContext
from goaly.rollout.rollout_worker import _RemoteRewards
from goaly.rollout.running_episodes import (
    CANCEL_SECONDS,
    DONE,
    GENERATING,
    JUDGED,
    OWN_CODE,
    WAITING,
    GroupProgress,
    within,
)
from goaly.rollout.settings import RolloutSettings
from goaly.trajectory import Trajectory
from tests import virtual_time

NEXT = Ticket(index=5, min_version=2)


async def never(prompt: Prompt, context: EpisodeContext) -> Trajectory:
    await asyncio.Event().wait()
    raise AssertionError


@virtual_time.jumps
async def test_an_episode_that_hangs_fails_its_group_and_cancels_the_requests_of_the_others():
    async def one_hangs(prompt: Prompt, context: EpisodeContext) -> Trajectory:
        return await (never if context.sample_index == 1 else ask_once)(prompt, context)

    sampler, queue = FakeSampler(hangs=True), FakeQueue()
    group = runner(sampler, queue, one_hangs, episode_seconds=60.0)
    await asyncio.sleep(1000)
    summary = await group.run(TICKET, PROMPT)
    assert asyncio.get_running_loop().time() == pytest.approx(1060)
    assert summary.failed == "episode_timeout: episode 1 of prompt q1 exceeded rollout.episode_seconds=60.0"
    assert queue.reports == [("fail", 4, "episode_timeout")]
    assert (sorted(sampler.cancelled), sampler.under_way) == (["4.0.0", "4.2.0"], 0)  # rollout-2
    assert group.progress(TICKET.index) is None


def test_without_a_limit_an_episode_may_take_days():
    async def takes_days(prompt: Prompt, context: EpisodeContext) -> Trajectory:
        await asyncio.sleep(1e6)
        return await ask_once(prompt, context)

    queue = FakeQueue()
    virtual_time.run(runner(FakeSampler(), queue, takes_days).run(TICKET, PROMPT))
    assert queue.reports == [("put", 4)]


@virtual_time.jumps
async def test_an_episode_that_swallows_its_cancellation_is_abandoned_and_frees_its_place(caplog):
    caplog.set_level(logging.INFO)

    async def stubborn(prompt: Prompt, context: EpisodeContext) -> Trajectory:
        if prompt.id != "stubborn":
            return await ask_once(prompt, context)
        try:
            return await never(prompt, context)
        except asyncio.CancelledError:
            await asyncio.sleep(1000)
            return await ask_once(prompt, context)

    sampler, queue = FakeSampler(), FakeQueue()
    group = runner(sampler, queue, stubborn, episode_seconds=60.0, concurrency=1, group_size=1)
    prompt = Prompt(id="stubborn", source="sums", messages=PROMPT.messages)
    first = asyncio.create_task(group.run(TICKET, prompt))
    second = asyncio.create_task(group.run(NEXT, PROMPT))
    assert (await first).failed is not None
    assert asyncio.get_running_loop().time() == pytest.approx(60 + CANCEL_SECONDS)  # rollout-3
    assert queue.reports == [("fail", 4, "episode_timeout")]
    assert (await second).rewards == (1.0,)  # rollout-3
    assert len(running._abandoned) == 1
    await asyncio.sleep(1000)
    assert not running._abandoned
    assert [request for request, *_ in sampler.asked] == ["5.0.0"]  # generate-15
    assert "episode 0 of prompt stubborn still runs 10 s after it was cancelled, and is abandoned" in caplog.text
    end = "EpisodeError: episode 4.0 has ended and can't sample any more"
    assert f"episode 0 of prompt stubborn ended after it was cancelled: {end}" in caplog.messages


def test_an_error_in_an_episodes_cleanup_is_told_and_does_not_hide_the_timeout(caplog):
    caplog.set_level(logging.INFO)

    async def breaks_when_cancelled(prompt: Prompt, context: EpisodeContext) -> Trajectory:
        try:
            return await never(prompt, context)
        finally:
            await asyncio.sleep(CANCEL_SECONDS / 2)
            raise OSError("no such container")

    queue = FakeQueue()
    virtual_time.run(
        runner(FakeSampler(), queue, breaks_when_cancelled, episode_seconds=60.0, group_size=1).run(TICKET, PROMPT)
    )
    assert queue.reports == [("fail", 4, "episode_timeout")]
    assert caplog.messages == ["episode 0 of prompt q1 ended after it was cancelled: OSError: no such container"]


@virtual_time.jumps
async def test_a_group_is_limited_from_the_start_of_its_first_episode_on():
    queue = FakeQueue()
    group = runner(FakeSampler(pauses=0), queue, group_seconds=60.0, concurrency=1, group_size=1)
    occupant = asyncio.create_task(_take(group, NEXT, 100))
    summary = await group.run(TICKET, PROMPT)
    assert asyncio.get_running_loop().time() == pytest.approx(100)
    assert summary.rewards == (1.0,)
    await occupant


async def _take(group, ticket, seconds) -> None:
    async with group.places:
        await asyncio.sleep(seconds)


@virtual_time.jumps
async def test_a_group_that_takes_too_long_fails_though_each_of_its_episodes_is_within_its_limit():
    async def in_turns(prompt: Prompt, context: EpisodeContext) -> Trajectory:
        await asyncio.sleep(50)
        return await ask_once(prompt, context)

    queue = FakeQueue()
    group = runner(FakeSampler(), queue, in_turns, episode_seconds=60.0, group_seconds=120.0, concurrency=1)
    summary = await group.run(TICKET, PROMPT)
    assert asyncio.get_running_loop().time() == pytest.approx(120)
    assert summary.failed == (
        "group_timeout: the episodes of prompt q1 exceeded rollout.group_seconds=120.0; 2 of 3 were done"
    )
    assert queue.reports == [("fail", 4, "group_timeout")]
    assert (await group.run(NEXT, PROMPT)).failed is not None  # its episodes had the place that was freed


def test_a_timeout_of_the_episodes_own_is_an_error_like_any_other(caplog):
    caplog.set_level(logging.INFO)

    async def gives_up(prompt: Prompt, context: EpisodeContext) -> Trajectory:
        async with asyncio.timeout(1):
            return await never(prompt, context)

    queue = FakeQueue()
    virtual_time.run(
        runner(FakeSampler(), queue, gives_up, episode_seconds=60.0, group_seconds=90.0).run(TICKET, PROMPT)
    )
    assert queue.reports == [("fail", 4, "prompt q1: TimeoutError: ")]
    assert caplog.messages == []


def test_an_episode_that_cancels_itself_fails_its_group_by_name():
    async def cancels_itself(prompt: Prompt, context: EpisodeContext) -> Trajectory:
        raise asyncio.CancelledError

    queue = FakeQueue()
    virtual_time.run(runner(FakeSampler(), queue, cancels_itself, group_size=1).run(TICKET, PROMPT))
    assert queue.reports == [("fail", 4, "prompt q1: EpisodeError: episode 0 of prompt q1 cancelled itself")]


def test_in_an_evaluation_an_episode_that_hangs_gets_no_reward_and_costs_the_others_none(caplog):
    async def one_hangs(prompt: Prompt, context: EpisodeContext) -> Trajectory:
        return await (never if context.sample_index == 1 else ask_once)(prompt, context)

    group = runner(FakeSampler(), FakeQueue(), one_hangs, episode_seconds=60.0, group_seconds=1.0)
    assert virtual_time.run(group.evaluate(PROMPT, 3)) == [1.0, 0.0, 1.0]
    told = "prompt q1: EpisodeTimeout: episode 1 of prompt q1 exceeded rollout.episode_seconds=60.0"
    assert caplog.messages == [f"an evaluation counts reward 0: {told}"]


@virtual_time.jumps
async def test_cancelled_while_it_waits_for_what_it_cancelled_it_lets_go_of_it_too(caplog):
    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(1000)

    limited = asyncio.create_task(within(60.0, stubborn(), "a stubborn one"))
    await asyncio.sleep(61)
    limited.cancel()
    await asyncio.wait([limited])
    assert limited.cancelled()
    assert asyncio.get_running_loop().time() == pytest.approx(61)
    await asyncio.sleep(1000)
    assert "a stubborn one still runs" in caplog.text


async def test_what_each_episode_is_doing_can_be_told_at_any_time():
    async def episode(prompt: Prompt, context: EpisodeContext) -> Trajectory:
        if context.sample_index == 0:
            return await ask_once(prompt, context)
        if context.sample_index == 1:
            await context.reward(prompt, "hangs")
        if context.sample_index == 2:
            await context.policy.sample([1] * 3)
        await context.reward(prompt, "fine")
        return await never(prompt, context)

    async def score(prompt: Prompt, response: str) -> float:
        return await asyncio.Future() if response == "hangs" else 1.0

    class Sampler(FakeSampler):
        async def generate(self, request_id, *arguments):
            self.hangs = request_id == "4.2.0"
            return await super().generate(request_id, *arguments)

    group = runner(Sampler(pauses=0), FakeQueue(), episode, score=score, group_size=5, concurrency=4)
    task = asyncio.create_task(group.run(TICKET, PROMPT))
    for _ in range(20):
        await asyncio.sleep(0)
    progress = group.progress(TICKET.index)
    assert progress is not None
    # the place of sample 0, which is done, went to the last one
    assert progress.doing == {DONE: 1, JUDGED: 1, GENERATING: 1, OWN_CODE: 2}
    assert str(progress) == ("1 of 5 episodes done, 1 being judged, 1 generating, 2 in the episode's own code")
    assert 0 <= progress.seconds < 600
    assert group.progress(99) is None
    task.cancel()
    await asyncio.wait([task])


def test_progress_in_words_leaves_out_what_no_episode_does():
    assert str(GroupProgress(seconds=1.0, doing={GENERATING: 2})) == "0 of 2 episodes done, 2 generating"
    assert str(GroupProgress(seconds=1.0, doing={DONE: 2})) == "2 of 2 episodes done"


async def test_an_episode_without_a_place_waits_for_one():
    group = runner(FakeSampler(hangs=True), FakeQueue(), group_size=2, concurrency=1)
    task = asyncio.create_task(group.run(TICKET, PROMPT))
    for _ in range(20):
        await asyncio.sleep(0)
    progress = group.progress(TICKET.index)
    assert progress is not None
    assert progress.doing == {GENERATING: 1, WAITING: 1}
    task.cancel()
    await asyncio.wait([task])


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("reward", "named"),
    [
        (NAN, r"the reward is nan \(float\)"),
        (-INF, r"the reward is -inf \(float\)"),
        ("1.0", r"the reward is '1\.0' \(str\)"),
        (None, r"the reward is None \(NoneType\)"),
        (torch.ones(2), r"the reward is tensor\(\[1., 1.\]\) \(Tensor\)"),
        (1e39, r"the reward is 1e\+39 \(float\)"),
        (10**400, r"the reward is 1000+ \(int\)"),
    ],
)
def test_a_reward_that_is_no_finite_number_is_refused_with_its_prompt_and_value(reward, named):
    with pytest.raises(EpisodeError, match=f"prompt q1: {named}, must be a finite float32 number"):
        Episode(PROMPT, [5]).finish(reward)
    with pytest.raises(EpisodeError, match=f"prompt q1: {named}, must be a finite float32 number"):
        Episode(PROMPT, [5]).wrote(completion([5], [6])).credited(reward)


def test_whatever_is_a_number_is_a_reward():
    numbers = (1, True, torch.tensor(1.0), torch.ones(1).numpy()[0])
    assert [Episode(PROMPT, [5]).finish(number).reward for number in numbers] == [1.0] * 4


@pytest.mark.parametrize(("reward", "says"), [(NAN, "the reward is nan"), (3e38, "`rewards` add up to inf")])
async def test_a_reward_that_cannot_be_trained_fails_its_own_group_only(reward, says):
    async def episode(prompt: Prompt, context: EpisodeContext) -> Trajectory:
        answer = await context.policy.sample(context.render(prompt))
        episode = Episode(prompt, answer.prompt).wrote(answer).credited(reward if context.sample_index == 1 else 0.5)
        return episode.finish(3e38)

    queue = FakeQueue()
    summary = await runner(FakeSampler(), queue, episode).run(TICKET, PROMPT)
    assert "q1" in summary.failed
    assert says in summary.failed
    assert queue.groups == []


@pytest.mark.parametrize("value", [NAN, -INF, INF])
async def test_a_token_without_a_finite_log_probability_is_context_and_counted(value):
    class Broken(FakeSampler):
        async def generate(self, request_id, *arguments):
            sample = await super().generate(request_id, *arguments)
            if request_id in ("4.1.0", "4.2.0"):
                sample.logprobs[1] = value
            return sample

    queue = FakeQueue()
    await runner(Broken(), queue).run(TICKET, PROMPT)
    (group,) = queue.groups
    assert group.counts["rollout/non_finite_logprobs"] == 2
    (odd,) = [sample.tokens for sample in group.samples if sample.sample_index == 1]
    written = odd["sampler_versions"] >= 0
    assert odd["trained"][written].tolist() == [True, False, *[True] * (int(written.sum()) - 2)]
    assert odd["sampler_logprobs"].isfinite().all()
    assert float(odd["rewards"][odd["trained"]].sum()) == group.rewards[1]  # the outcome sits on a trained token


async def test_a_group_whose_log_probabilities_are_all_not_finite_fails():
    class Broken(FakeSampler):
        async def generate(self, request_id, *arguments):
            sample = await super().generate(request_id, *arguments)
            sample.logprobs[:] = NAN
            return sample

    queue = FakeQueue()
    summary = await runner(Broken(), queue).run(TICKET, PROMPT)
    assert "or has no finite log-prob" in summary.failed
    assert queue.groups == []


def test_time_limits_that_cannot_work_are_named():
    given = {"episode_seconds": 0, "group_seconds": -1.0, "blocked_seconds": INF}
    assert check(RolloutSettings, given, "rollout")[1] == [
        "rollout.episode_seconds=0: must be above 0, or null",
        "rollout.group_seconds=-1.0: must be above 0, or null",
        "rollout.blocked_seconds=inf: must be a finite number, or null",
    ]
    assert check(RolloutSettings, {"episode_seconds": None, "blocked_seconds": None}, "rollout")[1] == []


async def test_a_score_that_nobody_waits_for_any_more_is_cancelled_at_the_hub():
    asked: list[str] = []
    cancelled: list[str] = []

    async def score(prompt: Prompt, response: str, request: str) -> float:
        asked.append(request)
        return await asyncio.Future() if response == "hangs" else 1.0

    hub = SimpleNamespace(score=SimpleNamespace(call_one=score), cancel=SimpleNamespace(broadcast=cancelled.append))
    rewards = _RemoteRewards(hub, "rollout-3")
    assert await rewards.score(PROMPT, "fine") == 1.0
    hanging = asyncio.create_task(rewards.score(PROMPT, "hangs"))
    await asyncio.sleep(0)
    hanging.cancel()
    await asyncio.wait([hanging])
    assert (asked, cancelled) == (["rollout-3.0", "rollout-3.1"], ["rollout-3.1"])
