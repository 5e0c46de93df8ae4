"""What a resumed run may change, who works on its folder, and how often it resumes itself."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from apps.grpo.main import main
from goaly.base.config import RUN_CONFIG, exit_code, load, to_yaml
from goaly.base.errors import ConfigError
from goaly.plan.run_config import RunConfig
from goaly.run.resume import RESTARTS, count_restart, lock


def config(model: Path, *overrides: str) -> RunConfig:
    return load(RunConfig, [f"model.path={model}", "steps=9", *overrides], prog="", description="").config


@pytest.mark.parametrize(
    "changed",
    [
        "steps=20",
        "trainer.optimizer.lr=1e-5",
        "trainer.fsdp=2",
        "generator.replicas=2",
        "rollout.workers=3",
        "hosts.silent_seconds=5",
        "checkpoint.every=1",
        "evaluation.prompts=3",
        "telemetry.trace=false",
        "weights.slots=3",
    ],
)
def test_shape_length_and_learning_rates_may_change(tiny_model_folder: Path, changed: str) -> None:
    assert list(config(tiny_model_folder).refused_changes(config(tiny_model_folder, changed))) == []


def test_the_ranks_of_a_reference_may_change(tiny_model_folder: Path) -> None:
    before = config(tiny_model_folder, "loss.kl_coef=0.1")
    after = replace(before, reference=replace(before.reference, pp=2, fsdp=2, tp=2, cp=2, ep=2, threads=3))
    assert list(before.refused_changes(after)) == []


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (
            "backlog.groups_per_step=3",
            "backlog.groups_per_step=3: must stay 8 in a resumed run, because the logged groups",
        ),
        ("prompts.seed=1", "prompts.seed=1: must stay 0 in a resumed run, because the data position"),
        ("trainer.minibatches=2", "trainer.minibatches=2: must stay 1 in a resumed run, because the rows"),
        ("sampling.max_tokens=7", "sampling.max_tokens=7: must stay 256 in a resumed run, because the logged groups"),
        ("loss.name=gspo", "loss.name=gspo: must stay grpo in a resumed run, because the published versions"),
        (
            "reference.refresh_every=3",
            "reference.refresh_every=3: must stay None in a resumed run, because the annotated",
        ),
        ("trainer.lora={}", "trainer.lora={"),
        ("generator.seed=3", "generator.seed=3: must stay 0 in a resumed run, because the prompts"),
    ],
)
def test_what_the_log_depends_on_may_not_change(tiny_model_folder: Path, changed: str, line: str) -> None:
    before, after = (config(tiny_model_folder, "loss.kl_coef=0.1", *more) for more in ((), (changed,)))
    (problem,) = before.refused_changes(after)
    assert problem.startswith(line)


def test_of_adapters_only_what_is_saved_may_change(tiny_model_folder: Path) -> None:
    before = config(tiny_model_folder, "trainer.lora={rank: 8}")
    (problem,) = before.refused_changes(config(tiny_model_folder, "trainer.lora={rank: 16, save: merged}"))
    assert problem.startswith(
        "trainer.lora.rank=16: must stay 8 in a resumed run, because the checkpoints have adapters"
    )


def test_a_run_folder_is_held_by_one_process_until_it_ends(tmp_path: Path) -> None:  # run-9
    script = (
        "import sys; from pathlib import Path; from goaly.run.resume import lock\n"
        "held = lock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match=f"is in use by process {holder.pid}; end it"):
        lock(tmp_path)
    holder.kill()
    holder.communicate()
    os.close(lock(tmp_path))


def test_a_run_resumes_itself_so_often_without_a_new_version(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RESTARTS, "0@-1")
    settings = config(tiny_model_folder, "checkpoint.restarts=2")
    assert [count_restart(settings, 5) for _ in range(3)] == [True, True, False]
    assert count_restart(settings, 6)  # a new version
    assert [count_restart(settings, version) for version in (5, 6)] == [True, False]
    assert not count_restart(config(tiny_model_folder, "checkpoint.restarts=0"), 7)


@pytest.mark.parametrize("wrong", ["lock", "config.new", "logs", "spans", "metrics.jsonl", "evaluations.jsonl"])
@pytest.mark.parametrize("resumed", [True, False])
def test_a_folder_that_can_not_be_written_is_one_error_before_anything_is_started(
    resumed: bool, wrong: str, tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    if wrong in ("logs", "spans"):
        (run_dir / wrong).write_text("")
    elif wrong == "config.new":
        (run_dir / wrong).symlink_to("/dev/full")
    else:
        (run_dir / wrong).mkdir()
    arguments = [f"model.path={tiny_model_folder}", "steps=9", f"run_dir={run_dir}"]
    if resumed:
        (run_dir / RUN_CONFIG).write_text(to_yaml(config(tiny_model_folder)))
        arguments = ["--resume", str(run_dir)]
    assert exit_code(main, RunConfig, arguments, prog="test", description="") == 2
    _, problem, _ = capsys.readouterr().err.splitlines()
    assert problem.startswith(f"  run_dir={run_dir}: cannot be written: [Errno ")
