"""The tiny coding agent from its tasks to its first steps of RL, as `make coding` runs it, with a short warm start."""

import json
from pathlib import Path

import pytest

from tests.loop.launched import ROOT
from tests.program import ended

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


def program(module: str, *arguments: str, below: Path) -> None:
    done = ended(module, *arguments, below=below, seconds=400)
    assert done.returncode == 0, done.stdout + done.stderr


def warm_start(config: str, steps: int, below: Path, *overrides: str) -> None:
    lengths = [f"steps={steps}", f"trainer.schedule.total_steps={steps}"]
    program(
        "apps.sft.main",
        *["--config", str(ROOT / f"configs/sft/{config}.yaml"), f"output={below / config}", *lengths, *overrides],
        below=below,
    )


def test_a_policy_works_in_sandboxes_and_is_trained_on_what_hidden_tests_say(tmp_path: Path):
    data = tmp_path / "data"
    program("apps.coding.tiny", str(data), below=tmp_path)
    warm_start("coding_copying", 1, tmp_path, f"data.files=[{data}/copying.jsonl]", "trainer.schedule.warmup_steps=0")
    warm_start(
        "coding",
        150,
        tmp_path,
        f"data.files=[{data}/demonstrations.jsonl]",
        f"model.path={tmp_path / 'coding_copying'}",
    )
    program(
        "apps.coding.main",
        *["--config", str(ROOT / "configs/coding/tiny.yaml"), "steps=2", "evaluation.prompts=4"],
        *[f"model.path={tmp_path / 'coding'}", f"prompts.files=[{data}/tasks]", f"run_dir={tmp_path / 'run'}"],
        *["hosts.bind={}", "trainer.schedule.total_steps=6"],
        below=tmp_path,
    )
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [step["policy_version"] for step in steps] == [1, 2]
    done = ended("goaly.journal", "show", str(tmp_path / "run"), below=tmp_path, seconds=100)
    assert done.returncode == 0, done.stderr
    assert ">>> bash" in done.stdout  # what it called is noted, and how that was graded
    assert ">>> grade" in done.stdout
