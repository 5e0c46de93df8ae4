"""Groups of episodes on fakes at the Protocol seams: every started ticket is reported exactly once."""

import asyncio
import contextlib
import itertools
import logging
import pickle
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from goaly.agents.answer_parser import AnswerParser
from goaly.backlog.events import Dropped, Ticket
from goaly.backlog.ledger import State
from goaly.generate.request import Finish, Sample, Sampling, seed_of
from goaly.prompts.prompt import Message, Prompt
from goaly.prompts.settings import ChatSettings
from goaly.reward.failures import Unscored
from goaly.reward.verifier_process import VerifierError
from goaly.rollout import group_runner as group_module
from goaly.rollout.episode import Episode, EpisodeContext
from goaly.rollout.group_runner import GroupRunner, GroupSummary
from goaly.rollout.running_episodes import EvaluationFailed, Failed
from goaly.rollout.settings import RolloutSettings
from goaly.trajectory import Group, Trajectory

PROMPT = Prompt(id="q1", source="sums", messages=(Message(role="user", content="abc"),), answer="x")
TICKET = Ticket(index=4, min_version=2)


class Characters:
    """A chat of one token a character."""

    def render(self, messages, *, tools) -> list[int]:
        return self.encode("".join(message.content for message in messages) + "T" * len(tools))

    def render_more(self, messages, tokens, tools, *, as_recorded=False) -> list[int]:
        return self.encode(f"{messages[-1].content}{len(tokens)}{len(tools)}{'R' * as_recorded}")

    def encode(self, text) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, tokens) -> str:
        return "".join(map(chr, tokens))


@dataclass
class FakeSampler:
    """Answers "ok" after a number of turns of the event loop; may hang or fail on a chosen request."""

    hangs: bool = False
    fails_at: str | None = None
    finish: Finish = Finish.STOP
    pauses: int = 1
    asked: list[tuple] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    seeds: list[int | None] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0
    cancelled: list[str] = field(default_factory=list)

    async def generate(
        self, request_id, tokens, sampling, min_version=0, session=None, on_part=None, begun_at=None
    ) -> Sample:
        self.asked.append((request_id, len(tokens), sampling.max_tokens, min_version, session))
        self.temperatures.append(sampling.temperature)
        self.seeds.append(sampling.seed)
        self.under_way += 1
        self.most_under_way = max(self.under_way, self.most_under_way)
        try:
            if self.fails_at == request_id:
                raise ConnectionError("the engine broke")
            for _ in range(self.pauses):
                await asyncio.sleep(0)
            if self.hangs or self.fails_at is not None:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.append(request_id)
            raise
        finally:
            self.under_way -= 1
        tokens = torch.tensor([ord("o"), ord("k")])
        versions = torch.full((2,), min_version, dtype=torch.int32)
        return Sample(tokens=tokens, logprobs=torch.full((2,), -0.5), versions=versions, finish=self.finish)


@dataclass
class FakeQueue:
    """Takes reports as the backlog does: the first end of a ticket stands."""

    open: bool = True
    reports: list[tuple] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)

    async def report(self, end: Group | Dropped) -> bool:
        if not self.reports and isinstance(end, Group):
            self.reports.append(("put", end.ticket))
            self.groups.append(end)
        elif not self.reports:
            self.reports.append(("fail" if end.state is State.FAILED else "reject", end.ticket, end.why))
        await asyncio.sleep(0)
        return self.open


async def score(prompt: Prompt, response: str) -> float:
    await asyncio.sleep(0)
    return float(response == "ok")


async def ask_once(prompt: Prompt, context: EpisodeContext) -> Trajectory:
    question = context.render(prompt)
    answer = await context.policy.sample(question)
    return Episode(prompt, question).wrote(answer).finish(await context.reward(prompt, answer.text))


