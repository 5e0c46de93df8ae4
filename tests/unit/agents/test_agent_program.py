"""Agents that are programs: they get nothing of goaly but the variables that every client of these APIs reads."""

import asyncio
import json
import os
import select
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent_sessions import TOOLS
from http_sessions import Serve, wrote

from apps.agent.main import episode_of
from goaly.agents import program
from goaly.agents.episode_folder import episode_folder
from goaly.agents.gateway import Endpoint
from goaly.agents.program import ProgramFailed, answer_of_program
from goaly.agents.settings import AgentSettings
from goaly.prompts.prompt import Message, Prompt
from goaly.prompts.settings import ChatSettings

one_loop = pytest.mark.asyncio(loop_scope="module")
PROMPT = Prompt(id="q", source="s", messages=(Message(role="user", content="2+3?"),), answer="5")
OF_OPENAI = """
import json, sys
import openai

client = openai.OpenAI()
said = json.load(sys.stdin)["messages"]
for question in ("sure?", None):
    answer = client.chat.completions.create(model="gpt-4o", messages=said).choices[0].message
    said += [answer.model_dump(exclude_none=True), {"role": "user", "content": question}]
print(answer.content)
"""
OF_ANTHROPIC = """
import json, sys
import anthropic

client = anthropic.Anthropic()
asked = json.load(sys.stdin)
print(client.messages.create(model="claude", max_tokens=64, messages=asked["messages"]).content[-1].text)
"""
WITH_CURL = (
    'curl --silent --fail "$OPENAI_BASE_URL/chat/completions" --header "Authorization: Bearer $OPENAI_API_KEY" '
    "--header 'Content-Type: application/json' --data @-"
)
"""Standard input is a whole request."""


LEAVES = """
import json, os, subprocess, sys
from pathlib import Path

home, asked = Path.home(), json.load(sys.stdin)
assert asked == json.loads((home / "prompt.json").read_text())
assert asked["metadata"] == {"repository": "till"}, asked
assert os.listdir() == [] and os.environ["PWD"] == os.getcwd()
assert Path(os.environ["OLDPWD"], "leaves.py").is_file()
assert not {"CODEX_HOME", "XDG_CONFIG_HOME"} & set(os.environ)
cache = Path(os.environ["TMPDIR"], "cache")
cache.mkdir()
(cache / "module").write_text("")
cache.chmod(0o500)
subprocess.Popen(["setsid", "sleep", "1000"])
Path("till.py").write_text("def add(a, b): return a + b")
print(os.getcwd())
"""
"""A program that does what CLI agents do."""


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


async def answer_of(command: Sequence[str], prompt: Prompt, endpoint: Endpoint) -> str:
    async with episode_folder(endpoint.api_key) as folder:
        return await answer_of_program(command, folder, prompt, endpoint)


@one_loop
async def test_a_program_with_openais_client_is_recorded_turn_by_turn_and_its_output_is_its_answer(
    serve: Serve,
) -> None:
    with serve(wrote("five", "2+3"), wrote(" 5\n", "yes")) as served:
        command = [sys.executable, "-c", OF_OPENAI]
        assert await answer_of(command, PROMPT, served.endpoint) == "5"
        written = [served.policy.decode(prompt) for prompt in served.scripted.prompts]
        assert [len(served.session.turns), "five" in written[1], "sure?" in written[1]] == [2, True, True]


@one_loop
async def test_a_program_with_anthropics_client_gets_its_address_and_no_credentials_of_the_user(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "of the user")
    with serve(wrote("five", "2+3")) as served:
        command = [sys.executable, "-c", OF_ANTHROPIC]
        assert await answer_of(command, PROMPT, served.endpoint) == "five"
        assert len(served.session.turns) == 1


@one_loop
async def test_a_shell_script_passes_its_input_on_as_a_request_with_the_tools_of_the_prompt(serve: Serve) -> None:
    with serve(wrote("five", "2+3")) as served:
        answer = await answer_of(shell(WITH_CURL), replace(PROMPT, tools=TOOLS), served.endpoint)
        assert json.loads(answer)["choices"][0]["message"]["content"].strip() == "five"
        asked = served.policy.decode(served.scripted.prompts[0])
    assert TOOLS[0]["function"]["name"] in asked
    assert "2+3?" in asked


@one_loop
@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 5; echo no model >&2; exit 3", "exit code 3; its standard error ends with:\nno model"),
        ("kill -TERM $$", "signal SIGTERM; its standard error is empty"),
        ("yes 12345 >&2 & sleep 0; kill -KILL $$", "signal SIGKILL"),
    ],
)
async def test_a_program_that_does_not_end_with_0_fails_its_episode_with_the_end_of_what_it_said(
    serve: Serve, script: str, why: str
) -> None:
    with serve() as served, pytest.raises(ProgramFailed) as failed:
        await answer_of(shell(script), PROMPT, served.endpoint)
    assert str(failed.value).startswith(f"the agent sh ended with {why}")
    assert len(str(failed.value)) < 2 * program.MOST_ERROR_BYTES


