"""The OpenAPI schema that the endpoint publishes, and thousands of requests that `schemathesis` makes of it.

GOALY_STORM_REQUESTS=10000 sends 10,000 requests, which takes many minutes.
"""

import asyncio
import json
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import count, cycle
from queue import SimpleQueue
from random import Random
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
import requests
import schemathesis
from chat_templates import FAMILIES, chat_of
from http_sessions import Served, serving
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case, GenerationMode

from goaly.agents.answer_parser import AnswerParser
from goaly.agents.client_request import NEUTRAL_REQUEST
from goaly.agents.gateway import Gateway
from goaly.agents.settings import EndpointSettings, SessionSettings
from goaly.prompts.settings import ChatSettings
from goaly.prompts.tokenizer import ChatTokenizer

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
REQUESTS = int(os.environ.get("GOALY_STORM_REQUESTS", "300"))
ROUTES = {
    ("get", "/health"),
    ("get", "/openapi.json"),
    ("get", "/v1/models"),
    ("post", "/sessions/{session_id}/reward"),
    ("post", "/v1/chat/completions"),
    ("post", "/v1/completions"),
    ("post", "/v1/messages"),
    ("post", "/v1/messages/count_tokens"),
    ("post", "/v1/responses"),
}
CLIENTS = 4
"""Requests at the same time."""
REDUCED = 9
"""How often a case is sent with fewer options."""
NEEDED = ("messages", "prompt", "input", "max_tokens", "model")
HANGS_SECONDS = 60.0
"""A request that has no answer by then hangs: some thousand times what it takes."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def endpoint(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    """A gateway, the tokenizer of its policy, and the parser."""
    family = FAMILIES["qwen3"]
    chat = chat_of(family.template, family.stops, tmp_path_factory.mktemp("storm") / "qwen3")
    parser = AnswerParser(chat, ChatSettings(tool_parser="hermes", reasoning_parser="qwen3"))
    await asyncio.to_thread(parser.load)
    gateway = Gateway(EndpointSettings(), 0, str(chat.folder), 4096)
    await gateway.start(parser)
    yield gateway, chat, parser
    await gateway.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def schema(endpoint: tuple[Gateway, ChatTokenizer, AnswerParser]) -> dict[str, Any]:
    """What the gateway publishes, without a key."""
    with serving(*endpoint) as served:
        async with httpx.AsyncClient() as client:
            return (await client.get(f"{served.endpoint.root_url}/openapi.json", timeout=HANGS_SECONDS)).json()


async def test_the_schema_has_each_route_and_no_other(schema: dict[str, Any]) -> None:
    assert {(method, path) for path, methods in schema["paths"].items() for method in methods} == ROUTES
    chat = schema["paths"]["/v1/chat/completions"]["post"]
    (sent,) = chat["requestBody"]["content"].values()
    assert sent["schema"] == {"$ref": "#/components/schemas/ChatCompletionRequest"}
    assert chat["responses"]["200"]["content"].keys() == {"application/json", "text/event-stream"}
    assert {scheme for one in chat["security"] for scheme in one} == {"HTTPBearer", "APIKeyHeader"}
    assert "security" not in schema["paths"]["/health"]["get"]


async def test_the_schema_has_no_parameter_that_is_refused(schema: dict[str, Any]) -> None:
    types = schema["components"]["schemas"]
    assert not types["ChatCompletionRequest"]["properties"].keys() & NEUTRAL_REQUEST.keys()
    assert types["CompletionRequest"]["properties"].keys() & NEUTRAL_REQUEST.keys() == {"prompt"}


@pytest.mark.timeout(max(120, REQUESTS))
async def test_any_request_gets_an_answer_below_500_and_no_session_is_lost(
    endpoint: tuple[Gateway, ChatTokenizer, AnswerParser], schema: dict[str, Any]
) -> None:
    limits = SessionSettings(parallel=16)
    logging.disable(logging.ERROR)  # vLLM's: a traceback for each request that it refuses
    with serving(*endpoint) as idle, serving(*endpoint, limits=limits) as one, serving(*endpoint) as other:
        client = openai.AsyncOpenAI(base_url=idle.endpoint.base_url, api_key=idle.endpoint.api_key)
        said: list[Any] = [{"role": "user", "content": "hi"}]
        first = await client.responses.create(model="m", input=said)
        answered = await asyncio.to_thread(storm, schema, (one, other))
        logging.disable(logging.NOTSET)
        assert sum(answered.values()) >= REQUESTS
        print(*sorted(answered.items()), sep="\n")  # for `pytest -s`
        assert {path for path, _ in answered} == {path for _, path in ROUTES}
        await client.responses.create(model="m", input="go on", previous_response_id=first.id)
        for served in (idle, one, other):
            client = openai.AsyncOpenAI(base_url=served.endpoint.base_url, api_key=served.endpoint.api_key)
            await client.chat.completions.create(model="m", messages=said)
            assert_each_sampled_token_is_trained_once(served)


def storm(schema: dict[str, Any], sessions: tuple[Served, ...]) -> Counter[tuple[str, int]]:
    """Send requests to every route from a few clients at once, with turns of the sessions, and count the answers by
    path and status."""
    answered: Counter[tuple[str, int]] = Counter()
    turn = cycle(sessions)
    clients: SimpleQueue[requests.Session] = SimpleQueue()
    for _ in range(CLIENTS):
        clients.put(requests.Session())

    def send(number: int, path: str, request: dict[str, Any]) -> tuple[str, int]:
        client = clients.get()  # there are as many as threads
        made = client.request(**request, timeout=HANGS_SECONDS)
        clients.put(client)
        assert made.status_code < 500, f"request {number}: {made.text}\n{request}"
        assert not any(map(is_servers_error, made.text.splitlines())), f"request {number}: {made.text}\n{request}"
        return path, made.status_code

    under_way: set[Future[tuple[str, int]]] = set()
    with ThreadPoolExecutor(CLIENTS) as pool:
        for number, (case, random) in enumerate(cases(schema)):
            served = next(turn)
            if "session_id" in case.path_parameters and random.random() < 0.8:
                case.path_parameters["session_id"] = served.endpoint.session_id
            headers = {"authorization": f"Bearer {served.endpoint.api_key}"}
            request = case.as_transport_kwargs(base_url=served.endpoint.root_url, headers=headers)
            under_way.add(pool.submit(send, number, case.operation.path, request))
            if len(under_way) >= 2 * CLIENTS:
                done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                answered.update(one.result() for one in done)
    answered.update(one.result() for one in under_way)
    while not clients.empty():
        clients.get().close()
    return answered


def is_servers_error(line: str) -> bool:
    """Whether this line of a stream, which has status 200, tells an error that is not the client's."""
    if not line.startswith("data: {"):
        return False
    told = json.loads(line.removeprefix("data: "))
    error = told.get("error") or (told if told.get("type") == "error" else {})
    code = error.get("code")
    return error.get("type") in ("api_error", "InternalServerError") or (isinstance(code, int) and code >= 500)


