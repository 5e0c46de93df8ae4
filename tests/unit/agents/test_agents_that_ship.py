"""The agents of `apps/agent`, written with real clients and tools of a real MCP server, at the endpoint."""

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from http_sessions import Served, serving

from apps.agent import calculator, own, tasks
from apps.agent.calculator import with_agents, with_openai
from apps.agent.main import by_function, episode
from goaly.agents.answer_parser import AnswerParser
from goaly.agents.chat import Chat
from goaly.agents.gateway import Gateway
from goaly.agents.settings import EndpointSettings
from goaly.models.tiny_model import TinyModel, write_tiny_model
from goaly.prompts.files import read_messages
from goaly.prompts.prompt import Message, Prompt
from goaly.prompts.settings import ChatSettings
from goaly.prompts.supervised import chat_document
from goaly.prompts.tokenizer import ChatTokenizer

one_loop = pytest.mark.asyncio(loop_scope="module")
Serve = Callable[..., AbstractContextManager[Served]]
README = Path(__file__).parents[3] / "README.md"
QUESTION = [{"role": "user", "content": "48+90="}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 48, "b": 90}}</tool_call>'


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """The tokenizer of a tiny model that calls tools."""
    size = TinyModel(dim=16, layers=1, head_dim=8, hidden_dim=16, tools=True)
    return ChatTokenizer(write_tiny_model(tmp_path_factory.mktemp("tools"), size))


@pytest.fixture(scope="module")
def parser(chat: ChatTokenizer) -> AnswerParser:
    """The parser of its tool calls."""
    parser = AnswerParser(chat, ChatSettings(tool_parser="hermes"))
    parser.load()
    return parser


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serve(chat: ChatTokenizer, parser: AnswerParser) -> AsyncIterator[Serve]:
    """Serves sessions of its policy, whose answers a test writes."""
    gateway = Gateway(EndpointSettings(), 0, str(chat.folder), 512)
    await gateway.start(parser)
    yield lambda *texts: serving(gateway, chat, parser, *texts, max_context=512)
    await gateway.close()
    await calculator.SERVER.close()


def address(served: Served) -> dict[str, str]:
    return {"base_url": served.endpoint.base_url, "api_key": served.endpoint.api_key}


@one_loop
@pytest.mark.parametrize("agent", [with_openai, with_agents])
async def test_an_agent_calls_the_tool_and_its_chat_is_one_trajectory(serve: Serve, chat: ChatTokenizer, agent: Any):
    with serve(CALL, "138") as served:
        assert await agent(QUESTION, **address(served)) == "138"
        (trajectory,) = served.session.trajectories(1.0)
        sampled = trajectory.tokens["tokens"][trajectory.tokens["trained"]].tolist()
        assert chat.decode(sampled, False).replace("<|end|>", "|") == f"{CALL}|138|"
        context = chat.decode(trajectory.tokens["tokens"].tolist(), False)
        assert context.startswith("<|system|>add<|end|><|user|>48+90=<|end|><|assistant|><tool_call>")
        assert context.endswith("<|tool|>138<|end|><|assistant|>138<|end|>")


@one_loop
async def test_a_runner_of_the_responses_api_calls_its_tool(serve: Serve, chat: ChatTokenizer):
    import agents

    @agents.function_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    agents.set_tracing_disabled(True)
    with serve(CALL, "138") as served:
        async with openai.AsyncOpenAI(**address(served)) as client:
            model = agents.OpenAIResponsesModel(model="policy", openai_client=client)
            agent = agents.Agent(name="calculator", model=model, tools=[add])
            made = await agents.Runner.run(agent, "48+90=")
        (trajectory,) = served.session.trajectories(1.0)
    assert made.final_output == "138"
    sampled = trajectory.tokens["tokens"][trajectory.tokens["trained"]].tolist()
    assert chat.decode(sampled, False).replace("<|end|>", "|") == f"{CALL}|138|"


@one_loop
async def test_an_agent_that_sends_a_reward_is_not_scored_by_the_verifier(serve: Serve, parser: AnswerParser):
    async def agent(messages: Any, *, base_url: str, api_key: str) -> str:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            made = await client.chat.completions.create(model="policy", messages=messages)
        url = f"{base_url.removesuffix('/v1')}/sessions/own/reward"
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {api_key}"}) as http:
            (await http.post(url, json={"reward": 0.625})).raise_for_status()
        return made.choices[0].message.content or ""

    prompt = Prompt(id="q", source="s", messages=(Message(**QUESTION[0]),), answer="138")
    with serve("138") as served:
        chat = Chat(served.policy, served.session, parser)
        context: Any = SimpleNamespace(chat=chat, endpoint=served.endpoint)
        (trajectory,) = await episode(partial(by_function, agent), prompt, context)
    assert trajectory.reward == 0.625


