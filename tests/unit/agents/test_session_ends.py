"""How episodes and their sessions end: what limits cut short is trained as far as it came, and each end is counted."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from agent_sessions import TOOLS
from http_sessions import Scripted

from apps.agent.main import by_function
from apps.agent.main import episode as of_agent
from goaly.agents.answer_parser import AnswerParser
from goaly.agents.gateway import Endpoint, Gateway
from goaly.agents.session import Session, SessionBusy, SessionExhausted
from goaly.agents.session_files import SessionFiles
from goaly.agents.settings import EndpointSettings, SessionSettings
from goaly.backlog.events import Dropped, Ticket
from goaly.environments.limits import LimitedEnvironment
from goaly.environments.protocol import EnvironmentDied, Observation, StepResult
from goaly.generate.policy import ContextFull
from goaly.generate.request import Sampling
from goaly.prompts.prompt import Message, Prompt
from goaly.prompts.settings import ChatSettings
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.reward.verifier_process import VerifierError
from goaly.rollout import failed_episodes
from goaly.rollout.episode import EpisodeContext
from goaly.rollout.failed_episodes import FailedEpisodes
from goaly.rollout.group_runner import GroupRunner
from goaly.rollout.settings import RolloutSettings
from goaly.trajectory import Group, Trajectory
from tests import virtual_time

PROMPT = Prompt(id="q1", source="s", messages=(Message(role="user", content="2+3?"),), answer="5")
LIMITED = SessionSettings(turns=2)
TICKET = Ticket(index=4, min_version=0)


class Runs:
    """Runs groups of two episodes, and keeps the report of the last one."""

    def __init__(self, chat: ChatTokenizer):
        self.chat = chat
        self.score = _share_of_digits
        self.end: Group | Dropped | None = None

    def runner(
        self,
        episode: Any,
        max_context: int = 4096,
        gateway: Any = None,
        files: Any = None,
        failed_episodes: Any = None,
        **limits: Any,
    ) -> Any:
        """Runs groups of these episodes."""
        self.sampler, self.parser = Scripted(self.chat), AnswerParser(self.chat, ChatSettings())
        return GroupRunner(
            name="rollout-0",
            episode=episode,
            settings=RolloutSettings(**limits),
            sampler=self.sampler,  # type: ignore[bad-argument-type]
            report=self._report,
            score=self.score,
            chat=self.chat,
            parser=self.parser,
            sampling=Sampling(max_tokens=60, temperature=1.0),
            group_size=2,
            max_context=max_context,
            gateway=gateway,
            session_files=files,
            failed_episodes=failed_episodes,
        )

    async def group(self, episode: Any, max_context: int = 4096, prompt: Prompt = PROMPT, **facts: Any) -> Any:
        """The end of a group of these episodes."""
        runner = self.runner(episode, max_context, **facts)
        if isinstance(facts.get("gateway"), Gateway):
            await asyncio.to_thread(self.parser.load)
        self.summary = await runner.run(TICKET, prompt)
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


@pytest.mark.parametrize(
    ("limit", "answers"),
    [({"session": LIMITED}, 4), ({"session": SessionSettings(tokens=20)}, 6), ({"max_context": 80}, 4)],
)
async def test_an_episode_that_its_limits_end_is_trained_as_far_as_it_came(
    runs: Runs, limit: dict[str, Any], answers: int, caplog: pytest.LogCaptureFixture
) -> None:
    """rollout-4."""
    caplog.set_level("INFO", "goaly.rollout.group_runner")
    group = await runs.group(going_on, **limit)
    assert isinstance(group, Group), group
    told = [record.getMessage() for record in caplog.records if record.name == "goaly.rollout.group_runner"]
    assert sorted(text.partition(": ")[0] for text in told) == [
        f"episode {sample} of prompt q1 was cut off" for sample in (0, 1)
    ]
    for sample, text in enumerate(sorted(told)):
        assert "context" in text or f"session of prompt q1/{sample}: " in text
    assert len(runs.sampler.prompts) == answers
    assert group.rewards == [0.25, 0.5]
    assert {sample.outcome for sample in group.samples} == {"truncated"}
    assert all(sample.trained_tokens > 0 and len(sample.turns) > 2 for sample in group.samples)
    assert group.counts == {"agents/sessions_truncated": 2}


async def test_an_agent_that_the_endpoint_refuses_more_is_trained_as_far_as_it_came_and_what_it_cannot_set_is_counted(
    runs: Runs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rollout-4."""
    monkeypatch.setattr("goaly.agents.http_session._TOLD", set())
    chat = runs.chat
    gateway = Gateway(EndpointSettings(), 0, str(chat.folder), 60)
    await gateway.start(AnswerParser(chat, ChatSettings()))

    async def asks(
        messages: Sequence[Mapping[str, Any]], *, base_url: str, api_key: str, times: int, **given: Any
    ) -> str:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            said: list[Any] = list(messages)
            for _ in range(times):
                made = await client.chat.completions.create(model="policy", messages=said, **given)
                said += [{"role": "assistant", "content": made.choices[0].message.content}, {**said[0]}]
        return said[-2]["content"]

    def agent(times: int, **given: float) -> Callable[..., Awaitable[Any]]:
        return partial(of_agent, partial(by_function, partial(asks, times=times, **given)))

    try:
        group = await runs.group(agent(3), gateway=gateway, session=LIMITED)
        assert group.rewards == [0.0, 0.0]
        assert {(sample.outcome, len(sample.turns)) for sample in group.samples} == {("truncated", 4)}
        assert group.counts == {"agents/sessions_truncated": 2}
        group = await runs.group(agent(99), gateway=gateway, max_context=60)
        assert {sample.outcome for sample in group.samples} == {"truncated"}
        assert group.counts == {"agents/sessions_truncated": 2}
        group = await runs.group(agent(2, temperature=0.3, top_p=1.0), gateway=gateway)
        assert group.counts == {"agents/overridden_requests": 4}
        (told,) = [text for record in caplog.records if "agents name" in (text := record.getMessage())]
        assert "temperature" in told
        assert "top_p" not in told
        group = await runs.group(agent(2), gateway=gateway, session=LIMITED)
        assert min(group.rewards) > 0
        assert {sample.outcome for sample in group.samples} == {"complete"}
        assert group.counts == {}
    finally:
        await gateway.close()


