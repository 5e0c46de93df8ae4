"""`apps.eval` with a coding agent: tasks are tried at an API, and its files say what was resolved, and how."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from scripted_chat import SUBMIT, bash, calls

from apps.eval.config import EvalConfig
from apps.eval.main import main
from goaly.base.config import load
from goaly.base.errors import ConfigError

REPAIR = calls(("edit", {"path": "adder.py", "old": "a * b", "new": "a + b"}))
TOML = """
[task]
problem = "{problem}"
fail_to_pass = ["tests/test_hidden.py::test_sums"]
"""
HIDDEN = "from adder import add\n\n\ndef test_sums():\n    assert add(2, 3) == 5\n"


class Policy(BaseHTTPRequestHandler):
    """An API whose policy looks, then repairs what it is asked to, and submits."""

    def do_GET(self) -> None:
        self._answer({"object": "list", "data": [{"id": "scripted", "object": "model"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = [message for message in asked["messages"] if message["role"] == "assistant"]
        repairs = "repair" in asked["messages"][1]["content"]
        script = [bash("ls"), REPAIR if repairs else bash("true"), SUBMIT]
        choice = {"index": 0, "finish_reason": "tool_calls", "message": script[len(said)].as_dict()}
        self._answer({"id": "1", "object": "chat.completion", "created": 0, "model": "scripted", "choices": [choice]})

    def _answer(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Policy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """One task that the policy solves, and one that it does not."""
    for name, problem in (("good", "repair it"), ("bad", "leave it")):
        folder = tmp_path / "tasks" / name
        (folder / "repository").mkdir(parents=True)
        (folder / "hidden_tests/tests").mkdir(parents=True)
        (folder / "task.toml").write_text(TOML.format(problem=problem))
        (folder / "repository/adder.py").write_text("def add(a, b):\n    return a * b\n")
        (folder / "hidden_tests/tests/test_hidden.py").write_text(HIDDEN)
    return tmp_path / "tasks"


def evaluate(url: str, tasks: Path, samples: int, *overrides: str) -> int:
    reader = "reader: goaly.coding.task_files:read_prompts"
    one = f"evaluation.sets={{own: {{files: [{tasks}], {reader}, samples_per_prompt: {samples}}}}}"
    given = [f"endpoint.url={url}", "coding={}", one, "reward.workers=1", *overrides]
    return main(load(EvalConfig, given, prog="test", description=""))


def lines_of(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_an_evaluation_of_a_coding_agent_says_what_was_resolved(
    url: str, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    files = {name: tmp_path / "out" / f"{name}.jsonl" for name in ("output", "attempts", "predictions")}
    assert evaluate(url, tasks, 2, *(f"{name}={path}" for name, path in files.items())) == 0
    assert "pass@1" in capsys.readouterr().out
    output = json.loads(files["output"].read_text())
    assert output["resolved"] == {"own": ["good"]}
    assert output["rewards"] == {"own": {"bad": [0.0, 0.0], "good": [1.0, 1.0]}}
    attempts = sorted(lines_of(files["attempts"]), key=lambda one: (one["prompt"], one["attempt"]))
    assert [(one["prompt"], one["attempt"], one["reward"]) for one in attempts] == [
        *(("bad", number, 0.0) for number in range(2)),
        *(("good", number, 1.0) for number in range(2)),
    ]
    assert [note.get("tool") or note["kind"] for note in attempts[-1]["notes"]] == [
        *("bash", "edit", "submit", "end", "patch", "grade"),
    ]
    for number in (1, 2):
        file = files["predictions"].with_suffix(f".{number}.jsonl")
        bad, good = sorted(lines_of(file), key=lambda one: one["instance_id"])
        assert (bad["instance_id"], bad["model_patch"]) == ("bad", "")
        assert (good["instance_id"], good["model_name_or_path"]) == ("good", url)
        assert "+    return a + b" in good["model_patch"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["agent.function=apps.agent.own:episode"], "agent: must be null where coding is set"),
        (["coding=null", "predictions=a.jsonl"], "predictions=a.jsonl: has no effect, coding is null (override)"),
        (["coding=null", "attempts=a.jsonl"], "attempts=a.jsonl: has no effect, agent and coding are null (override)"),
        (["coding=null", "sandbox.root=/usr"], "sandbox.root=/usr: has no effect, coding is null (override)"),
    ],
)
def test_settings_that_cannot_work_are_told(url: str, tasks: Path, overrides: list[str], said: str):
    with pytest.raises(ConfigError) as error:
        evaluate(url, tasks, 1, *overrides)
    assert said in error.value.problems
