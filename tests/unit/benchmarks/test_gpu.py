"""The checks of a GPU: how each end of one is reported, and those that a CPU can run."""

import json
import multiprocessing
import os
import select
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from bench import gpu
from bench.gpu import CHECKS, FAILED, NO_GPU, PASSED, Check, Result, run, run_all
from bench.gpu_loop import STEPS, arguments, judged
from goaly.base.config import load
from goaly.plan.run_config import RunConfig
from tests.unit.benchmarks import gpu_checks
from tests.unit.benchmarks.gpu_checks import PID_FILE

pytestmark = pytest.mark.slow


def ends(pid: int) -> bool:
    """Whether a process that was killed has ended, or does so in time."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(watched):
        return bool(select.select([watched], [], [], 30.0)[0])


def check(function: Callable[[], Any], **changes: Any) -> Check:
    return Check(target=f"{gpu_checks.__name__}:{function.__name__}", anywhere=True, **changes)


def test_checks_that_raise_or_die_fail_with_their_last_lines_and_the_next_ones_run() -> None:
    failing = {"raises": check(gpu_checks.raises), "dies": check(gpu_checks.dies)}
    raises, dies, finds = run_all(failing | {"finds": check(gpu_checks.finds)}, on_gpu=False)
    assert raises.status == FAILED
    assert raises.error[-2:] == ["AssertionError: speed is 0, must be at least 1", "its process ended with 1"]
    assert dies.status == FAILED
    assert any("an illegal memory access" in line for line in dies.error)
    assert dies.error[-1] == "its process ended with -6"
    assert (finds.status, finds.numbers, finds.error) == (PASSED, {"speed": 2.5}, [])


def test_a_check_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    child = tmp_path / "child"
    hanging = check(gpu_checks.hangs, seconds=4.0, environment={PID_FILE: str(child)})
    result = run("hangs", hanging)
    assert (result.status, result.error[-1]) == (FAILED, "it took longer than 4 s")
    assert ends(int(child.read_text()))


def test_a_check_whose_hardware_is_missing_is_not_run() -> None:
    (result,) = run_all({"CUDA graphs": CHECKS["CUDA graphs"]}, on_gpu=False)
    assert result == Result(name="CUDA graphs", status=NO_GPU)


@pytest.mark.parametrize(("function", "code"), [(gpu_checks.finds, 0), (gpu_checks.raises, 1)])
def test_the_exit_code_says_whether_a_check_failed_and_the_file_says_which(
    function: Callable[[], Any], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "CHECKS", {"only": check(function)})
    monkeypatch.setattr(gpu, "gpu", lambda: None)
    out = tmp_path / "gpu.json"
    assert gpu.main(["--anywhere", "--json", str(out)]) == code
    written = json.loads(out.read_text())
    assert written["gpu"] is None
    assert [(one["name"], one["status"]) for one in written["checks"]] == [("only", (PASSED, FAILED)[code])]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [([], 2, "bench.gpu: there is no GPU here; --anywhere runs"), (["--anywhere"], 0, "only: passed")],
)
def test_without_a_gpu_the_results_of_gpus_are_not_written(
    arguments: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(gpu, "CHECKS", {"only": check(gpu_checks.finds)})
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "gpu.json")
    monkeypatch.setattr(gpu, "gpu", lambda: None)
    assert gpu.main(arguments) == code
    assert capsys.readouterr().err.startswith(said)
    assert not (tmp_path / "gpu.json").exists()


@pytest.fixture(scope="module")
def in_child() -> Iterator[Callable[[str], dict[str, Any]]]:
    """Call a check in a fork of the server that has imported the libraries."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as child:
        yield lambda name: child.submit(call, CHECKS[name].target).result(timeout=100)


def call(target: str) -> dict[str, Any]:
    module, _, function = target.partition(":")
    return getattr(import_module(module), function)()


@pytest.mark.parametrize("name", ["trainer step", "loss path", "updates"])
def test_the_checks_for_anywhere_pass_on_a_cpu(name: str, in_child: Callable[[str], dict[str, Any]]) -> None:
    assert CHECKS[name].anywhere
    numbers = in_child(name)
    assert numbers
    json.dumps(numbers)


def test_the_checks_exist_and_the_loop_has_a_config_that_works(tmp_path: Path, tiny_model_folder: Path) -> None:
    for one in CHECKS.values():
        module, _, function = one.target.partition(":")
        assert callable(getattr(import_module(module), function))
    config = load(RunConfig, arguments(tiny_model_folder, tmp_path / "run"), prog="", description="").config
    assert config.steps == STEPS


GOOD = {"grad_norm": 1.0, "sampler_kl": 1e-3, "generator/version": STEPS, "run/seconds": 9.0, "reward/mean": 0.5}
GOOD |= {"step/seconds": 0.5, "step/tokens_per_second": 1e4}


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([GOOD] * (STEPS - 1), f"recorded {STEPS - 1} steps"),
        ([GOOD, GOOD | {"grad_norm": 0.0}] + [GOOD] * (STEPS - 2), r"steps \[2\] had no gradient"),
        ([GOOD] * (STEPS - 1) + [GOOD | {"generator/version": 3}], "ended with version 3"),
        ([GOOD | {"sampler_kl": float("nan")}] + [GOOD] * (STEPS - 1), "divergence of sampler and trainer is nan"),
        ([GOOD] * (STEPS - 1) + [GOOD | {"sampler_kl": 0.5}], "divergence of sampler and trainer is 0.5"),
    ],
)
def test_a_run_that_did_not_train_or_whose_sampler_had_other_weights_fails(
    steps: list[dict[str, float]], problem: str
) -> None:
    with pytest.raises(AssertionError, match=problem):
        judged(steps)


def test_a_run_that_trained_gives_its_numbers() -> None:
    assert judged([GOOD] * STEPS)["tokens_per_second"] == 1e4
