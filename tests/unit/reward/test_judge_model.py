"""A judge behind a real HTTP endpoint: what it is asked, how its reply is read, and what becomes of its failures."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from goaly.base.config import load
from goaly.base.config.settings import Settings
from goaly.base.errors import ConfigError
from goaly.prompts.prompt import Message, Prompt
from goaly.reward.failures import RewardTimeout, Unscored
from goaly.reward.settings import JudgeSettings, RewardSettings
from goaly.reward.verifier_pool import Judge
from goaly.reward.verifier_process import VerifierError

PROMPT = Prompt(id="q7", source="test", messages=(Message(role="user", content="1+1={response}"),), answer="2")


@dataclass
class Api:
    """An API that says what a test has told it to."""

    url: str = ""
    replies: list[Any] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    waiting: int = 0
    most_waiting: int = 0
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: Request) -> JSONResponse:
        self.asked.append(json.loads(await request.body()))
        self.keys.append(request.headers["authorization"])
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        await self.go_on.wait()
        self.waiting -= 1
        reply = self.replies.pop(0) if self.replies else "1"
        if isinstance(reply, int):
            return JSONResponse({"error": {"message": "no"}}, reply)
        message = {"role": "assistant", "content": reply}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return JSONResponse({"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})


@pytest_asyncio.fixture
async def api() -> AsyncIterator[Api]:
    found = Api()
    found.go_on.set()
    app = Starlette(routes=[Route("/v1/chat/completions", found.answer, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    listener = server.config.bind_socket()
    found.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    yield found
    found.go_on.set()
    server.should_exit = server.force_exit = True
    await serving


async def judged(api: Api, *responses: str, judge: dict[str, Any] | None = None, **settings: Any) -> list[Any]:
    """The scores of these responses, or what they raised."""
    found = Judge(RewardSettings(judge=JudgeSettings(url=api.url, model="wise", **(judge or {})), **settings))
    await found.start()
    try:
        return await asyncio.gather(*(found.score(PROMPT, each) for each in responses), return_exceptions=True)
    finally:
        await found.close()


async def test_a_judge_sees_question_answer_and_response_and_its_last_number_is_the_reward(
    api: Api, monkeypatch: pytest.MonkeyPatch
):
    api.replies = ["Of 10 points it deserves 0.75"]
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    judge = {"key_variable": "JUDGE_KEY", "question": "{question}|{answer}|{response}", "options": {"max_tokens": 9}}
    assert await judged(api, "it is {answer}", judge=judge) == [0.75]
    (asked,) = api.asked
    assert asked["messages"] == [{"role": "user", "content": "1+1={response}|2|it is {answer}"}]
    assert (asked["model"], asked["max_tokens"], api.keys) == ("wise", 9, ["Bearer sesame"])


async def test_a_pattern_and_a_scale_say_how_a_reply_is_read(api: Api):
    api.replies = ["Score: 7 of 10", "no number"]
    first, second = await judged(api, "a", "b", judge={"pattern": r"Score: (\d+)", "scale": 10.0, "parallel": 1})
    assert first == 0.7
    assert isinstance(second, VerifierError)
    assert str(second) == "prompt q7: judge wise: its reply has no score: 'no number'"


async def test_failures_are_zeros_or_errors_as_the_settings_say(api: Api):
    api.replies = [400, "?"]
    zeros = await judged(api, "a", "b", on_error="zero", judge={"parallel": 1})
    assert [(type(zero), zero.cause) for zero in zeros] == [(Unscored, "error")] * 2
    api.replies = [400]
    (error,) = await judged(api, "a")
    assert isinstance(error, VerifierError)
    assert "judge wise: BadRequestError" in str(error)


async def test_a_server_that_fails_once_is_asked_again(api: Api):
    api.replies = [503, "1"]
    assert await judged(api, "a") == [1.0]


async def test_a_slow_judge_exceeds_the_time_limit_which_does_not_count_the_wait_for_a_place(api: Api):
    api.go_on.clear()
    first, second = await judged(api, "a", "b", time_limit_seconds=0.2, on_time_limit="fail", judge={"parallel": 1})
    assert isinstance(first, RewardTimeout)
    assert isinstance(second, RewardTimeout)
    assert len(api.asked) == 2, "each was asked"
    assert api.most_waiting <= 2


async def test_no_more_requests_than_allowed_are_made_at_once(api: Api):
    assert await judged(api, *"abcdefgh", judge={"parallel": 2}) == [1.0] * 8
    assert api.most_waiting <= 2


class Config(Settings):
    reward: RewardSettings = RewardSettings()


def test_settings_of_a_judge_that_cannot_work_are_refused():
    os.environ.pop("NO_KEY", None)
    judge = "reward.judge={url: host, model: m, key_variable: NO_KEY, question: hi, pattern: '('}"
    with pytest.raises(ConfigError) as refused:
        load(Config, [judge, "reward.verifier=my:own"], prog="", description="")
    told = str(refused.value)
    for part in (
        "reward.judge.url=host: must begin with http:// or https://",
        "reward.judge.question: must contain {response}",
        "reward.judge.pattern=(: must be a regular expression",
        "reward.judge.key_variable=NO_KEY: must name an environment variable that is set",
        "reward.verifier=my:own: has no effect",
    ):
        assert part in told
