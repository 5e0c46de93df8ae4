"""Episodes that a limit cuts off: their rewards, and whose time it was (`rollout.cut_off_reward`)."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from agent_sessions import Agent, assistant
from chat_templates import hermes
from http_sessions import Scripted
from hypothesis import given
from hypothesis import strategies as st
from test_session_ends import PROMPT, TICKET, Runs

from apps.agent import own
from goaly.agents.answer_parser import AnswerParser
from goaly.agents.session import SessionExhausted
from goaly.agents.settings import SessionSettings
from goaly.backlog.batch import Batch, build_batch, check_group
from goaly.backlog.settings import BacklogSettings
from goaly.base.config.check import check
from goaly.generate.request import Sample, Sampling
from goaly.prompts.prompt import Message, Prompt
from goaly.prompts.settings import ChatSettings
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.reward.estimate import estimate
from goaly.reward.failures import Unscored
from goaly.reward.settings import AdvantageSettings
from goaly.rollout.cut_off_reward import lowered, settled
from goaly.rollout.episode import EpisodeContext
from goaly.rollout.settings import CutOffReward, RolloutSettings
from goaly.trajectory import Group, Outcome, Trajectory
from tests import virtual_time
from tests.unit.trajectories import sampled

ESTIMATORS = ["group", "group_mean", "rloo", "reinforce_pp", "reinforce_pp_baseline", "process", "gae"]
CALL = hermes(assistant("", None, {"a": 2, "b": 3}))
ENDLESS = "and so on " * 200
ZERO = Unscored("timeout")
WRONG = [CALL, CALL, CALL, "wrong"]


def advantages(group: Group, name: str = "group") -> dict[int, float]:
    """The advantage of each sample's last trained token."""
    later = {"values": [torch.zeros(len(one)) for one in group.samples]} if name == "gae" else None
    found = estimate([group], AdvantageSettings(name=name), later).advantages
    return {
        one.sample_index: float(values_T[one.tokens["trained"]][-1])
        for one, values_T in zip(group.samples, found, strict=True)
    }


class ByEpisode(Scripted):
    """Answers each episode with texts of its own, in order; None never comes, and a number after this many seconds."""

    def __init__(self, chat: ChatTokenizer, texts: Mapping[int, Sequence[str | float | None]]):
        super().__init__(chat)
        self._of = {sample: iter(those) for sample, those in texts.items()}

    async def generate(self, name: str, *arguments: Any) -> Sample:
        text = next(self._of[int(name.split(".")[1])])
        if text is None:
            await asyncio.Event().wait()
        if isinstance(text, float):
            await asyncio.sleep(text)
        self._texts = [str(text)]
        return await super().generate(name, *arguments)


async def group_of(
    chat: ChatTokenizer,
    episode: Any,
    texts: Mapping[int, Sequence[str | float | None]],
    max_context: int = 4096,
    **limits: Any,
) -> Any:
    """The end of a group with an episode for each of these texts."""
    runs = Runs(chat)
    runner = runs.runner(episode, max_context, **limits)
    runner.sampler, runner.group_size = ByEpisode(chat, texts), len(texts)
    runner.sampling = Sampling(temperature=1.0)
    runner.parser = AnswerParser(chat, ChatSettings(tool_parser="hermes"))
    runner.parser.load()
    await runner.run(TICKET, PROMPT)
    return runs.end


