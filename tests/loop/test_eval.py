"""The evaluation app, on a very small model that knows nothing: the real engine, the real verifier, table and JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from apps.eval.config import EvalConfig, EvalGeneratorSettings
from apps.eval.main import table
from apps.eval.quiet import hushed
from goaly.generate.settings import SamplingSettings
from goaly.models.tiny import TinyModel, write_tiny_model
from goaly.prompts.evaluation import EvalResult

TINY = TinyModel(dim=32, layers=1, heads=2, kv_heads=2, head_dim=32, hidden_dim=32, max_context=128)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A very small model with random weights, laid down as a run's final policy."""
    return write_tiny_model(tmp_path / "run" / "policy", TINY)


@pytest.mark.timeout(240)  # starts vLLM
def test_a_run_folder_is_evaluated_through_the_real_engine(tmp_path: Path, model: Path) -> None:
    overrides = [
        f"path={model.parent}",
        "count=12",
        "samples_per_prompt=2",
        "by=digits",
        "sampling.max_tokens=8",
        "generator.max_context=64",
        "generator.max_running=16",
        "generator.kv_cache_gib=0.05",
        f"output={tmp_path / 'result.json'}",
    ]
    finished = subprocess.run(
        [sys.executable, "-m", "apps.eval.main", *overrides],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stdout.splitlines()[0].split() == ["pass@1", "pass@2", "avg@2", "prompts", "length", "p95", "max"]
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["path"] == str(model)
    overall = written["results"].pop("all")
    assert (overall["prompts"], overall["samples_per_prompt"]) == (12, 2)
    assert overall["lengths"]["longest"] <= 8
    assert overall["pass_at"]["1"] == 0.0, "a model that knows nothing must earn nothing"
    assert sum(result["prompts"] for result in written["results"].values()) == 12


def test_the_table_has_a_row_for_each_result() -> None:
    results = {"all": EvalResult.of([[1.0, 0.0]], lengths=[3, 5]), "digits=2": EvalResult.of([[0.0, 0.0]])}
    head, first, second = table(results).splitlines()
    assert head.split() == ["pass@1", "pass@2", "avg@2", "prompts", "length", "p95", "max"]
    assert first.split() == ["all", "0.500", "1.000", "0.500", "1", "4.0", "5", "5"]
    assert second.split() == ["digits=2", "0.000", "0.000", "0.000", "1"]


def test_settings_that_cannot_work_are_told_together(model: Path) -> None:
    config = EvalConfig(path=str(model / "gone"), count=0, sampling=SamplingSettings(max_tokens=0), dtype="int8")
    assert config.problems("") == [
        "count=0: must be at least 1",
        "dtype=int8: must be float32 or bfloat16",
        f"path={model / 'gone'}: has no config.json, must be a Hugging Face folder",
    ]
    assert EvalGeneratorSettings(tp=2).problems("generator.") == [
        "generator.tp=2: must be 1, an evaluation has one process"
    ]
    assert EvalGeneratorSettings(engine="native").problems("generator.") == []


def test_an_engine_that_fails_to_start_shows_what_it_wrote(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with hushed():
            os.write(2, b"allocating\n")
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        fail()
    with hushed():
        os.write(2, b"starting\n")
    assert capfd.readouterr().err == "allocating\n"
