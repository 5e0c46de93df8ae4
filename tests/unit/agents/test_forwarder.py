"""What agents that are evaluated elsewhere send there, and get from there."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from goaly.agents.forwarder import Forwarder, parameters
from goaly.generate.request import Sampling, seed_of

SAMPLING = Sampling(temperature=0.5, top_p=1.0, top_k=-1, max_tokens=9, stop_token_ids=())
QUESTION: Any = [{"role": "user", "content": "1+2="}]


class Elsewhere:
    """An API that remembers what it was asked, and answers with this."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.answers: list[Response] = []

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        self.asked.append((request.url.path, dict(request.headers), json.loads(body) if body else {}))
        return self.answers.pop(0)


def chat(**usage: int) -> Response:
    message = {"role": "assistant", "content": "3"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    facts = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "usage": usage}
    return JSONResponse({**facts, "choices": [choice]})


@asynccontextmanager
async def forwarding(elsewhere: Elsewhere) -> AsyncIterator[Forwarder]:
    """A forwarder to this API."""
    app = Starlette(routes=[Route("/v1/{path:path}", elsewhere.__call__, methods=["GET", "POST"])])
    forwarder = Forwarder("http://elsewhere/v1/", "real", "secret")
    await forwarder.start()
    await forwarder._client.aclose()
    forwarder._client = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    yield forwarder
    await forwarder.close()


async def test_a_request_gets_the_model_the_key_and_what_its_agent_does_not_name() -> None:
    elsewhere = Elsewhere()
    elsewhere.answers = [chat(completion_tokens=3), chat(completion_tokens=4)]
    async with forwarding(elsewhere) as forwarder:
        with forwarder.serve(SAMPLING, "0/problem") as way:
            async with openai.AsyncOpenAI(base_url=way.base_url, api_key=way.api_key) as client:
                made = await client.chat.completions.create(model="policy", messages=QUESTION)
                await client.chat.completions.create(
                    model="policy", messages=QUESTION, temperature=0, max_completion_tokens=2, seed=5
                )
            assert made.choices[0].message.content == "3"
            assert way.tokens == 7
    (path, headers, first), (_, _, second) = elsewhere.asked
    assert path == "/v1/chat/completions"
    assert headers["authorization"] == "Bearer secret"
    assert way.api_key not in str(elsewhere.asked)
    seed = seed_of("0/problem.0")
    assert first == {
        "model": "real",
        "messages": QUESTION,
        "temperature": 0.5,
        "top_p": 1.0,
        "max_tokens": 9,
        "seed": seed,
    }
    named = {"temperature": 0, "max_completion_tokens": 2, "seed": 5, "top_p": 1.0}
    assert second == {"model": "real", "messages": QUESTION, **named}


async def test_other_apis_get_the_parameters_that_they_know_and_errors_come_back_as_they_are() -> None:
    elsewhere = Elsewhere()
    error = {"type": "error", "error": {"type": "invalid_request_error", "message": "too long"}}
    elsewhere.answers = [JSONResponse(error, 400), JSONResponse({"usage": {"output_tokens": 5}})]
    async with forwarding(elsewhere) as forwarder:
        with forwarder.serve(SAMPLING, "0") as way:
            async with anthropic.AsyncAnthropic(
                base_url=way.base_url.removesuffix("/v1"), api_key=way.api_key
            ) as claude:
                with pytest.raises(anthropic.BadRequestError, match="too long"):
                    await claude.messages.create(model="m", max_tokens=4, messages=QUESTION)
            async with httpx.AsyncClient(headers={"authorization": f"Bearer {way.api_key}"}) as client:
                await client.post(f"{way.base_url}/responses", json={"input": "1+2="})
            assert way.tokens == 5
    (_, of_claude, messages), (_, _, responses) = elsewhere.asked
    assert of_claude["x-api-key"] == "secret"
    assert "anthropic-version" in of_claude
    assert messages == {"model": "real", "max_tokens": 4, "messages": QUESTION, "temperature": 0.5, "top_p": 1.0}
    assert responses == {"model": "real", "input": "1+2=", "temperature": 0.5, "top_p": 1.0, "max_output_tokens": 9}


@pytest.mark.parametrize("body", ["", "{", '{"messages": ' + "[" * 2000 + "]" * 2000 + "}", '{"seed": 1e999}'])
async def test_what_cannot_be_passed_on_is_refused(body: str) -> None:
    elsewhere = Elsewhere()
    async with forwarding(elsewhere) as forwarder:
        with forwarder.serve(SAMPLING, "0") as way:
            async with httpx.AsyncClient(headers={"authorization": f"Bearer {way.api_key}"}) as client:
                refused = await client.post(f"{way.base_url}/chat/completions", content=body)
    assert refused.status_code == 400
    assert "the body must be JSON" in refused.json()["error"]["message"]
    assert elsewhere.asked == []


@pytest.mark.parametrize("usage", ["5", {"output_tokens": "many"}, {"output_tokens": None}, {}])
async def test_a_response_that_does_not_say_how_long_it_is_passes(usage: Any) -> None:
    elsewhere = Elsewhere()
    elsewhere.answers = [JSONResponse({"usage": usage})]
    async with forwarding(elsewhere) as forwarder:
        with forwarder.serve(SAMPLING, "0") as way:
            async with httpx.AsyncClient(headers={"authorization": f"Bearer {way.api_key}"}) as client:
                assert (await client.post(f"{way.base_url}/chat/completions", json={})).json() == {"usage": usage}
            assert way.tokens is None


async def test_a_stream_passes_and_its_length_is_not_known() -> None:
    async def parts() -> AsyncIterator[str]:
        yield "data: 1\n\n"
        yield "data: [DONE]\n\n"

    elsewhere = Elsewhere()
    elsewhere.answers = [StreamingResponse(parts(), media_type="text/event-stream")]
    async with forwarding(elsewhere) as forwarder:
        with forwarder.serve(SAMPLING, "0") as way:
            async with httpx.AsyncClient(headers={"authorization": f"Bearer {way.api_key}"}) as client:
                got = await client.post(f"{way.base_url}/chat/completions", json={"stream": True})
            assert got.text == "data: 1\n\ndata: [DONE]\n\n"
            assert way.tokens is None


async def test_a_key_opens_nothing_after_its_episode() -> None:
    elsewhere = Elsewhere()
    async with forwarding(elsewhere) as forwarder:
        with forwarder.serve(SAMPLING, "0") as way:
            pass
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {way.api_key}"}) as client:
            refused = await client.get(f"{way.base_url}/models")
    assert refused.status_code == 401
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert elsewhere.asked == []


def test_parameters_without_effect_are_not_sent_as_not_every_server_knows_them() -> None:
    changed = Sampling(temperature=0.6, top_p=0.9, top_k=20, min_p=0.0, stop=("a",), stop_token_ids=(3,), seed=4)
    assert parameters(changed, 1) == {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "stop": ["a"],
        "stop_token_ids": [3],
        "seed": 4,
    }