async def test_other_errors_of_an_episode_fail_its_group_also_where_it_was_truncated_before_it_said_anything(
    runs: Runs,
) -> None:
    """rollout-4."""

    async def wrong(prompt: Prompt, context: EpisodeContext) -> Any:
        await context.chat.say(prompt.messages)
        raise ValueError("a mistake of its own")

    end = await runs.group(wrong)
    assert (end.state, end.why) == ("failed", "prompt q1: ValueError: a mistake of its own")
    assert end.counts == {"agents/sessions_abandoned": 2}
    assert runs.summary.rewards == ()
    end = await runs.group(going_on, max_context=4)
    assert (end.state, end.why) == ("rejected", "prompt_too_long")
    assert end.counts == {"agents/sessions_abandoned": 2}


async def test_what_the_episodes_of_a_failed_group_have_said_is_kept(runs: Runs, tmp_path: Path) -> None:
    async def breaks(prompt: Prompt, context: EpisodeContext) -> Any:
        if context.sample_index == 0:
            said = await context.chat.say(prompt.messages)
            context.chat.credited(said, 0.5)
            raise ValueError("a mistake of its own")
        await asyncio.Event().wait()

    assert isinstance(await runs.group(breaks, failed_episodes=FailedEpisodes(tmp_path)), Dropped)
    assert os.listdir(tmp_path) == [f"{TICKET.index}.0.jsonl"]  # the other one has said nothing
    *records, failed = map(json.loads, (tmp_path / f"{TICKET.index}.0.jsonl").read_text().splitlines())
    assert failed == {"kind": "failed", "why": "ValueError: a mistake of its own"}
    session = Session(runs.chat, prompt_id="q1").replay(records)
    assert session.ended == "abandoned"
    (trajectory,) = session.trajectories(0.0)
    assert (trajectory.reward, trajectory.trained_tokens) == (0.5, len(session.turns[0].tokens))
    await runs.group(going_on, failed_episodes=FailedEpisodes(tmp_path / "trained"), session=LIMITED)
    assert not (tmp_path / "trained").exists()


