"""How episodes and their sessions end: what limits cut short is trained as far as it came, and each end is counted."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import openai
import pytest
from served_policy import Scripted

from apps.agent.main import episode as of_agent
from goaly.agents.answers import AnswerParser
from goaly.agents.gateway import Gateway
from goaly.backlog.admission import Ticket
from goaly.backlog.ledger import Dropped
from goaly.generate.request import Sampling
from goaly.prompts.prompt import Message, Prompt
from goaly.prompts.settings import ChatSettings
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.rollout.episode import EpisodeContext
from goaly.rollout.group import GroupRunner
from goaly.rollout.settings import EndpointSettings, RolloutSettings, SessionSettings
from goaly.trajectory import Group, Trajectory

PROMPT = Prompt(id="q1", source="s", messages=(Message(role="user", content="2+3?"),), answer="5")
LIMITED = SessionSettings(turns=2)


class Runs:
    """Runs groups of two episodes, and keeps the report of the last one."""

    def __init__(self, chat: ChatTokenizer):
        self.chat = chat
        self.end: Group | Dropped | None = None

    async def group(self, episode: Any, max_context: int = 4096, gateway: Gateway | None = None, **limits: Any) -> Any:
        """The end of a group of these episodes."""
        parser = AnswerParser(self.chat, ChatSettings())
        runner = GroupRunner(
            name="rollout-0",
            episode=episode,
            settings=RolloutSettings(**limits),
            sampler=Scripted(self.chat),  # type: ignore[bad-argument-type]
            report=self._report,
            score=_share_of_digits,
            chat=self.chat,
            parser=parser,
            sampling=Sampling(max_tokens=60, temperature=1.0),
            group_size=2,
            max_context=max_context,
            gateway=gateway,
        )
        if gateway is not None:
            await asyncio.to_thread(parser.load)
        await runner.run(Ticket(index=4, min_version=0), PROMPT)
        return self.end

    async def _report(self, end: Group | Dropped) -> bool:
        self.end = end
        return True


async def _share_of_digits(prompt: Prompt, response: str) -> float:
    return sum(map(str.isdigit, response)) / len(response)


@pytest.fixture
def runs(chats: dict[str, ChatTokenizer]) -> Runs:
    return Runs(chats["chatml"])


async def going_on(prompt: Prompt, context: EpisodeContext) -> list[Trajectory]:
    """Asks the same policy without end, and rewards the first answer."""
    said = list(prompt.messages)
    while True:
        answer = await context.chat.say(said)
        said += [answer, Message(role="user", content="and then?")]
        if len(said) == 3:
            context.chat.credited(answer, 0.25 * (1 + context.sample_index))


@pytest.mark.parametrize("limit", [{"session": LIMITED}, {"session": SessionSettings(tokens=20)}, {"max_context": 80}])
async def test_an_episode_that_its_limits_end_is_trained_as_far_as_it_came(runs: Runs, limit: dict[str, Any]) -> None:
    """RG-4."""
    group = await runs.group(going_on, **limit)
    assert isinstance(group, Group), group
    assert group.rewards == [0.25, 0.5]
    assert {sample.outcome for sample in group.samples} == {"truncated"}
    assert all(sample.trained_tokens > 0 and len(sample.turns) > 2 for sample in group.samples)
    assert group.counts == {"agents/sessions_truncated": 2}


async def test_an_agent_that_the_endpoint_refuses_more_is_trained_as_far_as_it_came(runs: Runs) -> None:
    """RG-4."""
    chat = runs.chat
    from served_policy import write_model

    write_model(chat.folder)
    gateway = Gateway(EndpointSettings(), 0, str(chat.folder), 4096)
    await gateway.start(AnswerParser(chat, ChatSettings()))

    async def asks(messages: Sequence[Mapping[str, Any]], *, base_url: str, api_key: str, times: int) -> str:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            said: list[Any] = list(messages)
            for _ in range(times):
                made = await client.chat.completions.create(model="policy", messages=said)
                said += [{"role": "assistant", "content": made.choices[0].message.content}, {**said[0]}]
        return said[-2]["content"]

    def agent(times: int) -> Callable[..., Awaitable[Any]]:
        return partial(of_agent, partial(asks, times=times))

    try:
        group = await runs.group(agent(3), gateway=gateway, session=LIMITED)
        assert group.rewards == [0.0, 0.0]
        assert {(sample.outcome, len(sample.turns)) for sample in group.samples} == {("truncated", 4)}
        assert group.counts == {"agents/sessions_truncated": 2}
        group = await runs.group(agent(2), gateway=gateway, session=LIMITED)
        assert min(group.rewards) > 0
        assert {sample.outcome for sample in group.samples} == {"complete"}
        assert group.counts == {}
    finally:
        await gateway.close()


async def test_other_errors_of_an_episode_fail_its_group_also_where_it_was_truncated_before_it_said_anything(
    runs: Runs,
) -> None:
    """RG-4."""

    async def wrong(prompt: Prompt, context: EpisodeContext) -> Any:
        await context.chat.say(prompt.messages)
        raise ValueError("a mistake of its own")

    end = await runs.group(wrong)
    assert (end.state, end.why) == ("failed", "prompt q1: ValueError: a mistake of its own")
    assert end.counts == {"agents/sessions_abandoned": 2}
    end = await runs.group(going_on, max_context=4)
    assert (end.state, end.why) == ("rejected", "prompt_too_long")


async def test_an_episode_that_goes_on_after_a_refusal_is_truncated_too(runs: Runs) -> None:
    async def content(prompt: Prompt, context: EpisodeContext) -> list[Trajectory]:
        try:
            return await going_on(prompt, context)
        except Exception:
            return context.chat.finish(0.5)

    group = await runs.group(content, session=LIMITED)
    assert group.rewards == [0.75, 1.0]
    assert {sample.outcome for sample in group.samples} == {"truncated"}
    assert group.counts == {"agents/sessions_truncated": 2}


async def test_a_session_that_runs_out_of_time_is_counted_and_its_siblings_are_abandoned(runs: Runs) -> None:
    async def slow(prompt: Prompt, context: EpisodeContext) -> Any:
        await context.chat.say(prompt.messages)
        await asyncio.Event().wait()

    end = await runs.group(slow, episode_seconds=0.1)
    assert (end.state, end.why) == ("failed", "episode_timeout")
    assert sum(end.counts.values()) == 2
    assert end.counts["agents/sessions_timed_out"] >= 1
