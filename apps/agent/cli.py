"""Run a CLI agent as the program of an episode: `agent.command=[python3, apps/agent/cli.py, AGENT, ARGUMENT...]`.

AGENT is claude_code, codex or mini_swe_agent; its own program, which gets the arguments, must be in PATH: `claude`,
`codex` or `mini`. It works on the prompt's messages, contacts nothing but the policy, and its last message is the
answer. This file needs nothing but Python. docs/cli_agents.md names the versions that were tried.
"""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POLICY = "policy"
"""The model's name in requests."""
SIDE = "policy-side"
"""The name in requests beside the agent's own work, such as titles of conversations."""

OTHER_CONTEXT = 128_000
"""Tokens of the context of an API that does not say it."""


@dataclass(frozen=True, kw_only=True)
class Agent:
    """How an agent is started."""

    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """The texts of files in HOME, by their paths there."""
    record: str | None = None
    """The file in HOME that has its answer as `info.submission`; None: its standard output is the answer."""


def claude_code(task: str, base_url: str, context: int, home: Path) -> Agent:
    """Claude Code with tools for files and a shell."""
    return Agent(
        command=("claude", "-p", "--model", POLICY, "--dangerously-skip-permissions", "--tools", CLAUDE_TOOLS),
        variables={
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": SIDE,
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a line of the system prompt that differs between episodes
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_DISABLE_THINKING": "1",  # a budget of tokens; chat.template_args decides
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(context),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(context // 4),
            "DISABLE_AUTOUPDATER": "1",
            "IS_SANDBOX": "1",  # as root it skips permissions only so
        },
    )


CLAUDE_TOOLS = "Bash,Edit,Glob,Grep,Read,Write"


def codex(task: str, base_url: str, context: int, home: Path) -> Agent:
    """Codex with its shell, without its own sandbox."""
    return Agent(
        command=("codex", "exec", "--skip-git-repo-check", "--color", "never", "-"),
        files={".codex/config.toml": CODEX_CONFIG.format(model=POLICY, base_url=base_url, context=context)},
    )


CODEX_CONFIG = """\
model = "{model}"
model_provider = "goaly"
model_context_window = {context}
approval_policy = "never"
sandbox_mode = "danger-full-access"
web_search = "disabled"
check_for_update_on_startup = false
analytics = {{ enabled = false }}
feedback = {{ enabled = false }}
history = {{ persistence = "none" }}
otel = {{ metrics_exporter = "none" }}
skills = {{ bundled = {{ enabled = false }} }}
agents = {{ enabled = false }}

[model_providers.goaly]
name = "goaly"
base_url = "{base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"

[features]
apps = false
goals = false
plugins = false
shell_snapshot = false
view_image = false
"""


def mini_swe_agent(task: str, base_url: str, context: int, home: Path) -> Agent:
    """mini-swe-agent; its answer is what its final command prints."""
    own, record = "task.yaml", "trajectory.json"
    model = ("--model", f"openai/{POLICY}", "--agent-class", "default", "--cost-limit", "0")
    return Agent(
        command=("mini", *model, "--output", str(home / record), "-c", "mini.yaml", "-c", str(home / own)),
        variables={
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
            "MSWEA_SILENT_STARTUP": "1",
        },
        files={own: json.dumps({"run": {"task": task}})},
        record=record,
    )


AGENTS: Mapping[str, Callable[[str, str, int, Path], Agent]] = {
    "claude_code": claude_code,
    "codex": codex,
    "mini_swe_agent": mini_swe_agent,
}


def main(name: str, arguments: Sequence[str]) -> int:
    """Run the agent with this name on the prompt at standard input; its exit code."""
    base_url, home = os.environ["OPENAI_BASE_URL"], Path.home()
    task = text_of(json.load(sys.stdin)["messages"])
    agent = AGENTS[name](task, base_url, most_context(base_url), home)
    for path, text in agent.files.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text)
    ended = subprocess.run(
        [*agent.command, *arguments],
        input=task,
        text=True,
        env={**os.environ, **agent.variables},
        stdout=None if agent.record is None else sys.stderr,
        check=False,
    )
    if ended.returncode == 0 and agent.record is not None:
        print(json.loads((home / agent.record).read_text())["info"]["submission"])
    return ended.returncode


def text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """The messages as one text, which is all that these programs take."""
    parts = [
        [{"text": content}] if isinstance(content := message["content"], str) else content or [] for message in messages
    ]
    return "\n\n".join("".join(part.get("text", "") for part in of_message) for of_message in parts)


def most_context(base_url: str) -> int:
    """The tokens of the policy's context."""
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/models", headers=headers)) as models:
        return json.load(models)["data"][0].get("max_model_len", OTHER_CONTEXT)


if __name__ == "__main__":
    if sys.argv[1:2] == [] or sys.argv[1] not in AGENTS:
        sys.exit(f"usage: python3 {sys.argv[0]} {{{','.join(AGENTS)}}} [ARGUMENT...]")
    sys.exit(main(sys.argv[1], sys.argv[2:]))