async def test_an_episode_that_a_full_disk_cuts_is_not_kept(runs: Runs, tmp_path: Path) -> None:
    async def breaks(prompt: Prompt, context: EpisodeContext) -> Any:
        await context.chat.say(prompt.messages)
        raise ValueError("a mistake of its own")

    (tmp_path / f"{TICKET.index}.0.new").symlink_to("/dev/full")
    assert isinstance(await runs.group(breaks, failed_episodes=FailedEpisodes(tmp_path)), Dropped)
    assert os.listdir(tmp_path) == []


async def test_only_the_newest_failed_episodes_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed_episodes, "MOST_KEPT", 2)
    for name in ("9.0", "10.1", "10.0", "2.0"):
        (tmp_path / f"{name}.jsonl").touch()
    await FailedEpisodes(tmp_path).keep(11, [])
    assert set(os.listdir(tmp_path)) == {"10.0.jsonl", "10.1.jsonl"}


@pytest.mark.parametrize("error", [VerifierError("it is down"), EnvironmentDied("it was killed")])
async def test_what_the_verifier_and_the_environment_fail_at_fails_the_group_of_a_truncated_session(
    runs: Runs, error: Exception
) -> None:
    """rollout-4."""

    async def fails(prompt: Prompt, context: EpisodeContext) -> Any:
        try:
            await going_on(prompt, context)
        except SessionExhausted:
            if isinstance(error, EnvironmentDied):
                raise error from None
            await context.reward(prompt, "")

    async def score(prompt: Prompt, response: str) -> float:
        raise error

    runs.score = score
    end = await runs.group(fails, session=LIMITED)
    assert (end.state, end.why) == ("failed", f"prompt q1: {type(error).__name__}: {error}")


async def test_a_verifier_that_fails_beside_others_fails_the_group_of_a_truncated_session(runs: Runs) -> None:
    """rollout-4."""

    async def asks_twice(prompt: Prompt, context: EpisodeContext) -> Any:
        with pytest.raises(SessionExhausted):
            await going_on(prompt, context)
        failed, _ = await asyncio.gather(
            context.reward(prompt, "broken"), context.reward(prompt, "12"), return_exceptions=True
        )
        assert isinstance(failed, VerifierError)
        raise failed

    async def score(prompt: Prompt, response: str) -> float:
        await asyncio.sleep(0)
        if response == "broken":
            await asyncio.sleep(0)
            raise VerifierError("it is down")
        return 1.0

    runs.score = score
    end = await runs.group(asks_twice, session=LIMITED)
    assert (end.state, end.why) == ("failed", "prompt q1: VerifierError: it is down")


async def test_an_agent_that_begins_a_shorter_chat_where_the_context_was_full_is_complete(runs: Runs) -> None:
    async def compacts(prompt: Prompt, context: EpisodeContext) -> list[Trajectory]:
        with pytest.raises(ContextFull):
            await going_on(prompt, context)
        await context.chat.say([Message(role="user", content="in short")])
        return context.chat.finish(1.0)

    group = await runs.group(compacts, max_context=80)
    assert {sample.outcome for sample in group.samples} == {"complete"}
    assert group.counts == {}


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


@virtual_time.jumps
async def test_an_episode_that_runs_out_of_time_is_trained_as_truncated_beside_its_siblings(runs: Runs) -> None:
    async def one_is_slow(prompt: Prompt, context: EpisodeContext) -> Any:
        said = await context.chat.say(prompt.messages)
        if context.sample_index == 1:
            context.chat.credited(said, -0.25)
            runs.sampler.go_on = asyncio.Event()
            await context.chat.say([Message(role="user", content="again")])
        return context.chat.finish(1.0)

    group = await runs.group(one_is_slow, episode_seconds=60.0)
    assert group.rewards == [1.0, -0.25]
    assert [sample.outcome for sample in group.samples] == ["complete", "truncated"]
    assert [sample.trained_tokens > 0 for sample in group.samples] == [True, True]
    assert group.counts == {"agents/sessions_timed_out": 1}


class Hanging:
    """An environment that never answers."""

    alive = True

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        return Observation(content={})

    async def step(self, action: Mapping[str, Any]) -> StepResult:
        return await asyncio.Event().wait()

    async def close(self) -> None:
        pass


async def _waits(prompt: Prompt, context: EpisodeContext) -> None:
    await asyncio.Event().wait()