@pytest.mark.parametrize(
    ("told", "is_error"),
    [
        ({"error": {"code": 500, "type": "InternalServerError", "message": ""}}, True),
        ({"type": "error", "error": {"type": "api_error", "message": ""}}, True),
        ({"type": "error", "code": "InternalServerError", "error": {"code": 503}}, True),
        ({"error": {"code": 400, "type": "BadRequestError"}}, False),
        ({"choices": [], "error": None}, False),
    ],
)
async def test_errors_in_streams_are_told_from_refusals(told: dict[str, Any], is_error: bool) -> None:
    assert is_servers_error(f"data: {json.dumps(told)}") is is_error


def cases(schema: dict[str, Any]) -> Iterator[tuple[Case, Random]]:
    """At least so many requests, the same in each run: valid and invalid ones as `schemathesis` makes them, and each
    again with a few of its options, so that more of them are answered (to make one takes 0.2 s)."""
    operations = [found.ok() for found in schemathesis.openapi.from_dict(schema).get_all_operations()]
    strategies = [
        operation.as_strategy(generation_mode=mode)
        for operation in operations
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        if mode is GenerationMode.POSITIVE or operation.body
    ]
    made = 0
    for round in count():
        for strategy in strategies:
            for case in drawn(strategy, min(25, 1 + REQUESTS // 100), round):
                random = Random(made)
                whole = case.body
                yield case, random
                made += 1
                if not isinstance(whole, dict):
                    continue
                others = [key for key in whole if key not in NEEDED]
                for number in range(REDUCED):
                    kept = {*NEEDED, *random.sample(others, min(number, len(others)))}
                    case.body = {key: value for key, value in whole.items() if key in kept}
                    yield case, random
                    made += 1
        if made >= REQUESTS:
            return


def drawn(strategy: Any, examples: int, number: int) -> list[Case]:
    """So many of a strategy's cases."""
    found: list[Case] = []

    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def draw(case: Case) -> None:
        found.append(case)

    draw()
    return found


def assert_each_sampled_token_is_trained_once(served: Served) -> None:
    turns = served.session.turns
    sampled = Counter((int(v), float(p)) for turn in turns for v, p in zip(turn.versions, turn.logprobs, strict=True))
    trained: Counter[tuple[int, float]] = Counter()
    for one in served.session.trajectories(1.0):
        tokens = one.tokens[one.tokens["trained"]]
        trained.update(zip(tokens["sampler_versions"].tolist(), tokens["sampler_logprobs"].tolist(), strict=True))
    assert trained == sampled
    assert set(sampled.values()) == {1}
    assert len(served.scripted.prompts) == len(served.session.turns)