@one_loop
@pytest.mark.parametrize("agent", [with_openai, with_agents])
async def test_an_agent_survives_calls_that_make_no_sense(serve: Serve, agent: Any):
    for wrong in ('"x"', "1e999", "[" * 65 + "]" * 65):
        with serve(CALL.replace("48", wrong), "0") as served:
            assert await agent(QUESTION, **address(served)) == "0"
    with serve(*[CALL] * 9) as served:
        assert await agent(QUESTION, **address(served)) == ""
        assert len(served.session.turns) == calculator.MOST_TURNS


@one_loop
async def test_the_agent_of_the_readme_answers(serve: Serve):
    (code,) = re.findall(r"```python\n# my_agent.py\n(.*?)```", README.read_text(), re.DOTALL)
    module: dict[str, Any] = {}
    exec(code, module)
    with serve("138") as served:
        assert await module["agent"](QUESTION, **address(served)) == "138"


@one_loop
@pytest.mark.parametrize(("answers", "reward"), [([CALL, "138"], 1.0), ([CALL, CALL, "138"], 0.9), (["0"], 0.0)])
async def test_the_agent_of_one_file_is_rewarded(serve: Serve, parser: AnswerParser, answers: list[str], reward: float):
    prompt = Prompt(id="q", source="s", messages=(Message(**QUESTION[0]),), answer="138")
    with serve(*answers) as served:
        chat = Chat(served.policy, served.session, parser)
        (trajectory,) = await own.episode(prompt, SimpleNamespace(chat=chat))
    assert trajectory.reward == pytest.approx(reward)
    assert len(served.session.turns) == len(answers)


async def test_the_agent_of_one_file_tells_the_policy_that_its_arguments_cannot_be_read():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": ' + "[" * 5000}}
    answers = iter([Message(role="assistant", tool_calls=(call,)), Message(role="assistant", content="138")])
    said = []

    async def say(messages: list[Message], tools: Any) -> Message:
        said[:] = messages
        return next(answers)

    prompt = Prompt(id="q", source="s", messages=(Message(**QUESTION[0]),), answer="138")
    chat = SimpleNamespace(say=say, finish=lambda reward: reward)
    assert await own.episode(prompt, SimpleNamespace(chat=chat)) == 1.0
    assert (said[-1].role, said[-1].tool_call_id) == ("tool", "1")


def test_the_documentation_shows_the_agent_of_one_file():
    source = Path(own.__file__).read_text()
    assert source in (README.parent / "docs/train_your_agent.md").read_text()
    assert len(source.splitlines()) <= 60


@one_loop
async def test_a_tool_server_that_died_is_started_again(serve: Serve):
    first = await calculator.SERVER.url()
    process = calculator.SERVER.process
    assert process is not None
    process.kill()
    await process.wait()
    assert await calculator.SERVER.url() != first
    with serve(CALL, "138") as served:
        assert await with_openai(QUESTION, **address(served)) == "138"


@one_loop
async def test_the_tool_server_ends_with_its_standard_input():
    await calculator.SERVER.url()
    process = calculator.SERVER.process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    assert await process.wait() == 0


def test_demonstrations_call_the_tool_as_the_parser_reads_it(chat: ChatTokenizer):
    seen = set()
    for record in tasks.additions(40, Random(0)):
        messages = read_messages(record, "here")
        document = chat_document(chat, messages, "here", record["tools"])
        text = chat.decode(document.tokens, False)
        answer = str(sum(map(int, messages[0].content.removesuffix("=").split("+"))))  # type: ignore[missing-attribute]
        assert "<|unknown|>" not in text
        called = [json.loads(part.partition("</tool_call>")[0]) for part in text.split("<tool_call>")[1:]]
        assert [sum(call["arguments"].values()) for call in called] == [int(answer)] * len(called)
        seen.add((len(called), messages[-1].content == answer))
    assert seen == {(0, False), (1, False), (1, True)}, "it gives up before and after the call, or answers"


def test_games_end_with_the_number_or_the_last_guess(tmp_path: Path, chat: ChatTokenizer):
    for record in tasks.games(40, Random(0)):
        guesses = [said["content"] for said in record["messages"][1::2]]
        hints = [said["content"] for said in record["messages"][2::2]]
        assert len(guesses) == len(hints) + 1 <= tasks.GUESSES
        low, high = 1, tasks.LARGEST
        for guess, hint in zip(guesses, hints, strict=False):
            low, high = (max(low, int(guess) + 1), high) if hint == ">" else (low, min(high, int(guess) - 1))
        assert low <= high
    tasks.main(tmp_path)
    assert len((tmp_path / "guessing_game.jsonl").read_text().splitlines()) == tasks.LARGEST


def test_an_exact_answer_is_scored_1():
    prompt = Prompt(id="q", source="s", messages=(Message(role="user", content="1+1="),), answer="2")
    assert [tasks.exact(prompt, text) for text in ("2", "02", "")] == [1.0, 0.0, 0.0]