def runner(sampler: FakeSampler, queue: FakeQueue, episode=ask_once, **changes) -> GroupRunner:
    arguments = {
        "name": "rollout-0",
        "score": score,
        "chat": Characters(),
        "parser": AnswerParser(Characters(), ChatSettings()),
        "sampling": Sampling(max_tokens=20, temperature=0.7),
        "group_size": 3,
        "max_context": 16,
    }
    limits = {"concurrency": 100, "episode_seconds": None}
    limits |= {
        key: changes.pop(key)
        for key in ("concurrency", "episode_seconds", "group_seconds", "repeatable", "episode_retries")
        if key in changes
    }
    arguments["settings"] = RolloutSettings(**limits)
    return GroupRunner(episode=episode, sampler=sampler, report=queue.report, **{**arguments, **changes})


async def test_an_episode_may_make_several_trajectories_which_count_as_one_sample():
    async def twice(prompt: Prompt, context: EpisodeContext) -> list[Trajectory]:
        one = await ask_once(prompt, context)
        return [one] if context.sample_index == 1 else [one, Episode(prompt, [1]).finish(0.0)]

    sampler, queue = FakeSampler(), FakeQueue()
    run = runner(sampler, queue, twice)
    assert await run.run(TICKET, PROMPT) == GroupSummary(ticket=4, prompt_id="q1", rewards=(0.5, 1.0, 0.5))
    assert [sample.sample_index for sample in queue.groups[0].samples] == [0, 0, 1, 2, 2]
    assert await run.evaluate(PROMPT, 2) == [0.5, 1.0]


@pytest.mark.parametrize("made", [[], Episode(PROMPT, [1])], ids=["no trajectory", "Episode"])
async def test_an_episode_that_returns_something_else_than_trajectories_fails_its_group(made, request):
    async def episode(prompt: Prompt, context: EpisodeContext):
        return made

    summary = await runner(FakeSampler(), FakeQueue(), episode).run(TICKET, PROMPT)
    returned = f"the episode returned {request.node.callspec.id}"
    assert summary.failed == f"prompt q1: EpisodeError: {returned}, must be a Trajectory or several"


async def test_a_group_of_which_nothing_can_be_trained_fails():
    async def judges(prompt: Prompt, context: EpisodeContext) -> Trajectory:
        episode = Episode(prompt, context.render(prompt))
        said = await context.policy.sample(episode.tokens, trained=False, temperature=0.5)
        episode.observed(said.tokens.tolist())
        return episode.finish(1.0)

    summary = await runner(FakeSampler(), FakeQueue(), judges).run(TICKET, PROMPT)
    assert "no token of its episodes can be trained" in (summary.failed or "")


async def test_a_group_is_all_samples_of_its_prompt_and_goes_to_the_queue():
    sampler, queue = FakeSampler(), FakeQueue()
    summary = await runner(sampler, queue).run(TICKET, PROMPT)
    assert summary == GroupSummary(ticket=4, prompt_id="q1", rewards=(1.0,) * 3)
    group = queue.groups[0]
    assert sum(sample.trained_tokens for sample in group.samples) == 6
    assert (group.ticket, group.prompt_id, group.source) == (4, "q1", "sums")
    assert [sample.sample_index for sample in group.samples] == [0, 1, 2]
    assert group.samples[0].tokens["sampler_versions"].tolist() == [-1, -1, -1, 2, 2]


async def test_a_group_counts_its_responses_that_got_zero_because_the_verifier_did_not_score_them():
    scores = iter([Unscored("error"), 0.0, Unscored("timeout"), 1.0, Unscored("error"), 0.0])

    async def failing(prompt: Prompt, response: str) -> float:
        return next(scores)

    async def judged_twice(prompt: Prompt, context: EpisodeContext) -> Trajectory:
        first = await context.reward(prompt, "")
        episode = Episode(prompt, context.render(prompt))
        episode.wrote(await context.policy.sample(episode.tokens))
        return episode.finish(first + await context.reward(prompt, ""))

    queue = FakeQueue()
    await runner(FakeSampler(), queue, judged_twice, score=failing).run(TICKET, PROMPT)
    (group,) = queue.groups
    assert group.counts == {"reward/verifier_errors": 2, "reward/verifier_timeouts": 1}