async def _waits_for_its_score(prompt: Prompt, context: EpisodeContext) -> None:
    await context.chat.say(prompt.messages)
    await context.reward(prompt, "late")


async def _waits_for_its_environment(prompt: Prompt, context: EpisodeContext) -> None:
    await context.chat.say(prompt.messages)
    environment = LimitedEnvironment(Hanging())
    await environment.reset({})
    await environment.step({})


async def _has_asked_a_judge_only(prompt: Prompt, context: EpisodeContext) -> None:
    await context.chat.say(prompt.messages, trained=False)
    await asyncio.Event().wait()


@pytest.mark.parametrize("late", [_waits, _waits_for_its_score, _has_asked_a_judge_only])
async def test_a_group_fails_if_what_an_episode_said_in_its_time_cannot_be_judged(runs: Runs, late: Any) -> None:
    """rollout-4."""

    async def one_is_late(prompt: Prompt, context: EpisodeContext) -> Any:
        if context.sample_index == 1:
            return await late(prompt, context)
        await context.chat.say(prompt.messages)
        return context.chat.finish(1.0)

    async def score(prompt: Prompt, response: str) -> float:
        return await asyncio.Event().wait()

    runs.score = score
    end = await runs.group(one_is_late, episode_seconds=0.1)
    assert (end.state, end.why) == ("failed", "episode_timeout")
    assert end.counts["agents/sessions_timed_out"] == 1


async def test_an_episode_that_runs_out_of_time_in_its_environment_leaves_its_group(runs: Runs) -> None:  # rollout-4
    async def one_is_late(prompt: Prompt, context: EpisodeContext) -> Any:
        if context.sample_index == 1:
            await _waits_for_its_environment(prompt, context)
        await context.chat.say(prompt.messages)
        return context.chat.finish(1.0)

    group = await runs.group(one_is_late, episode_seconds=0.1)
    assert group.rewards == [1.0]
    assert group.counts["agents/sessions_timed_out"] == group.counts["rollout/excluded_episodes"] == 1


@virtual_time.jumps
async def test_a_group_fails_if_all_its_episodes_run_out_of_time(runs: Runs) -> None:  # rollout-4
    async def slow(prompt: Prompt, context: EpisodeContext) -> Any:
        await context.chat.say(prompt.messages)
        runs.sampler.go_on = asyncio.Event()
        await context.chat.say(prompt.messages)

    end = await runs.group(slow, episode_seconds=60.0)
    assert (end.state, end.why) == ("failed", "episode_timeout")
    assert end.counts == {"agents/sessions_timed_out": 2}
    assert "all episodes of prompt q1 exceeded rollout.episode_seconds=60.0" in (runs.summary.failed or "")


async def test_an_evaluation_counts_0_for_an_episode_that_runs_out_of_time_also_if_it_was_exhausted(runs: Runs) -> None:
    async def exhausted_and_late(prompt: Prompt, context: EpisodeContext) -> Any:
        with pytest.raises(SessionExhausted):
            await going_on(prompt, context)
        await asyncio.Event().wait()

    runner = runs.runner(exhausted_and_late, session=LIMITED, episode_seconds=0.1)
    assert await runner.evaluate(PROMPT, 2) == [0.0, 0.0]


async def test_an_answer_that_was_scored_before_the_limits_ended_its_episode_is_trained(runs: Runs) -> None:
    """rollout-4."""

    async def scored(prompt: Prompt, context: EpisodeContext) -> Any:
        assert await context.reward(prompt, "12") == 1.0
        return await going_on(prompt, context)

    group = await runs.group(scored, session=LIMITED)
    assert group.rewards == [0.25, 0.5]


async def test_sessions_that_were_under_way_are_counted_in_a_group_that_is_cancelled(runs: Runs) -> None:
    begun = asyncio.Event()

    async def waits(prompt: Prompt, context: EpisodeContext) -> Any:
        begun.set()
        await asyncio.Event().wait()

    group = asyncio.create_task(runs.runner(waits).run(TICKET, PROMPT))
    await begun.wait()
    group.cancel()
    with pytest.raises(asyncio.CancelledError):
        await group
    assert isinstance(runs.end, Dropped)
    assert runs.end.counts == {"agents/sessions_abandoned": 2}


