"""The README's section about agents, done as a new user does it: its snippet, its command, in a folder of its own."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from launched import REWARDED, ROOT, SMALL, START_SECONDS, LaunchedRun, as_users_have

from goaly.journal.__main__ import main as journal

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
SECTION = (ROOT / "README.md").read_text().partition("## An agent in ten lines\n")[2].partition("\n## ")[0]
FEW = ["steps=1", *SMALL, "backlog.group_size=2", "generator.max_context=128", "evaluation.prompts=1", REWARDED]
SCRIPT = """
set -e
[ -n "$ANTHROPIC_BASE_URL" ]
curl --silent --fail "$OPENAI_BASE_URL/chat/completions" --header "Authorization: Bearer $OPENAI_API_KEY" \\
    --header 'Content-Type: application/json' --data @- | grep --only-matching '"content":"[^"]*"'
"""


@pytest.fixture
def checkout(tmp_path: Path, tiny_model_folder: Path) -> Path:
    """A folder that looks like a checkout in which `make sft` has run."""
    for name, target in {"configs": ROOT / "configs", "apps": ROOT / "apps", "tests": ROOT / "tests"}.items():
        (tmp_path / name).symlink_to(target)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/sft-tiny").symlink_to(tiny_model_folder)
    return tmp_path


@contextmanager
def shell(command: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A command that a user types in this folder; its processes are gone at the end."""
    started = subprocess.Popen(
        command,
        shell=True,
        cwd=folder,
        env=as_users_have(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield started
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)


def test_the_agent_of_the_readme_is_trained_by_the_command_of_the_readme(checkout: Path) -> None:
    ((file, snippet),) = re.findall(r"```python\n# (my_agent.py)\n(.*?)```", SECTION, re.DOTALL)
    (checkout / file).write_text(snippet)
    assert "    make sft " in SECTION
    (command,) = re.findall(r"^    (\.venv/bin/python .*)$", SECTION, re.MULTILINE)
    with shell(f"{command} {' '.join(FEW)} run_dir=runs/mine", checkout) as run:
        said, _ = run.communicate(timeout=START_SECONDS)
    assert run.returncode == 0, said
    assert journal(["export", str(checkout / "runs/mine")]) == 0
    rollouts = (checkout / "runs/mine/rollouts.jsonl").read_text().splitlines()
    assert len(rollouts) == 4


def test_a_program_is_trained_that_knows_its_address_by_its_environment(
    launch: Callable[..., LaunchedRun], tmp_path: Path
) -> None:
    (tmp_path / "agent.sh").write_text(SCRIPT)
    command = f"agent.command=[sh, {tmp_path}/agent.sh]"
    run = launch(*FEW, "rollout.endpoint={}", command, module="apps.agent.main", config="grpo/tiny.yaml")
    assert run.wait(START_SECONDS) == 0, run.text()
    summary = run.summary()
    assert (summary["policy_version"], summary["trained"], summary["failed"]) == (1, 2, 0), summary["reasons"]