async def test_requests_carry_the_oldest_version_one_session_a_group_and_stay_within_the_context():
    sampler = FakeSampler()
    await runner(sampler, FakeQueue()).run(TICKET, PROMPT)
    assert sorted(sampler.asked) == [(f"4.{index}.0", 3, 13, 2, "4") for index in range(3)]  # 16 - 3


async def test_one_failing_episode_fails_the_group_by_its_cause_and_cancels_the_others_requests():
    sampler, queue = FakeSampler(fails_at="4.1.0"), FakeQueue()
    summary = await runner(sampler, queue).run(TICKET, PROMPT)
    assert summary.failed == "prompt q1: ConnectionError: the engine broke"
    assert queue.reports == [("fail", 4, summary.failed)]
    assert sorted(sampler.cancelled) == ["4.0.0", "4.2.0"]  # rollout-2
    assert sampler.under_way == 0


async def test_a_prompt_that_fills_the_context_is_rejected_not_failed():
    sampler, queue = FakeSampler(), FakeQueue()
    summary = await runner(sampler, queue, max_context=3).run(TICKET, PROMPT)
    assert queue.reports == [("reject", 4, "prompt_too_long")]
    assert summary.rejected.startswith("prompt_too_long: 3 tokens leave no room in a context of 3")
    assert summary.failed is None
    assert sampler.asked == []


async def fill_the_context(prompt: Prompt, context: EpisodeContext) -> Trajectory:
    episode = Episode(prompt, context.render(prompt))
    while True:
        episode.wrote(await context.policy.sample(episode.tokens)).observed([63])


async def test_a_conversation_that_fills_the_context_at_a_later_turn_is_rejected_for_that_and_not_for_its_prompt():
    sampler, queue = FakeSampler(), FakeQueue()
    summary = await runner(sampler, queue, fill_the_context, max_context=8).run(TICKET, PROMPT)
    assert queue.reports == [("reject", 4, "context_full")]
    assert summary.rejected.startswith("context_full: 9 tokens leave no room in a context of 8")
    assert await runner(sampler, queue, fill_the_context, max_context=8).evaluate(PROMPT, 2) == [0.0, 0.0]


async def test_a_group_that_the_queue_does_not_train_is_rejected():
    summary = await runner(FakeSampler(), FakeQueue(open=False)).run(TICKET, PROMPT)
    assert (summary.rejected, summary.failed) == ("it came too late, or has no signal", None)


async def test_a_request_that_was_cancelled_elsewhere_fails_the_group():
    summary = await runner(FakeSampler(finish=Finish.CANCELLED), FakeQueue()).run(TICKET, PROMPT)
    assert "request 4.0.0 was cancelled at the generator" in summary.failed


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 14), st.integers(0, 3))
def test_cancelled_at_any_await_the_ticket_is_reported_once_and_no_request_is_left(turns, pauses):
    async def cancel_after() -> None:
        sampler, queue = FakeSampler(pauses=pauses), FakeQueue()
        task = asyncio.create_task(runner(sampler, queue).run(TICKET, PROMPT))
        for _ in range(turns):
            await asyncio.sleep(0)
        started = bool(turns)
        ended = task.done()
        task.cancel()
        await asyncio.wait([task])
        assert sampler.under_way == 0
        if started:
            assert len(queue.reports) == 1  # rollout-1
        if started and not ended:
            assert queue.reports[0] in [("fail", 4, "cancelled"), ("put", 4)]

    asyncio.run(cancel_after())


async def test_no_more_episodes_run_at_once_than_allowed():
    sampler, queue = FakeSampler(pauses=3), FakeQueue()
    await runner(sampler, queue, concurrency=2).run(TICKET, PROMPT)
    assert sampler.most_under_way == 2


async def test_an_evaluation_reports_nothing_to_the_queue_and_asks_by_its_own_temperature():
    sampler, queue = FakeSampler(), FakeQueue()
    group_runner = runner(sampler, queue)
    assert await group_runner.evaluate(PROMPT, 2, {"temperature": 0.0}, min_version=9) == [1.0, 1.0]
    await group_runner.evaluate(PROMPT, 1)
    assert sampler.temperatures == [0.0, 0.0, 0.7]
    assert sampler.asked == [
        ("rollout-0.evaluation-1.0.0", 3, 13, 9, "rollout-0.evaluation-1"),
        ("rollout-0.evaluation-1.1.0", 3, 13, 9, "rollout-0.evaluation-1"),
        ("rollout-0.evaluation-2.0.0", 3, 13, 0, "rollout-0.evaluation-2"),
    ]
    assert queue.reports == []