async def test_an_episode_chats_with_the_tools_of_its_prompt_and_pays_for_malformed_calls(
    chats: dict[str, ChatTokenizer],
) -> None:
    runs = Runs(chats["hermes"])

    async def calls(prompt: Prompt, context: EpisodeContext) -> list[Trajectory]:
        session = context.chat.session
        await context.chat.say(prompt.messages)
        asked = session.extend([Message(role="user", content="again").as_dict()])
        completion = await context.policy.sample(asked.prompt)
        session.record(asked, completion, {"content": "x"}, malformed=2)
        with session.sampling(), pytest.raises(SessionBusy), session.sampling():
            pass
        return context.chat.finish(1.0)

    tools = replace(PROMPT, tools=TOOLS)
    group = await runs.group(calls, prompt=tools, session=SessionSettings(malformed_penalty=0.25, parallel=1))
    assert "search" in runs.chat.decode(runs.sampler.prompts[0])
    assert group.rewards == [0.75, 0.75]
    assert [(one.prompt_id, one.sample_index) for one in group.samples] == [("q1", at) for at in (0, 0, 1, 1)]
    assert group.counts == {"agents/malformed_calls": 4}


async def test_answers_that_are_context_only_are_counted(runs: Runs) -> None:
    async def asks_a_judge(prompt: Prompt, context: EpisodeContext) -> list[Trajectory]:
        said = await context.chat.say(prompt.messages)
        await context.chat.say([*prompt.messages, said, Message(role="user", content="again")], trained=False)
        return context.chat.finish(1.0)

    group = await runs.group(asks_a_judge)
    assert group.counts == {"agents/untrained_turns": 2}


async def test_the_records_of_a_group_under_way_are_kept_for_the_next_worker_and_then_deleted(
    runs: Runs, tmp_path: Path
) -> None:  # agents-7
    files, both_asked, going_on = SessionFiles(tmp_path), asyncio.Event(), asyncio.Event()
    asked: list[int] = []

    def records() -> set[str]:
        return {path.name for path in tmp_path.glob("*.jsonl")}

    async def asks(prompt: Prompt, context: EpisodeContext) -> Any:
        """As the endpoint does, whose requests have keys."""
        session = context.chat.session
        if session.turn_of("first") is None:
            place = session.extend([prompt.messages[0].as_dict()])
            completion = await context.policy.sample(place.prompt)
            session.record(place, completion, {"content": "x"}, key="first")
        asked.append(context.policy._requests)
        if len(asked) == 2:
            both_asked.set()
        await going_on.wait()
        return context.chat.finish(1.0)

    dead = asyncio.create_task(runs.runner(asks, files=files).run(TICKET, PROMPT))
    await both_asked.wait()
    assert records() == {"4.0.jsonl", "4.1.jsonl"}
    kept = {name: (tmp_path / name).read_bytes() for name in records()}
    dead.cancel()
    await asyncio.wait([dead])
    assert records() == set()
    for name, content in kept.items():  # as the death of its process leaves it
        (tmp_path / name).write_bytes(content)
    going_on.set()
    group = await runs.group(asks, files=files)
    assert runs.sampler.prompts == []
    assert asked[2:] == asked[:2]
    assert [one.sample_index for one in group.samples] == [0, 1]
    assert records() == set()
    assert await runs.runner(asks, files=files).evaluate(PROMPT, 1) == [1.0]
    assert records() == set()


async def test_an_episode_is_reached_where_its_gateway_serves_its_session(runs: Runs) -> None:
    class Served:
        """Stands where the gateway is."""

        def serve(self, session: Any, policy: Any, parser: Any) -> Any:
            return nullcontext(Endpoint(base_url=session._prompt_id, api_key=policy.name, session_id=str(id(parser))))

    found: list[Endpoint] = []

    async def looks(prompt: Prompt, context: EpisodeContext) -> Any:
        found.append(context.endpoint)
        await context.chat.say(prompt.messages)
        return context.chat.finish(1.0)

    assert isinstance(await runs.group(looks, gateway=Served()), Group)
    assert [(each.base_url, each.api_key) for each in found] == [("q1", "4.0"), ("q1", "4.1")]
    assert {each.session_id for each in found} == {str(id(runs.parser))}
    end = await runs.group(looks)
    assert "set rollout.endpoint={} in the run's settings" in end.why
