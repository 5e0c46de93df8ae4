"""The wrappers of CLI agents: what they start, with which variables and files, without the agents themselves."""

import json
import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from http_sessions import Serve

from goaly.agents.episode_folder import episode_folder
from goaly.agents.program import ProgramFailed, answer_of_program
from goaly.prompts.prompt import Message, Prompt

ROOT = Path(__file__).parents[3]
SAID = (Message(role="system", content="Be brief."), Message(role="user", content=[{"type": "text", "text": "2+3?"}]))
PROMPT = Prompt(id="q", source="s", messages=SAID, metadata={"repository": "till"})
TASK = "Be brief.\n\n2+3?"
STAND_IN = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path

arguments, home = sys.argv[1:], Path.home()
if "--output" in arguments:
    record = {{"info": {{"submission": "5"}}}}
    Path(arguments[arguments.index("--output") + 1]).write_text(json.dumps(record))
files = {{str(path.relative_to(home)): path.read_text() for path in home.rglob("*.*ml")}}
started = {{"arguments": arguments, "variables": dict(os.environ), "input": sys.stdin.read(), "files": files}}
(home / "started.json").write_text(json.dumps(started))
print("5" if "--output" not in arguments else "much else")
sys.exit(3 if "--fail" in arguments else 0)
"""
"""In place of an agent's program: it writes what it got into its HOME."""
CLAUDE = ["-p", "--model", "policy", "--dangerously-skip-permissions", "--tools", "Bash,Edit,Glob,Grep,Read,Write"]
CODEX = ["exec", "--skip-git-repo-check", "--color", "never", "-"]
MINI = [
    "--model",
    "openai/policy",
    "--agent-class",
    "default",
    "--cost-limit",
    "0",
    "--output",
    "{home}/trajectory.json",
]
one_loop = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("claude", "codex", "mini"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", "/nowhere")


async def started(serve: Serve, *arguments: str) -> tuple[str, Mapping[str, Any], str]:
    """The answer, what the program got, and its HOME."""
    with serve(max_context=2048) as served:
        async with episode_folder(served.endpoint.api_key) as folder:
            command = [sys.executable, "-I", "-S", str(ROOT / "apps/agent/cli.py"), *arguments]  # without any package
            answer = await answer_of_program(command, folder, PROMPT, served.endpoint)
            return answer, json.loads((folder.home / "started.json").read_text()), str(folder.home)


@one_loop
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("claude_code", CLAUDE, TASK),
        ("codex", CODEX, TASK),
        ("mini_swe_agent", [*MINI, "-c", "mini.yaml", "-c", "{home}/task.yaml"], TASK),
    ],
)
async def test_an_agent_gets_its_task_its_flags_and_those_of_the_user_and_its_answer_is_the_programs(
    serve: Serve, name: str, arguments: list[str], said: str
) -> None:
    answer, got, home = await started(serve, name, "--own", "flag")
    assert answer == "5"
    assert got["arguments"] == [*(one.format(home=home) for one in arguments), "--own", "flag"]
    assert got["input"] == said
    assert got["variables"]["HOME"] == home


@one_loop
@pytest.mark.usefixtures("stand_ins")
async def test_agents_know_the_policys_context_and_contact_nothing_else(serve: Serve) -> None:
    _, claude, _ = await started(serve, "claude_code")
    for name, value in {
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "policy-side",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_DISABLE_THINKING": "1",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "2048",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "512",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
    }.items():
        assert claude["variables"][name] == value
    _, codex, _ = await started(serve, "codex")
    assert tomllib.loads(codex["files"][".codex/config.toml"]) == {
        "model": "policy",
        "model_provider": "goaly",
        "model_context_window": 2048,
        "approval_policy": "never",
        "sandbox_mode": "danger-full-access",
        "web_search": "disabled",
        "check_for_update_on_startup": False,
        "agents": {"enabled": False},
        "analytics": {"enabled": False},
        "feedback": {"enabled": False},
        "history": {"persistence": "none"},
        "otel": {"metrics_exporter": "none"},
        "skills": {"bundled": {"enabled": False}},
        "model_providers": {
            "goaly": {
                "name": "goaly",
                "base_url": codex["variables"]["OPENAI_BASE_URL"],
                "env_key": "OPENAI_API_KEY",
                "wire_api": "responses",
            }
        },
        "features": dict.fromkeys(("apps", "goals", "plugins", "shell_snapshot", "view_image"), False),
    }
    _, mini, _ = await started(serve, "mini_swe_agent")
    assert json.loads(mini["files"]["task.yaml"]) == {"run": {"task": TASK}}
    for name, value in {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
        "MSWEA_SILENT_STARTUP": "1",
    }.items():
        assert mini["variables"][name] == value


@one_loop
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("arguments", "why"),
    [(("codex", "--fail"), "exit code 3"), (("cursor",), r"usage: .*\{claude_code,codex,mini_swe")],
)
async def test_an_agent_that_fails_or_is_unknown_fails_its_episode(
    serve: Serve, arguments: tuple[str, ...], why: str
) -> None:
    with pytest.raises(ProgramFailed, match=why):
        await started(serve, *arguments)
