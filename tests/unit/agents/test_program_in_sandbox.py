"""An agent that is a program inside a sandbox: it reaches the policy with this episode's key, and nothing else."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from chat_templates import FAMILIES, chat_of
from http_sessions import Serve, Served, serving, started, wrote

from goaly.agents.program import ProgramFailed
from goaly.agents.settings import SessionSettings
from goaly.coding.agent import End
from goaly.coding.program_agent import by_program
from goaly.coding.settings import CodingSettings
from goaly.prompts.prompt import Message, Prompt
from goaly.sandboxes.contract import USERS_FOLDERS, Limits, SandboxSpec
from goaly.sandboxes.namespaces import NamespaceHost
from goaly.sandboxes.sandbox import Sandbox

one_loop = pytest.mark.asyncio(loop_scope="module")
pytestmark = one_loop
ROOT = Path(__file__).parents[3]
WORKDIR = "/tmp/work"
LONG = 60_000
PROMPT = Prompt(
    id="q1",
    source="s",
    messages=(Message(role="user", content="Write the answer."),),
    metadata={"coding_task": "/hidden/place", "repo": "till"},
)
ASKS = """
import json, os, sys, urllib.error, urllib.request
given = json.load(sys.stdin)
def ask(key, path="/chat/completions"):
    body = json.dumps({"model": "policy", "messages": given["messages"]}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host() -> AsyncIterator[NamespaceHost]:
    opened = await NamespaceHost.open()
    yield opened
    await opened.close()


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(host: NamespaceHost) -> AsyncIterator[Sandbox]:
    limits = Limits(memory_mib=1024, disk_mib=128, files=5000, processes=128)
    started = await host.start(SandboxSpec(limits=limits))
    await started.run(["mkdir", WORKDIR])
    yield started
    await started.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serve_long(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serve]:
    """Serves sessions whose context holds the long first prompts of CLI agents."""
    folder = tmp_path_factory.mktemp("long") / "qwen3"
    chat = chat_of(FAMILIES["qwen3"].template, FAMILIES["qwen3"].stops, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": LONG}))
    async with started(chat, max_context=LONG) as (gateway, parser):
        yield lambda *texts: serving(gateway, chat, parser, *texts, max_context=LONG)


class Notes:
    """The chat of the episode, as far as a program's episode uses it."""

    def __init__(self, served: Served):
        self._session = served.session
        self.note, self.mark, self.marks = served.session.note, served.session.mark, served.session.marks

    @property
    def was_exhausted(self) -> bool:
        return self._session.exhausted


async def run(served: Served, sandbox: Sandbox, *command: str, prompt: Prompt = PROMPT) -> End:
    settings = CodingSettings(agent="program", command=command)
    chat: Any = Notes(served)
    async with asyncio.timeout(60):
        held: Any = SimpleNamespace(sandbox=sandbox)
        return await by_program(prompt, served.endpoint, held, WORKDIR, settings, chat)


async def run_python(served: Served, sandbox: Sandbox, code: str) -> End:
    return await run(served, sandbox, "python3", "-c", ASKS + code)


async def test_the_policys_answers_to_a_program_are_recorded_and_its_files_stay(serve: Serve, sandbox: Sandbox):
    with serve(wrote("five", "I see.")) as served:
        code = "open('answer', 'w').write(ask(os.environ['OPENAI_API_KEY']).strip()); print(given['metadata'])"
        assert await run_python(served, sandbox, code) is End.SUBMITTED
        (turn,) = served.session.turns
        assert turn.trained
        assert await sandbox.read(f"{WORKDIR}/answer") == b"five"
        (note,) = served.session.notes
        assert (note["kind"], note["exit_code"], note["output"]) == ("program", 0, "{'repo': 'till'}\n")


async def test_a_program_has_a_home_with_the_prompt_and_the_addresses_of_both_apis(serve: Serve, sandbox: Sandbox):
    with serve() as served:
        code = """
from pathlib import Path
print(json.loads((Path.home() / "prompt.json").read_text()) == given)
print(os.getcwd(), *(os.environ[name] for name in ("TMPDIR", "OPENAI_BASE_URL", "ANTHROPIC_BASE_URL")))
"""
        await run_python(served, sandbox, code)
        expected = f"True\n{WORKDIR} /tmp/agent/tmp http://127.0.0.1:8080/v1 http://127.0.0.1:8080\n"
        assert served.session.notes[0]["output"] == expected


async def test_no_other_key_and_no_other_address_is_served(serve: Serve, sandbox: Sandbox):
    with serve() as served, serve() as other:
        code = f"""
import socket
for key in ("{other.endpoint.api_key}x", "none"):
    try: ask(key)
    except urllib.error.HTTPError as error: print(error.code)
for address in (("127.0.0.1", {served.endpoint.base_url.rpartition(":")[2].partition("/")[0]}), ("1.1.1.1", 80)):
    try: socket.create_connection(address, 1)
    except OSError: print("unreachable")
"""
        await run_python(served, sandbox, code)
        assert served.session.notes[0]["output"] == "401\n401\nunreachable\nunreachable\n"
        assert served.session.turns == []


async def test_a_program_that_fails_is_an_error_with_the_end_of_its_own(serve: Serve, sandbox: Sandbox):
    with serve() as served, pytest.raises(ProgramFailed, match=r"exit code 3; .* ends with:\nwhat it says"):
        await run(served, sandbox, "sh", "-c", "echo what it says >&2; exit 3")


async def test_a_program_that_a_limit_of_the_session_ends_is_graded_as_it_stands(serve: Serve, sandbox: Sandbox):
    with serve(limits=SessionSettings(turns=1)) as served:
        assert await run_python(served, sandbox, "[ask(os.environ['OPENAI_API_KEY']) for _ in 'ab']") is End.TURNS


async def test_a_program_that_is_cancelled_ends_with_its_own_programs(serve: Serve, sandbox: Sandbox):
    with serve() as served:
        await sandbox.run(["mkfifo", "begun"], cwd=WORKDIR)
        running = asyncio.create_task(run(served, sandbox, "sh", "-c", "sleep 1000 & echo > begun; sleep 1001"))
        await sandbox.run(["cat", "begun"], cwd=WORKDIR)
        running.cancel()
        await asyncio.wait([running])
        assert "sleep" not in (await sandbox.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout.text()


def program_in_path(name: str) -> str:
    """The program, if a sandbox of this host's files sees it."""
    found = shutil.which(name)
    if found is None or found.startswith(USERS_FOLDERS):
        pytest.skip(f"needs {name} in PATH, in a folder that sandboxes see; docs/cli_agents.md says how to install it")
    return str(Path(found).parent)


def call(command: str, tool: str = "bash", argument: str = "command") -> str:
    arguments = f'{{"{argument}": "{command}"}}'
    return wrote("", "I see.", {"id": "", "type": "function", "function": {"name": tool, "arguments": arguments}})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "program", "answers"),
    [
        (
            "mini_swe_agent",
            "mini",
            [call("echo five > answer"), call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")],
        ),
        ("codex", "codex", [call("echo five > answer", "exec_command", "cmd"), wrote("Done.", "I see.")]),
    ],
)
async def test_a_cli_agent_works_inside(
    serve_long: Serve, sandbox: Sandbox, agent: str, program: str, answers: list[str]
):
    folder = program_in_path(program)
    command = ("env", f"PATH={folder}:/usr/local/bin:/usr/bin:/bin", "python3", str(ROOT / "apps/agent/cli.py"), agent)
    with serve_long(*answers) as served:
        assert await run(served, sandbox, *command) is End.SUBMITTED
        assert await sandbox.read(f"{WORKDIR}/answer") == b"five\n"
        assert [turn.trained for turn in served.session.turns] == [True] * len(answers)
        assert len(served.session.trajectories(1.0)) == 1