async def test_each_answer_of_an_evaluation_has_a_seed_which_is_the_same_when_it_is_repeated_anywhere():
    async def seeds(version: int = 9, prompt: Prompt = PROMPT, seed: int = 1, **changes) -> list[int | None]:
        sampler = FakeSampler()
        evaluating = runner(sampler, FakeQueue(), seed=seed, **changes)
        await evaluating.evaluate(PROMPT, 1, min_version=3)
        await evaluating.evaluate(prompt, 2, min_version=version)
        return sampler.seeds[1:]

    first = await seeds()
    assert None not in first
    assert await seeds(name="rollout-1") == first
    others = [await seeds(version=10), await seeds(prompt=replace(PROMPT, id="q2")), await seeds(seed=2)]
    assert len({*first, *itertools.chain(*others)}) == 8


async def test_a_group_has_seeds_only_if_the_run_is_repeatable_and_then_by_its_ticket():
    drawn, repeated, again = FakeSampler(), FakeSampler(), FakeSampler()
    await runner(drawn, FakeQueue()).run(TICKET, PROMPT)
    for sampler in (repeated, again):
        await runner(sampler, FakeQueue(), repeatable=True, seed=1).run(TICKET, PROMPT)
    assert drawn.seeds == [None] * 3
    assert sorted(repeated.seeds) == sorted(again.seeds)
    assert seed_of("1/4.2.0") in repeated.seeds
    assert len(set(repeated.seeds)) == 3


async def test_in_an_evaluation_a_sample_without_room_for_an_answer_has_no_reward_and_ends_nothing():
    async def long_second_turn(prompt: Prompt, context: EpisodeContext) -> Trajectory:
        episode = Episode(prompt, context.render(prompt))
        if context.sample_index == 1:
            episode.observed([63] * 13)
        return episode.wrote(await context.policy.sample(episode.tokens)).finish(1.0)

    group_runner = runner(FakeSampler(), FakeQueue(), long_second_turn)
    assert await group_runner.evaluate(PROMPT, 3) == [1.0, None, 1.0]


@pytest.mark.parametrize("unjudged", [False, True])
async def test_an_episode_that_fails_in_an_evaluation_counts_0_with_its_reason_but_not_a_verifier_that_does(unjudged):
    async def one_fails(prompt: Prompt, context: EpisodeContext) -> Trajectory:
        if context.sample_index == 1:
            with contextlib.suppress(VerifierError):
                await context.reward(prompt, "broken" if unjudged else "ok")
            raise ExceptionGroup("of its tools", [ValueError("a mistake of its own")])
        return await ask_once(prompt, context)

    async def score_or_fail(prompt: Prompt, response: str) -> float:
        if response == "broken":
            raise VerifierError("it is down")
        return 1.0

    group_runner = runner(FakeSampler(), FakeQueue(), one_fails, score=score_or_fail)
    if unjudged:
        with pytest.raises(EvaluationFailed, match="prompt q1: ValueError: a mistake of its own"):
            await group_runner.evaluate(PROMPT, 3)
    else:
        rewards = await group_runner.evaluate(PROMPT, 3)
        assert rewards == [1.0, 0.0, 1.0]
        (failed,) = [reward for reward in pickle.loads(pickle.dumps(rewards)) if isinstance(reward, Failed)]
        assert failed.why == "prompt q1: ValueError: a mistake of its own"