@one_loop
async def test_a_program_that_cannot_be_started_says_so(serve: Serve) -> None:
    with serve() as served, pytest.raises(ProgramFailed, match=r"exit code 127(.|\n)*cannot start /nowhere/agent"):
        await answer_of(["/nowhere/agent"], PROMPT, served.endpoint)


@one_loop
async def test_a_program_that_writes_without_end_fails(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "MOST_ANSWER_BYTES", 1 << 20)
    with serve() as served, pytest.raises(ProgramFailed, match="wrote more than 1048576 bytes"):
        await answer_of(["yes"], PROMPT, served.endpoint)


@one_loop
async def test_a_program_need_not_read_its_input_nor_wait_for_what_it_started(serve: Serve) -> None:
    long = replace(PROMPT, messages=(Message(role="user", content="x" * (1 << 20)),))
    with serve() as served:
        assert await answer_of(shell("sleep 1000 & echo; echo ' 5 5 '"), long, served.endpoint) == "5 5"


@one_loop
async def test_with_its_episode_end_all_processes_of_a_program_and_their_requests(serve: Serve, tmp_path: Path) -> None:
    """agents-9. The limits of an episode cancel it."""
    with serve() as served:
        served.scripted.go_on = asyncio.Event()
        script = f"setsid sleep 1000 & echo $$ $! > {tmp_path}/pids; {WITH_CURL}; true"
        answering = asyncio.create_task(answer_of(shell(script), PROMPT, served.endpoint))
        await served.scripted.waits.wait()
        descriptors = [os.pidfd_open(int(pid)) for pid in (tmp_path / "pids").read_text().split()]
        answering.cancel()
        await asyncio.wait([answering])
        assert answering.cancelled()
        assert select.select(descriptors, [], [], 0)[0] == descriptors
        await served.scripted.cancelled.wait()
    for descriptor in descriptors:
        os.close(descriptor)


@one_loop
@pytest.mark.parametrize("keep", [None, "kept"])
async def test_a_program_works_in_a_folder_of_its_own_until_its_work_has_been_scored(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str | None
) -> None:
    for name in ("CODEX_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "leaves.py").write_text(LEAVES)
    settings = AgentSettings(command=(sys.executable, "leaves.py"), hidden=("tests",), keep_folders=keep)
    prompt = replace(PROMPT, metadata={"repository": "till", "tests": "hidden"})
    scored: list[Path] = []

    async def score(prompt: Prompt, answer: str) -> float:
        work = Path(prompt.metadata["episode_folder"])
        scored.append(work)
        assert (str(work), prompt.metadata["tests"]) == (answer, "hidden")
        return float((work / "till.py").read_text() == "def add(a, b): return a + b")

    with serve() as served:
        chat = SimpleNamespace(has_reward=False, finish=lambda reward: reward)
        context: Any = SimpleNamespace(endpoint=served.endpoint, chat=chat, reward=score)
        assert await episode_of(settings)(prompt, context) == 1
    (work,) = scored
    assert work.parent.exists() == (keep is not None)
    assert (work.parent.parent == tmp_path / "kept") == (keep is not None)


@one_loop
async def test_an_episode_that_begins_again_has_the_same_empty_folder() -> None:
    async with episode_folder("key") as first:
        (first.work / "left").touch()
        async with episode_folder("key") as again, episode_folder("other") as other:
            assert again.work == first.work != other.work
            assert list(again.work.iterdir()) == []


def test_an_agent_without_a_parser_of_calls_warns_unless_it_asks_through_its_context() -> None:
    program, script = AgentSettings(command=("sh",)), AgentSettings(function="apps.agent.own:episode")
    refused = "chat.tool_parser is null: requests of the agent that have tools will be refused"
    assert program.warning(ChatSettings()) == refused
    assert program.warning(ChatSettings(tool_parser="hermes")) is None
    assert script.warning(ChatSettings()) is None


def test_a_run_names_its_agent_in_one_way_and_a_program_that_exists() -> None:
    either = "set either function, a coroutine function, or command, a program"
    assert AgentSettings().problems("agent.") == [f"agent.function=null: {either}"]
    both = AgentSettings(function="tests.loop.asking_agent:twice", command=("sh",))
    assert both.problems("agent.") == [f"agent.function=tests.loop.asking_agent:twice: {either}"]
    assert AgentSettings(command=("no-such-agent", "x")).problems("agent.") == [
        "agent.command=[no-such-agent, x]: must begin with a program in PATH, or its path; 'no-such-agent' is none"
    ]
    assert AgentSettings(command=("sh",), keep_folders="kept").problems("agent.") == []
    kept = AgentSettings(function="tests.loop.asking_agent:twice", keep_folders="kept")
    assert kept.problems("agent.") == ["agent.keep_folders=kept: has no effect, agent.command is empty"]
    assert episode_of(AgentSettings(function="apps.agent.own:episode")).__name__ == "episode"