@pytest.mark.parametrize("name", ESTIMATORS)
@given(
    finished=st.lists(st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=2), min_size=1, max_size=4),
    cut_off=st.lists(st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_a_cut_off_episode_never_has_the_best_advantage_of_its_group(
    name: str, finished: list[list[float]], cut_off: list[list[float]]
) -> None:
    """rollout-8."""
    episodes = [
        tuple(sampled(4, index=index, reward=reward) for reward in rewards)
        for index, rewards in enumerate([*cut_off, *finished])
    ]
    made = settled(episodes[len(cut_off) :], episodes[: len(cut_off)], "worst")
    assert [episode[0].sample_index for episode in made] == list(range(len(episodes)))
    group = Group(ticket=0, prompt_id="p", source="s", samples=tuple(one for episode in made for one in episode))
    worst = torch.tensor(group.rewards[len(cut_off) :]).min().item()
    assert max(group.rewards[: len(cut_off)]) <= min(0.0, worst)
    of = estimate([group], AdvantageSettings(name=name), {"values": [torch.zeros(4)] * len(group.samples)}).advantages
    best = {True: float("-inf"), False: float("-inf")}
    for one, values_T in zip(group.samples, of, strict=True):
        is_finished = one.sample_index >= len(cut_off)
        best[is_finished] = max(best[is_finished], float(values_T[1:].max()))
    assert best[False] <= best[True] + 1e-6


@pytest.mark.parametrize("fills", [["x " * 358 + CALL], [ENDLESS], [CALL, ENDLESS]])
async def test_an_answer_that_fills_the_context_is_no_better_than_seven_wrong_ones(
    chats: dict[str, ChatTokenizer], fills: list[str | None]
) -> None:
    """own.py as it is shipped, whose wrong answers have -0.2 after three uses of its tool."""
    texts = {**{sample: WRONG for sample in range(7)}, 7: fills}
    group = await group_of(chats["hermes"], own.episode, texts, max_context=1000)
    assert isinstance(group, Group), group
    assert group.rewards == pytest.approx([-0.2] * 8)
    assert group.samples[7].outcome is Outcome.TRUNCATED
    found = {name: advantages(group, name) for name in ESTIMATORS}
    assert all(of[7] == min(of.values()) for of in found.values())


def test_a_lowered_reward_is_that_of_the_last_trained_token() -> None:
    one = sampled(4, reward=1.0)
    one.tokens["trained"][3] = False
    assert lowered(one, -1.0).tokens["rewards"].tolist() == [0, 0, -1, 0]
    assert lowered(one, 1.0) is one


async def told(prompt: Prompt, context: EpisodeContext) -> list[Trajectory]:
    """Asks until the answer is a number, which is its reward."""
    said = list(prompt.messages)
    while True:
        answer = await context.chat.say(said)
        said += [answer, Message(role="user", content="and?")]
        if (answer.content or "").lstrip("-").isdigit():
            return context.chat.finish(float(answer.content))


ONE_RIGHT = {0: ["1"], **{sample: ["-1"] for sample in range(1, 7)}}
NEVER_ENDS = ["more", "more", "more", None]


@pytest.mark.parametrize("limit", [{"session": SessionSettings(turns=3)}, {"session": SessionSettings(tokens=9)}, {}])
def test_an_episode_that_never_ends_is_as_bad_as_a_wrong_one_where_these_have_minus_1(
    chats: dict[str, ChatTokenizer], limit: dict[str, Any]
) -> None:
    made = group_of(chats["hermes"], told, {**ONE_RIGHT, 7: NEVER_ENDS}, **({"episode_seconds": 60.0} | limit))
    group = virtual_time.run(made)
    assert group.rewards == [1.0] + [-1.0] * 7
    assert group.samples[7].outcome is Outcome.TRUNCATED
    for name in ESTIMATORS:
        of = advantages(group, name)
        assert of[7] == pytest.approx(of[1])
        assert of[1] < of[0]


@pytest.mark.parametrize(
    ("setting", "reward", "others"),
    [("worst", -1.0, -0.378), ("exclude", None, -0.408), (0, 0.0, -0.539), (-3.5, -3.5, 0.055)],
)
def test_the_setting_says_what_a_cut_off_episode_is_worth(
    chats: dict[str, ChatTokenizer], setting: CutOffReward, reward: float | None, others: float
) -> None:
    texts = {**ONE_RIGHT, 7: NEVER_ENDS}
    made = group_of(chats["hermes"], told, texts, episode_seconds=60.0, cut_off_reward=setting)
    group = virtual_time.run(made)
    assert group.rewards == [1.0] + [-1.0] * 6 + ([] if reward is None else [reward])
    assert advantages(group)[1] == pytest.approx(others, abs=1e-3)
    check_group(group, BacklogSettings(group_size=8, row_length=4096), 0)
    assert group.counts.get("rollout/excluded_episodes", 0) == (reward is None)
    if reward is None:
        absent = virtual_time.run(group_of(chats["hermes"], told, ONE_RIGHT))
        batches = [batch_of(one, size) for one, size in ((group, 8), (absent, 7))]
        assert torch.equal(*(batch.ranks[0].rows["advantages"] for batch in batches))
        counts = [(one.handle.sequences, one.handle.trained_tokens, one.handle.metrics) for one in batches]
        assert counts[0] == counts[1]


def batch_of(group: Group, size: int) -> Batch:
    settings = BacklogSettings(group_size=size, groups_per_step=1, row_length=4096)
    return build_batch(0, [group], settings=settings, advantage_settings=AdvantageSettings(), dp_ranks=1, pad_token=0)


@pytest.mark.parametrize(
    ("setting", "end"),
    [("worst", [0.0, 0.0]), ("exclude", "cut_off"), (-1.0, [-1.0, -1.0])],
)
async def test_where_all_are_cut_off_none_is_better(
    chats: dict[str, ChatTokenizer], setting: CutOffReward, end: Any
) -> None:
    texts = {0: ["more"] * 3, 1: ["more"] * 3}
    group = await group_of(chats["hermes"], told, texts, session=SessionSettings(turns=2), cut_off_reward=setting)
    assert (group.why if setting == "exclude" else group.rewards) == end


async def test_what_the_script_says_before_the_limit_or_of_it_counts(chats: dict[str, ChatTokenizer]) -> None:
    async def says(prompt: Prompt, context: EpisodeContext) -> list[Trajectory]:
        if context.sample_index == 1:
            context.chat.rewarded(0.125)
        try:
            return await told(prompt, context)
        except SessionExhausted:
            if context.sample_index in (1, 3):
                raise
            if context.sample_index == 4:  # another agent of the episode is refused, as by HTTP
                context.chat.was_refused = False
                with pytest.raises(SessionExhausted), context.chat.session.sampling():
                    pass
            return context.chat.finish(0.25)

    texts = {0: ["-1"], **{sample: ["more"] * 3 for sample in range(1, 5)}}
    group = await group_of(chats["hermes"], says, texts, session=SessionSettings(turns=2))
    assert group.rewards == [-1.0, 0.125, 0.25, -1.0, -1.0]


async def test_an_answer_that_fills_the_context_and_passes_or_is_worse_than_the_worst_keeps_its_reward(
    chats: dict[str, ChatTokenizer],
) -> None:
    async def fills(prompt: Prompt, context: EpisodeContext) -> list[Trajectory]:
        await context.chat.say(prompt.messages)
        if context.sample_index == 4:
            context.chat.rewarded(0.25)
            return context.chat.finish()
        return context.chat.finish([-1.0, 1.0, -2.0, -0.5][context.sample_index])

    texts = {0: ["short"], **{sample: [ENDLESS] for sample in range(1, 5)}}
    group = await group_of(chats["hermes"], fills, texts, max_context=1000)
    assert group.rewards == [-1.0, 1.0, -2.0, -1.0, 0.25]


@pytest.mark.parametrize(
    ("scores", "rewards"),
    [
        ([-1.0, 1.0, ZERO, ZERO], [-1.0, 1.0, -1.0, -1.0]),
        ([ZERO, 1.0, 0.5, 2.0], [0.0, 1.0, 0.5, 2.0]),
        ([ZERO] * 4, [0.0] * 4),
    ],
)
@pytest.mark.parametrize("setting", ["worst", "exclude"])
async def test_an_answer_without_a_score_is_no_better_than_a_failure(
    chats: dict[str, ChatTokenizer], setting: CutOffReward, scores: list[float], rewards: list[float]
) -> None:
    """rollout-8."""
    group = await scored_group(chats["hermes"], [[score] for score in scores], cut_off_reward=setting)
    assert group.rewards == rewards


async def test_an_answer_without_a_score_costs_an_episode_that_passes_nothing(chats: dict[str, ChatTokenizer]) -> None:
    group = await scored_group(chats["hermes"], [[-1.0], [ZERO, 1.0], [ZERO, 0.5]])
    assert group.rewards == [-1.0, 1.0, -1.0]


async def scored_group(chat: ChatTokenizer, scores: Sequence[Sequence[float]], **limits: Any) -> Group:
    """Episodes that have the sums of these scores of their verifier."""

    async def judged(prompt: Prompt, context: EpisodeContext) -> list[Trajectory]:
        await context.chat.say(prompt.messages)
        mine = context.sample_index
        given = [await context.reward(prompt, f"{mine} {number}") for number in range(len(scores[mine]))]
        return context.chat.finish(sum(given))

    async def score(prompt: Prompt, response: str) -> float:
        episode, number = map(int, response.split())
        return scores[episode][number]

    runs = Runs(chat)

    runs.score = score
    runner = runs.runner(judged, **limits)
    runner.sampler, runner.group_size = ByEpisode(chat, {one: ["1"] for one in range(len(scores))}), len(scores)
    await runner.run(TICKET, PROMPT)
    assert isinstance(runs.end, Group), runs.end
    return runs.end


def test_a_session_that_an_answer_filled_is_exhausted_until_a_shorter_chat_also_after_a_replay(
    agent: Callable[..., Agent],
) -> None:
    """agents-4."""
    one = agent("hermes")
    for text, filled in (("long", True), ("short", False)):
        place = one.session.extend([{"role": "user", "content": text}])
        completion = replace(one.completion(place.prompt, [5, 6]), filled=filled)
        one.session.record(place, completion, {"role": "assistant", "content": "5"})
        assert [session.exhausted for session in (one.session, one.replayed())] == [filled] * 2


async def test_all_trajectories_of_a_cut_off_episode_have_its_reward(chats: dict[str, ChatTokenizer]) -> None:
    async def branches(prompt: Prompt, context: EpisodeContext) -> list[Trajectory]:
        if context.sample_index == 1:
            first = await context.chat.say([Message(role="user", content="another")])
            context.chat.credited(first, 0.75)
        return await told(prompt, context)

    texts = {0: ["-1"], 1: ["more"] * 3}
    group = await group_of(chats["hermes"], branches, texts, session=SessionSettings(turns=2))
    assert [(one.sample_index, one.reward) for one in group.samples] == [(0, -1.0), (1, -1.0), (1, -1.0)]


SECONDS = 60.0


@pytest.mark.parametrize(
    ("before", "generates", "is_its_own"),
    [(0.0, False, False), (0.0, True, True), (29.0, True, True), (31.0, True, False), (59.0, False, False)],
)
@pytest.mark.parametrize("setting", ["worst", "exclude", 0.5])
def test_an_episode_whose_own_tool_took_the_time_is_not_trained_as_bad(
    chats: dict[str, ChatTokenizer], setting: CutOffReward, before: float, generates: bool, is_its_own: bool
) -> None:
    """Eight equal right episodes. The tool of the last one takes this long, and then hangs, or its policy does."""

    async def one_is_slow(prompt: Prompt, context: EpisodeContext) -> list[Trajectory]:
        answer = await context.chat.say(prompt.messages)
        if context.sample_index == 7:
            await asyncio.sleep(before)
            if not generates:
                await asyncio.Event().wait()
            await context.chat.say([*prompt.messages, answer, Message(role="user", content="and?")])
        return context.chat.finish(1.0)

    texts = {sample: ["1", None] for sample in range(8)}
    made = group_of(chats["hermes"], one_is_slow, texts, episode_seconds=SECONDS, cut_off_reward=setting)
    end = virtual_time.run(made)
    if setting == "exclude" or not is_its_own:
        assert end.rewards == [1.0] * 7
        assert end.counts["rollout/excluded_episodes"] == 1
        assert set(advantages(end).values()) == {0.0}
    else:
        assert end.rewards == [1.0] * 7 + [0.0 if setting == "worst" else setting]


@pytest.mark.parametrize(
    ("generated", "then", "is_its_own"),
    [
        ([40.0], "hangs", False),  # a tool that hangs after long thoughts
        ([20.0], "works 20 s and asks again", True),
        ([20.0], "works 35 s and asks again", False),
        ([], "asks for two answers, one after the other", True),
    ],
)
def test_the_time_of_a_policy_is_that_of_all_its_requests(
    chats: dict[str, ChatTokenizer], generated: list[float], then: str, is_its_own: bool
) -> None:
    async def one_is_slow(prompt: Prompt, context: EpisodeContext) -> list[Trajectory]:
        said = list(prompt.messages)
        said.append(await context.chat.say(said))
        if context.sample_index == 1:
            for _ in generated:
                said += [Message(role="user", content="and?"), await context.chat.say([*said])]
            more = [*said, Message(role="user", content="more?")]
            if then == "hangs":
                await asyncio.Event().wait()
            if then.startswith("works"):
                await asyncio.sleep(float(then.split()[1]))
                await context.chat.say(more)
            async with asyncio.TaskGroup() as requests:
                requests.create_task(context.chat.say(more))
                await asyncio.sleep(40.0)
                requests.create_task(context.chat.say(more))
        return context.chat.finish(1.0)

    async def made() -> Group:
        await asyncio.sleep(1000.0)  # a clock that did not begin with the episode
        texts = {0: ["1"], 1: ["1", *generated, None, None]}
        return await group_of(chats["hermes"], one_is_slow, texts, episode_seconds=SECONDS)

    assert virtual_time.run(made()).rewards == ([1.0, 0.0] if is_its_own else [1.0])


@pytest.mark.parametrize("setting", ["worst", "exclude", 0.5])
def test_a_reward_that_was_given_before_time_ran_out_stays(
    chats: dict[str, ChatTokenizer], setting: CutOffReward
) -> None:
    async def hangs(prompt: Prompt, context: EpisodeContext) -> list[Trajectory]:
        await context.chat.say(prompt.messages)
        if context.sample_index == 1:
            context.chat.rewarded(0.25)
            await asyncio.Event().wait()
        return context.chat.finish(1.0)

    texts = {0: ["1"], 1: ["1"]}
    made = group_of(chats["hermes"], hangs, texts, episode_seconds=SECONDS, cut_off_reward=setting)
    assert virtual_time.run(made).rewards == [1.0, 0.25]


def test_a_setting_that_is_no_reward_is_named() -> None:
    problems = [check(RolloutSettings, {"cut_off_reward": value}, "rollout")[1] for value in ("best", 0, -0.5)]
    assert problems == [["rollout.cut_off_reward=best: must be one of worst, exclude or a number"], [], []]
