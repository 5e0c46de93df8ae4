"""Weights & Biases gets what `metrics.jsonl` gets, and its failures cost nothing but its own records."""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest
from wandb_file import history, offline_files, records

from goaly.base.telemetry import weights_and_biases
from goaly.base.telemetry.metrics import MetricsWriter
from goaly.base.telemetry.settings import TelemetrySettings, WandbSettings
from goaly.base.telemetry.weights_and_biases import WandbRun

OFFLINE = TelemetrySettings(tensorboard=False, wandb=WandbSettings(project="sums", mode="offline"))


def written(run_dir: Path) -> list[Path]:
    """W&B's files, once its process has written the end of each: it closes them after `finish` has returned."""
    deadline = time.monotonic() + 60
    while not all(any(record.HasField("exit") for record in records(file)) for file in offline_files(run_dir)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return offline_files(run_dir)


def test_metrics_keep_their_names_and_versions_and_a_second_start_is_the_same_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("UNANSWERED_SECONDS", "FINISH_SECONDS"):
        monkeypatch.setattr(weights_and_biases, limit, 60.0)  # a busy machine
    run_dir = tmp_path / "adder"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("steps: 9\nmodel: {path: tiny}\n")
    writer = MetricsWriter(run_dir, OFFLINE)
    writer.evaluation(0, {"evaluation/held_out/pass@1": 0.25})
    writer.step(1, {"loss": 2.0, "reward/mean": 0.5})
    writer.step(2, {"loss": 1.0})
    writer.evaluation(1, {"evaluation/held_out/pass@1": 0.5})  # ended after a newer step
    writer.close()
    (first,) = written(run_dir)
    assert history(first) == [
        {"policy_version": 0, "evaluation/held_out/pass@1": 0.25},
        {"policy_version": 1, "loss": 2.0, "reward/mean": 0.5},
        {"policy_version": 2, "loss": 1.0},
        {"policy_version": 1, "evaluation/held_out/pass@1": 0.5},
    ]
    steps = {
        record.metric.glob_name: record.metric.step_metric for record in records(first) if record.HasField("metric")
    }
    assert steps["*"] == "policy_version"
    (run,) = [record.run for record in records(first) if record.HasField("run")]
    assert (run.project, run.display_name) == ("sums", "adder")
    assert {item.key: item.value_json for item in run.config.update}["steps"] == "9"

    writer = MetricsWriter(run_dir, OFFLINE)
    writer.step(3, {"loss": 0.5})
    writer.close(failed=True)
    _, second = written(run_dir)
    assert history(second) == [{"policy_version": 3, "loss": 0.5}]
    assert {record.run.run_id for file in (first, second) for record in records(file) if record.HasField("run")} == {
        run.run_id
    }
    exits = [[r.exit.exit_code for r in records(file) if r.HasField("exit")] for file in (first, second)]
    assert exits == [[0], [1]]
    assert capfd.readouterr() == ("", "")


class Broken:
    """A W&B that is logged in and fails."""

    Settings = SimpleNamespace

    @staticmethod
    def setup(settings: SimpleNamespace) -> None:
        """Nothing to set up."""

    @staticmethod
    def init(**options: object) -> None:
        raise ConnectionError("no route to host")


def test_a_failure_is_one_warning_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Broken)
    writer = MetricsWriter(tmp_path, OFFLINE)
    for version in range(3):
        writer.step(version, {"loss": 1.0})
    writer.close()
    writer.step(3, {"loss": 1.0})
    assert [record.getMessage() for record in caplog.records if "Weights" in record.getMessage()] == [
        "Weights & Biases gets no more metrics: ConnectionError: no route to host; metrics.jsonl has all of them"
    ]


def test_no_api_key_is_a_warning_that_says_what_to_do_and_never_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    class LoggedOut(Broken):
        @staticmethod
        def login(**options: object) -> bool:
            asked.append(options)
            return False

    monkeypatch.setitem(sys.modules, "wandb", LoggedOut)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    WandbRun(tmp_path, WandbSettings()).close()
    assert asked == [{"prompt": False, "verify": False}]
    assert "set WANDB_API_KEY, or use telemetry.wandb.mode=offline" in caplog.text


def test_one_that_hangs_delays_neither_steps_nor_the_end_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    released = threading.Event()

    class Hanging(Broken):
        @staticmethod
        def init(**options: object) -> None:
            released.wait()

    monkeypatch.setitem(sys.modules, "wandb", Hanging)
    monkeypatch.setattr(weights_and_biases, "MOST_WAITING", 5)
    monkeypatch.setattr(weights_and_biases, "UNANSWERED_SECONDS", 0.05)
    run = WandbRun(tmp_path, WandbSettings(mode="offline"))
    for version in range(20):
        run.log(version, {"loss": 1.0})
    run.close()
    assert run._thread.is_alive()  # neither `log` nor `close` waited for its end
    released.set()
    with caplog.at_level(logging.WARNING):
        assert [record.getMessage() for record in caplog.records] == [
            "Weights & Biases gets no more metrics: 5 records wait for it; metrics.jsonl has all of them"
        ]


def test_a_server_that_never_answers_delays_the_end_of_a_short_run_by_seconds(tmp_path: Path) -> None:
    script = """
import logging, signal, sys, time
from pathlib import Path
from goaly.base.process import exit_quickly
from goaly.base.telemetry import weights_and_biases
from goaly.base.telemetry.settings import WandbSettings
logging.basicConfig()
weights_and_biases.UNANSWERED_SECONDS = 1.0
run = weights_and_biases.WandbRun(Path(sys.argv[1]), WandbSettings(mode="online"))
while run._library is None or run._library._connection is None:
    time.sleep(0.01)
run.log(1, {"loss": 1.0})
signal.alarm(20)  # W&B itself waits for 30 s
run.close()
exit_quickly(3)
"""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = {
            **os.environ,
            "WANDB_BASE_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "WANDB_API_KEY": "0" * 40,
        }
        ended = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 3, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert (
        "gets no more metrics: its server did not answer until 1 s after the run's end; metrics.jsonl has all" in line
    )


@pytest.mark.parametrize("spec", [None, ModuleSpec("wandb", None)], ids=["nothing", "a folder of its runs"])
def test_a_missing_package_is_a_config_error(spec: ModuleSpec | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goaly.base.telemetry.settings.find_spec", lambda name: spec)
    assert OFFLINE.problems("telemetry.") == [
        "telemetry.wandb: needs the package wandb, which is not installed: pip install 'goaly[wandb]'"
    ]
    assert TelemetrySettings().problems("telemetry.") == []
