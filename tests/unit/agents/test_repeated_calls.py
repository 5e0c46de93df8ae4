"""Requests that are sent again: retries, equal requests, lost answers, refusals, and the ids of responses."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from http_sessions import QUESTION, Scripted, Serve, of_anthropic, of_openai, serving, started, wrote

from goaly.agents import session_files
from goaly.agents.answer_parser import AnswerParser
from goaly.agents.http_session import Ask, Repeats
from goaly.agents.public_gateway import PublicGateway
from goaly.agents.session_files import SessionFiles
from goaly.agents.settings import SessionSettings
from goaly.base.errors import AnswerBroken
from goaly.generate.request import Sampling
from goaly.prompts.settings import ChatSettings
from goaly.prompts.tokenizer import ChatTokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_retry_gets_the_same_answer_and_equal_requests_get_their_own(serve: Serve) -> None:
    with serve() as served:
        headers = {"authorization": f"Bearer {served.endpoint.api_key}"}
        url, body = f"{served.endpoint.base_url}/chat/completions", {"model": "m", "messages": [QUESTION]}
        async with httpx.AsyncClient(headers=headers) as client:
            first = (await client.post(url, json=body)).json()
            equal = (await client.post(url, json=body)).json()
            retry = (await client.post(url, json=body, headers={"x-stainless-retry-count": "1"})).json()
            named = [(await client.post(url, json=body, headers={"idempotency-key": "k"})).json() for _ in range(2)]
            other = await client.post(url, json={**body, "seed": 1}, headers={"idempotency-key": "k"})
        assert first["choices"] != equal["choices"]
        assert (retry["id"], retry["choices"]) == (equal["id"], equal["choices"])
        assert named[0]["choices"] == named[1]["choices"]
        assert other.status_code == 422
        assert len(served.session.turns) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_has_its_request_cancelled_and_its_retry_is_sampled_again(
    serve: Serve, stream: bool
) -> None:
    with serve(wrote("first", "x"), wrote("second", "x")) as served:
        served.scripted.go_on = asyncio.Event()
        url = f"{served.endpoint.base_url}/chat/completions"
        body = {"model": "m", "messages": [QUESTION], "stream": stream}
        headers = {"authorization": f"Bearer {served.endpoint.api_key}"}
        async with httpx.AsyncClient(headers=headers) as client:
            request = asyncio.create_task(client.post(url, json=body))
            await served.scripted.waits.wait()
            request.cancel()
            await served.scripted.cancelled.wait()
            assert served.session.turns == []
            served.scripted.go_on = None
            await client.post(url, json=body)
        (turn,) = served.session.turns
        assert turn.message["content"].strip() == "second"


async def test_a_retry_that_arrives_while_the_answer_is_sampled_gets_it(serve: Serve) -> None:  # agents-6
    with serve(wrote("first", "x"), wrote("second", "x")) as served:
        served.scripted.go_on = asyncio.Event()
        url, body = f"{served.endpoint.base_url}/chat/completions", {"model": "m", "messages": [QUESTION]}
        headers = {"authorization": f"Bearer {served.endpoint.api_key}"}
        async with httpx.AsyncClient(headers=headers) as client, httpx.AsyncClient(headers=headers) as other:
            request = asyncio.create_task(client.post(url, json=body))
            await served.scripted.waits.wait()
            retry = asyncio.create_task(other.post(url, json=body, headers={"x-stainless-retry-count": "1"}))
            (call,) = served.calls()
            while call.waiting < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
            request.cancel()
            while call.waiting > 1:  # noqa: ASYNC110
                await asyncio.sleep(0)
            served.scripted.go_on.set()
            made = (await retry).json()
        assert made["choices"][0]["message"]["content"].strip() == "first"
        assert len(served.session.turns) == len(served.scripted.prompts) == 1


async def test_a_retry_after_an_error_is_sampled_once_though_others_still_wait_for_the_failed_answer(
    serve: Serve,
) -> None:  # agents-6
    with serve(wrote("lost", "x"), wrote("second", "x"), wrote("third", "x")) as served:
        session, call = served._served, served._served.call("chat", b"{}", Repeats())
        ask = Ask(continuation=served.session.extend([QUESTION]), tools=(), given={})

        async def asks_again() -> str:
            with pytest.raises(AnswerBroken):
                await session.answers(call, ask)
            served.scripted.breaks = None
            return (await session.answers(call, ask))[0].message["content"]

        served.scripted.breaks = AnswerBroken("its generator died")
        first = asyncio.create_task(asks_again())
        other = asyncio.create_task(session.answers(call, ask))
        with pytest.raises(AnswerBroken):
            await other
        again = await session.answers(call, ask)
        assert await first == again[0].message["content"]
        assert len(served.session.turns) == 1


async def test_equal_requests_whose_answers_were_lost_get_one_each(
    chats: dict[str, ChatTokenizer], tmp_path: Any
) -> None:
    files, texts = SessionFiles(tmp_path / "sessions"), [wrote("one", "x"), wrote("two", "x")]
    async with started(chats["qwen3"], files) as (gateway, parser):
        with serving(gateway, chats["qwen3"], parser, *texts, files=files) as served:
            made = [await of_openai(served).chat.completions.create(model="m", messages=[QUESTION]) for _ in texts]
        with serving(gateway, chats["qwen3"], parser, files=files) as served:  # as in the next worker
            again = await asyncio.gather(
                *(of_openai(served).chat.completions.create(model="m", messages=[QUESTION]) for _ in texts)
            )
            assert served.scripted.prompts == []
    assert sorted(one.id for one in again) == sorted(one.id for one in made)
    assert len({one.choices[0].message.content for one in again}) == 2


async def test_a_retry_of_a_refused_request_does_not_get_the_answer_of_an_equal_one(serve: Serve) -> None:  # agents-6
    with serve(wrote("one", "x"), wrote("two", "x"), limits=SessionSettings(parallel=1)) as served:
        served.scripted.go_on = asyncio.Event()
        ask = of_openai(served, max_retries=0).chat.completions.create
        first = asyncio.create_task(ask(model="m", messages=[QUESTION]))
        await served.scripted.waits.wait()
        for retries in range(2):
            with pytest.raises(openai.RateLimitError, match="at most 1"):
                await ask(model="m", messages=[QUESTION], extra_headers={"x-stainless-retry-count": str(retries)})
        served.scripted.go_on.set()
        one = await first
        two = await ask(model="m", messages=[QUESTION], extra_headers={"x-stainless-retry-count": "2"})
        assert [one.choices[0].message.content.strip(), two.choices[0].message.content.strip()] == ["one", "two"]
        assert len(served.session.turns) == 2


async def test_a_response_has_the_id_of_its_call_whatever_the_client_calls_its_request(serve: Serve) -> None:
    with serve() as served:
        facts: Any = {"model": "m", "max_tokens": 20, "messages": [QUESTION]}
        claude, headers = of_anthropic(served), {"x-request-id": "mine"}
        message = await claude.messages.create(**facts, extra_headers=headers)
        retry = await claude.messages.create(**facts, extra_headers={**headers, "x-stainless-retry-count": "1"})
        chat = await of_openai(served).chat.completions.create(**facts, extra_headers=headers)
        text = await of_openai(served).completions.create(model="m", prompt="2+3=", extra_headers=headers)
        assert retry.id == message.id
        url = f"{served.endpoint.root_url}/sessions/{served.endpoint.session_id}/reward"
        async with httpx.AsyncClient(headers={"x-api-key": served.endpoint.api_key}) as client:
            for reward, made in enumerate((message, chat, text), start=1):
                sent = await client.post(url, json={"reward": reward, "response_id": made.id})
                assert sent.status_code == 204, sent.text
        assert served.session._credits == [1.0, 2.0, 3.0]


async def test_a_reward_of_several_answers_is_one_record(serve: Serve, tmp_path: Any) -> None:  # agents-7
    files = SessionFiles(tmp_path / "sessions")
    with serve(files=files) as served:
        made = await of_openai(served).chat.completions.create(model="m", messages=[QUESTION], n=2)
        with pytest.raises(openai.NotFoundError):
            await of_openai(served).responses.create(model="m", input="and?", previous_response_id=made.id)
        url = f"{served.endpoint.root_url}/sessions/{served.endpoint.session_id}/reward"
        async with httpx.AsyncClient(headers={"x-api-key": served.endpoint.api_key}) as client:
            await client.post(url, json={"reward": 0.5, "response_id": made.id})
        assert [record["kind"] for record in files.records("7.0")] == ["turn", "turn", "credit"]
        assert served.session._credits == [0.5, 0.5]


async def test_a_session_whose_file_can_not_be_written_goes_on_and_its_file_has_what_came_before(
    serve: Serve, tmp_path: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:  # agents-7
    files = SessionFiles(tmp_path / "sessions")
    with serve(*(wrote(text, "x") for text in ("one", "two", "three")), files=files) as served:
        ask = of_openai(served, max_retries=0).chat.completions.create
        await ask(model="m", messages=[QUESTION])
        with monkeypatch.context() as patched:
            patched.setattr(session_files, "open_lines", lambda path: os.open("/dev/full", os.O_WRONLY))
            await ask(model="m", messages=[QUESTION])
        await ask(model="m", messages=[QUESTION])
        assert len(served.session.turns) == 3
        assert [record["kind"] for record in files.records("7.0")] == ["turn"]
    assert [record.getMessage().partition(": ")[2] for record in caplog.records if "7.0" in record.getMessage()] == [
        "a worker that takes over will not know the records from here on: [Errno 28] No space left on device"
    ]


@asynccontextmanager
async def public(chat: ChatTokenizer, *tokens: str, scripted: Scripted | None = None) -> AsyncIterator[str]:
    """The address of an endpoint outside of training."""
    parser = AnswerParser(chat, ChatSettings())
    gateway = PublicGateway(
        "127.0.0.1",
        0,
        tokens=tokens,
        chat=chat,
        parser=parser,
        sampling=Sampling(max_tokens=100),
        max_context=4096,
        sampler=scripted or Scripted(chat),  # type: ignore[bad-argument-type]
    )
    await gateway.start(parser)
    try:
        yield gateway.url
    finally:
        await gateway.close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost"}, 200),
        ({"host": "[::1]:8000", "origin": "http://localhost:3000"}, 200),
        ({"host": "127.0.0.7:1", "origin": "https://127.0.0.1"}, 200),
        ({"host": "evil.example:8000"}, 403),
        ({"host": "localhost.evil.example"}, 403),
        ({"host": "0.0.0.0:8000"}, 403),
        ({"host": "[::1"}, 403),
        ({"host": ""}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost@evil.example"}, 403),
    ],
)
async def test_without_tokens_no_page_of_another_machine_is_answered(
    chats: dict[str, ChatTokenizer], headers: dict[str, str], status: int
) -> None:
    async with public(chats["chatml"]) as url, httpx.AsyncClient(headers=headers) as client:
        asked = {"model": "m", "messages": [QUESTION]}
        response = await client.post(f"{url}/chat/completions", json=asked)
        assert response.status_code == status
        if status == 403:
            assert "must be 127.0.0.1 or localhost" in response.json()["error"]["message"]
    async with public(chats["chatml"], "secret") as url:
        headers = {"authorization": "Bearer secret", **headers}
        async with httpx.AsyncClient(headers=headers) as client:
            assert (await client.post(f"{url}/chat/completions", json=asked)).status_code == 200


async def test_retries_outside_of_training_get_the_first_answer_and_nobody_elses(
    chats: dict[str, ChatTokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("goaly.agents.public_gateway.KEPT_REQUESTS", 3)

    async def answer(body: dict[str, Any], token: str = "a", path: str = "chat/completions", **headers: str) -> str:
        named = {"authorization": f"Bearer {token}", **{name.replace("_", "-"): at for name, at in headers.items()}}
        made = (await client.post(f"{url}/{path}", json=body, headers=named)).json()
        return (
            made["output"][0]["content"][0]["text"] if path == "responses" else made["choices"][0]["message"]["content"]
        )

    question = {"model": "m", "messages": [QUESTION]}
    retry: dict[str, str] = {"x_stainless_retry_count": "1"}
    async with public(chats["chatml"], "a", "b") as url, httpx.AsyncClient() as client:
        assert [await answer(question) for _ in range(2)] == ["answer 1", "answer 2"]
        assert await answer(question, **retry) == "answer 2"
        assert await answer(question, "b", **retry) == "answer 3"
        named = [await answer(question, idempotency_key="k") for _ in range(2)]
        assert named == ["answer 4", "answer 4"]
        asked = {"model": "m", "input": "hi"}
        assert await answer(asked, path="responses") == "answer 5"
        assert await answer(asked, path="responses", **retry) == "answer 5"
        assert await answer(question, **retry) == "answer 6", "it was one of the last three no more"


async def test_equal_requests_of_clients_that_share_a_key_have_ids_of_their_own_and_continue_their_own_answers(
    chats: dict[str, ChatTokenizer],
) -> None:
    scripted, client_of = Scripted(chats["chatml"], "red", "blue"), partial(openai.AsyncOpenAI, api_key="x")
    async with public(chats["chatml"], scripted=scripted) as url, client_of(base_url=url) as client:
        made = [await client.responses.create(model="m", input="hi") for _ in range(2)]
        retry = await client.responses.create(model="m", input="hi", extra_headers={"x-stainless-retry-count": "1"})
        assert [one.output_text for one in (*made, retry)] == ["red", "blue", "blue"]
        assert made[0].id != made[1].id == retry.id
        for one in made:
            await client.responses.create(model="m", input="go on", previous_response_id=one.id)
            seen = chats["chatml"].decode(scripted.prompts[-1], skip_special_tokens=False)
            assert [colour for colour in ("red", "blue") if colour in seen] == [one.output_text]
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="m", input="go on", previous_response_id=f"{made[0].id}x")


async def test_a_client_cannot_continue_the_response_of_another_token(chats: dict[str, ChatTokenizer]) -> None:
    async with public(chats["chatml"], "a", "b") as url:
        one, other = (openai.AsyncOpenAI(base_url=url, api_key=token) for token in "ab")
        made = await one.responses.create(model="m", input="hi")
        with pytest.raises(openai.NotFoundError):
            await other.responses.create(model="m", input="go on", previous_response_id=made.id)
        await one.responses.create(model="m", input="go on", previous_response_id=made.id)


@pytest.mark.parametrize("key", [None, "k"])
async def test_equal_requests_in_two_episodes_have_ids_of_their_own(serve: Serve, key: str | None) -> None:
    made: list[Any] = []
    for _ in range(2):
        with serve() as served:
            headers = [{} if key is None else {"idempotency-key": f"{key}{number}"} for number in range(3)]
            asked: Any = {"model": "m", "max_tokens": 20, "messages": [QUESTION]}
            made += [
                await of_openai(served).chat.completions.create(**asked, extra_headers=headers[0]),
                await of_openai(served).responses.create(model="m", input="hi", extra_headers=headers[1]),
                await of_anthropic(served).messages.create(**asked, extra_headers=headers[2]),
            ]
    assert len({answer.id for answer in made}) == 6
