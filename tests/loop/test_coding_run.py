"""A run of a coding agent: a policy that knows one repair by heart works in sandboxes, and hidden tests grade it."""

import os
import string
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launched import START_SECONDS, LaunchedRun

from goaly.journal.__main__ import main as journal
from goaly.models.tiny_model import TinyModel
from tests.loop.conftest import launching
from tests.loop.memorized import memorize

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROBLEM = "add(2, 3) is 6"
REPAIR = "```bash\nsed -i s/*/+/ adder.py; cat adder.py\n```"
SUBMIT = "```bash\nsubmit\n```"
TOML = '[task]\nproblem = "{}"\nfail_to_pass = ["tests/test_hidden.py::test_sums"]\n'
SOURCE = "def add(a, b): return a {} b\n"
HIDDEN = "from adder import add\n\n\ndef test_sums():\n    assert add(2, 3) == 5\n"


@pytest.fixture
def launch_coder(tmp_path: Path) -> Iterator[Callable[..., LaunchedRun]]:
    """Starts runs of a policy that repairs one task, and now and then does something else."""
    said = [("user", PROBLEM), ("assistant", REPAIR), ("user", SOURCE.format("+")), ("assistant", SUBMIT)]
    size = TinyModel(
        dim=64,
        layers=2,
        heads=2,
        kv_heads=1,
        hidden_dim=128,
        max_context=1024,
        characters=string.printable[:95] + "\n",
    )
    memorize(tmp_path / "model", size, [{"messages": [{"role": role, "content": text} for role, text in said]}])
    with launching(tmp_path, tmp_path / "model") as start:
        yield start


def write_task(folder: Path) -> Path:
    for name, text in {
        "task.toml": TOML.format(PROBLEM),
        "repository/adder.py": SOURCE.format("*"),
        "hidden_tests/tests/test_hidden.py": HIDDEN,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_coding_agent_is_trained_on_grades_and_all_that_it_did_is_in_the_log(
    launch_coder: Callable[..., LaunchedRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained, asked = (write_task(tmp_path / f"{name}-{os.getpid()}") for name in ("trained", "asked"))
    reader = "goaly.coding.task_files:read_prompts"
    overrides = [
        "steps=2",
        "prompts.task=null",
        f"prompts.files=[{trained}]",
        f"prompts.reader={reader}",
        "prompts.held_out_fraction=0",
        "evaluation.prompts=256",
        f"evaluation.sets={{task: {{files: [{asked}], reader: {reader!r}}}}}",
        "coding.agent=text",
        "coding.instructions=''",
        "coding.turns=3",
        "backlog.row_length=1024",
        "generator.max_context=1024",
        "sampling.max_tokens=64",
    ]
    run = launch_coder(*overrides, module="apps.coding.main")
    assert run.wait(START_SECONDS) == 0, run.text()
    assert run.summary()["reasons"] == {}
    capsys.readouterr()
    assert journal(["list", str(run.folder), "--limit", "0"]) == 0
    listed = [line.split() for line in capsys.readouterr().out.splitlines()[1:-1]]
    solved = [line[0] for line in listed if line[5] == "1"]
    assert solved
    assert journal(["show", str(run.folder), "--episode", solved[0]]) == 0
    shown = capsys.readouterr().out
    for part in (">>> bash | exit code 0 | ", "sed -i s/*/+/ adder.py", "adder.py +1 -1", ">>> end | how submitted"):
        assert part in shown
    assert "tests/test_hidden.py::test_sums passed" in shown
    assert journal(["show", str(run.folder), "--episode", solved[0], "--patch"]) == 0
    assert "+def add(a, b): return a + b\n" in capsys.readouterr().out
    left = subprocess.run([sys.executable, "-m", "goaly.sandboxes", "list"], capture_output=True, text=True, check=True)
    assert not any(task.name in left.stdout for task in (trained, asked))