async def test_an_evaluation_has_the_generators_whole_context_and_training_that_of_a_row():
    sampler = FakeSampler()
    group_runner = runner(sampler, FakeQueue(), max_context=8, evaluation_context=16)
    await group_runner.run(TICKET, PROMPT)
    assert {most for _, _, most, _, _ in sampler.asked} == {8 - 3}
    sampler.asked.clear()
    await group_runner.evaluate(PROMPT, 1)
    assert {most for _, _, most, _, _ in sampler.asked} == {16 - 3}
    long = replace(PROMPT, messages=(Message(role="user", content="?" * 9),))
    assert (await group_runner.run(TICKET, long)).rejected.endswith(
        "no room in a context of 8, the smaller of generator.max_context and backlog.row_length"
    )
    assert await group_runner.evaluate(long, 1) == [1.0]


async def test_a_sample_of_an_evaluation_that_is_not_solved_is_told_with_its_prompt(caplog):
    caplog.set_level(logging.INFO)
    await runner(FakeSampler(), FakeQueue(), max_context=3).evaluate(PROMPT, 1)
    (message,) = caplog.messages
    assert message.startswith(
        "an evaluation counts prompt q1 as not solved: 3 tokens leave no room in a context of 3, generator.max_context"
    )


async def test_a_response_is_judged_with_its_prompt_and_the_time_it_takes_is_recorded(monkeypatch):
    judged, spans = [], []

    async def score(prompt: Prompt, response: str) -> float:
        judged.append((prompt, response))
        return 1.0

    def span(name: str, **args):
        spans.append((name, args))
        return contextlib.nullcontext()

    monkeypatch.setattr(group_module, "span", span)
    await runner(FakeSampler(), FakeQueue(), score=score, group_size=1).run(TICKET, PROMPT)
    assert judged == [(PROMPT, "ok")]
    assert spans == [("reward", {"prompt": "q1"})]


async def test_an_episode_may_change_the_distribution_in_an_evaluation_and_only_there():
    seen = []

    async def ask_greedily(prompt: Prompt, context: EpisodeContext) -> Trajectory:
        seen.append(context.evaluation)
        question = context.render(prompt)
        answer = await context.policy.sample(question, temperature=0.0)
        return Episode(prompt, question).wrote(answer).finish(1.0)

    sampler = FakeSampler()
    group_runner = runner(sampler, FakeQueue(), ask_greedily, group_size=1)
    summary = await group_runner.run(TICKET, PROMPT)
    assert summary.failed.startswith("prompt q1: EpisodeError: temperature=0.0: must be 0.7, as in the run's sampling")
    assert await group_runner.evaluate(PROMPT, 1) == [1.0]
    assert (sampler.temperatures, seen) == ([0.0], [False, True])


async def test_a_second_turn_continues_the_first_and_has_its_own_request():
    async def ask_twice(prompt: Prompt, context: EpisodeContext) -> Trajectory:
        episode = Episode(prompt, context.render(prompt))
        episode.wrote(await context.policy.sample(episode.tokens)).observed([63])
        episode.wrote(await context.policy.sample(episode.tokens, Sampling(max_tokens=2)))
        return episode.finish(0.0)

    sampler, queue = FakeSampler(), FakeQueue()
    await runner(sampler, queue, ask_twice, group_size=1).run(TICKET, PROMPT)
    assert [asked[:3] for asked in sampler.asked] == [("4.0.0", 3, 13), ("4.0.1", 6, 2)]
    assert queue.groups[0].samples[0].tokens["tokens"].tolist() == [*b"abc", *b"ok", 63, *b"ok"]


async def test_an_episode_encodes_texts_and_continues_its_chat_with_the_prompts_tools():
    async def converse(prompt: Prompt, context: EpisodeContext) -> Trajectory:
        episode = Episode(prompt, context.render(prompt))
        episode.observed(context.encode("?"))
        chat = [*prompt.messages, Message(role="tool", content="d")]
        episode.observed(context.render_more(chat, episode.tokens))
        episode.observed(context.render_more(chat, episode.tokens, as_recorded=True))
        return episode.wrote(await context.policy.sample(episode.tokens)).finish(0.0)

    queue = FakeQueue()
    prompt = replace(PROMPT, tools=({"name": "add"},))
    await runner(FakeSampler(), queue, converse, group_size=1).run(TICKET, prompt)
    assert bytes(queue.groups[0].samples[0].tokens["tokens"].tolist()) == b"abcT?d51d81Rok"
