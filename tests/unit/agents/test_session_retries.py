"""Sessions of episodes that begin again: an attempt has a key, a session and records of its own."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from test_session_ends import LIMITED, PROMPT, TICKET, Runs, going_on

from goaly.agents.answer_parser import AnswerParser
from goaly.agents.gateway import Endpoint, Gateway
from goaly.agents.session import SessionExhausted
from goaly.agents.session_files import SessionFiles
from goaly.agents.settings import EndpointSettings
from goaly.backlog.events import Dropped
from goaly.environments.protocol import EnvironmentDied
from goaly.prompts.prompt import Prompt
from goaly.prompts.settings import ChatSettings
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.reward.verifier_process import VerifierError
from goaly.rollout.episode import EpisodeContext
from goaly.trajectory import Group

GONE = EnvironmentDied("it was killed")


@pytest.fixture
def runs(chats: dict[str, ChatTokenizer]) -> Runs:
    return Runs(chats["chatml"])


def client(endpoint: Endpoint) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)


def kept_in(folder: Path) -> dict[str, bytes]:
    """The records of sessions, by the names of their files."""
    return {path.name: path.read_bytes() for path in folder.glob("*.jsonl")}


async def test_a_failed_attempts_key_opens_nothing_and_its_request_at_the_endpoint_is_cancelled(
    runs: Runs, tmp_path: Path
) -> None:
    """rollout-5."""
    files = SessionFiles(tmp_path)
    gateway = Gateway(EndpointSettings(), 0, str(runs.chat.folder), 4096, files)
    await gateway.start(AnswerParser(runs.chat, ChatSettings()))
    used: list[Endpoint] = []
    asked: list[asyncio.Task[Any]] = []
    begun_again = asyncio.Event()

    async def asks(prompt: Prompt, context: EpisodeContext) -> Any:
        if context.sample_index == 1:
            await begun_again.wait()
        said: Any = [message.as_dict() for message in prompt.messages]
        used.append(context.endpoint)
        asking = client(context.endpoint).chat.completions.create(model="m", messages=said)
        if len(used) == 1:
            runs.sampler.go_on = asyncio.Event()
            asked.append(asyncio.create_task(asking))
            await runs.sampler.waits.wait()
            raise GONE
        if not begun_again.is_set():
            runs.sampler.go_on = None
            with pytest.raises(openai.AuthenticationError):
                await client(used[0]).chat.completions.create(model="m", messages=said)
            async with httpx.AsyncClient(headers={"authorization": f"Bearer {used[0].api_key}"}) as http:
                url = f"{used[0].root_url}/sessions/own/reward"
                assert (await http.post(url, json={"reward": 9.0})).status_code == 401
            begun_again.set()
        await asking
        return context.chat.finish(1.0)

    try:
        group = await runs.group(asks, gateway=gateway, files=files, episode_retries=1)
        assert isinstance(await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 30), list)
    finally:
        await gateway.close()
    assert isinstance(group, Group), group
    assert runs.sampler.cancelled.is_set()
    assert [one.session_id for one in used] == ["4.0", "4.0.retry1", "4.1"]
    assert len({one.api_key for one in used}) == 3
    assert group.rewards == [1.0, 1.0]
    assert group.counts == {"rollout/episode_retries": 1, "agents/sessions_abandoned": 1}
    assert kept_in(tmp_path) == {}


async def test_the_next_worker_goes_on_with_the_attempt_that_was_under_way(runs: Runs, tmp_path: Path) -> None:
    """agents-7, rollout-5."""
    files, both_asked, over = SessionFiles(tmp_path), asyncio.Event(), asyncio.Event()
    attempts: list[str] = []

    async def asks(prompt: Prompt, context: EpisodeContext) -> Any:
        attempts.append(context.policy.name)
        session = context.chat.session
        if session.turn_of("first") is None:
            place = session.extend([prompt.messages[0].as_dict()])
            session.record(place, await context.policy.sample(place.prompt), {"content": "x"}, key="first")
        if context.policy.name == "4.0":
            raise GONE
        if len(attempts) == 3:
            both_asked.set()
        await over.wait()
        if context.sample_index == 0:
            raise GONE

    dead = asyncio.create_task(runs.runner(asks, files=files, episode_retries=1).run(TICKET, PROMPT))
    await both_asked.wait()
    kept = kept_in(tmp_path)
    assert kept.keys() == {"4.0.retry1.jsonl", "4.1.jsonl"}
    dead.cancel()
    await asyncio.wait([dead])
    for name, content in kept.items():  # as the death of its process leaves it
        (tmp_path / name).write_bytes(content)
    over.set()
    end = await runs.group(asks, files=files, episode_retries=1)
    assert sorted(attempts[3:]) == ["4.0.retry1", "4.1"]
    assert runs.sampler.prompts == []
    assert isinstance(end, Dropped)
    assert end.why == "prompt q1: EnvironmentDied: it was killed", "no retry is left"
    assert kept_in(tmp_path) == {}


async def test_a_verifier_that_failed_in_an_earlier_attempt_does_not_fail_a_truncated_session(runs: Runs) -> None:
    """rollout-4."""
    failures = [VerifierError("it is down")] * 2

    async def score(prompt: Prompt, response: str) -> float:
        raise failures.pop()

    async def goes_on(prompt: Prompt, context: EpisodeContext) -> Any:
        if failures:
            with pytest.raises(VerifierError):
                await context.reward(prompt, "")
            raise GONE
        with pytest.raises(SessionExhausted):
            await going_on(prompt, context)
        raise ValueError("it cannot go on")

    runs.score = score
    group = await runs.group(goes_on, session=LIMITED, episode_retries=2)
    assert isinstance(group, Group), group
    assert {sample.outcome for sample in group.samples} == {"truncated"}
