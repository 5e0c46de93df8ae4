"""The evaluation app, on a very small model that knows nothing: the real engine, the real verifier, table and JSON."""

import json
import os
from pathlib import Path

import pytest

from apps.eval.config import EvalConfig, EvalGeneratorSettings
from apps.eval.main import table
from apps.eval.quiet import hushed
from goaly.models.tiny_model import TinyModel, write_tiny_model
from goaly.reward.settings import RewardSettings
from goaly.rollout.evaluation import EvalResult
from goaly.rollout.evaluation_settings import EvaluationSet, EvaluationSettings
from tests.program import ended

TINY = TinyModel(dim=32, layers=1, heads=2, kv_heads=2, head_dim=32, hidden_dim=32, max_context=128)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A very small model with random weights, laid down as a run's final policy."""
    return write_tiny_model(tmp_path / "run" / "policy", TINY)


@pytest.mark.timeout(400)  # starts vLLM
def test_a_run_folder_is_evaluated_through_the_real_engine(tmp_path: Path, model: Path) -> None:
    given = tmp_path / "given.jsonl"
    given.write_text('{"prompt": "1+1=", "answer": 2}\n{"prompt": "1+1=", "answer": 2}\n{"prompt": "2+2="}\n')
    overrides = [
        f"path={model.parent}",
        "prompts.arithmetic.max_digits=3",
        f"evaluation.sets={{held_out: {{prompts: 12, samples_per_prompt: 2}}, given: {{files: [{given}], "
        "samples_per_prompt: 3, pass_at: [3], sampling: {temperature: 0.5, max_tokens: 4}, "
        "verifier: 'tests.loop.verifiers:always_right'}}",
        "by=digits",
        "sampling.max_tokens=8",
        "generator.max_context=64",
        "generator.max_running=16",
        "generator.kv_cache_gib=0.05",
        f"output={tmp_path / 'result.json'}",
    ]
    finished = ended("apps.eval.main", *overrides, below=tmp_path, seconds=220)
    assert finished.returncode == 0, finished.stderr[-3000:]
    head = ["pass@1", "pass@2", "pass@3", "avg@2", "avg@3", "prompts", "length", "p95", "max"]
    assert finished.stdout.splitlines()[0].split() == head
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["path"] == str(model)
    own = written["results"].pop("given")
    assert (own["prompts"], own["samples_per_prompt"], own["pass_at"]) == (2, 3, {"1": 1.0, "3": 1.0})
    assert own["lengths"]["longest"] <= 4
    overall = written["results"].pop("held_out")
    assert (overall["prompts"], overall["samples_per_prompt"]) == (12, 2)
    assert overall["lengths"]["longest"] <= 8
    assert overall["pass_at"]["1"] == 0.0, "a model that knows nothing must earn nothing"
    parts = {name: result["prompts"] for name, result in written["results"].items()}
    assert parts.pop("given digits=") == 2
    assert sum(parts.values()) == 12


def test_the_table_has_a_row_for_each_result() -> None:
    results = {"all": EvalResult.of([[1.0, 0.0]], lengths=[3, 5]), "digits=2": EvalResult.of([[0.0, 0.0]])}
    head, first, second = table(results).splitlines()
    assert head.split() == ["pass@1", "pass@2", "avg@2", "prompts", "length", "p95", "max"]
    assert first.split() == ["all", "0.500", "1.000", "0.500", "1", "4.0", "5", "5"]
    assert second.split() == ["digits=2", "0.000", "0.000", "0.000", "1"]


def test_settings_that_cannot_work_are_told_together(model: Path) -> None:
    sums = EvaluationSet(task="arithmetic", prompts=3, sampling={"temperature": -1.0, "max_tokens": 1024})
    evaluation = EvaluationSettings(sets={"sums": sums})
    config = EvalConfig(path=str(model / "gone"), evaluation=evaluation)
    assert config.problems("") == [
        "evaluation.sets.sums.sampling.temperature=-1.0: must be 0 (greedy), or at least 0.01 and at most 2.0",
        f"path={model / 'gone'}: has no config.json, must be a Hugging Face folder",
    ]
    assert EvalGeneratorSettings(tp=2).problems("generator.") == [
        "generator.tp=2: must be 1, an evaluation has one process"
    ]
    assert EvalGeneratorSettings(on_update="keep", start_minutes=5.0).problems("generator.") == [
        "generator.start_minutes=5.0: has no effect, an evaluation has no other process to wait for",
        "generator.on_update=keep: has no effect, the weights never change",
    ]
    generator = EvalGeneratorSettings(max_context=TINY.max_context)
    on_hub = EvalConfig(path=str(model), reward=RewardSettings(placement="hub"), generator=generator)
    assert on_hub.problems("") == ["reward.placement=hub: has no effect, an evaluation has one process"]
    periodic = EvalConfig(path=str(model), evaluation=EvaluationSettings(every=2), generator=generator)
    assert periodic.problems("") == ["evaluation.every=2: has no effect, nothing is trained here"]
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
