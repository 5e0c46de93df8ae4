"""Metrics are on disk when `step` returns, in JSON lines and in TensorBoard's own format."""

import json
import logging
from pathlib import Path

from goaly.base.json_text import read_lines
from goaly.base.telemetry.metrics import MetricsWriter, TensorBoardEvents
from goaly.base.telemetry.settings import TelemetrySettings


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    (file,) = folder.iterdir()
    events = list(LegacyEventFileLoader(str(file)).Load())
    assert events[0].file_version == "brain.Event:2"
    return [(event.step, value.tag, value.simple_value) for event in events[1:] for value in event.summary.value]


def test_a_step_is_a_line_and_a_tensorboard_event_before_the_writer_is_closed(tmp_path: Path):
    writer = MetricsWriter(tmp_path, TelemetrySettings())
    writer.step(1, {"reward/mean": 0.5, "loss": 2.0})
    writer.step(2, {"reward/mean": 0.75, "loss": float("nan")})
    first, second = read_lines(tmp_path / "metrics.jsonl")
    assert (first["policy_version"], first["reward/mean"], first["loss"]) == (1, 0.5, 2.0)
    assert (second["policy_version"], second["loss"]) == (2, None)
    found = scalars(tmp_path / "tensorboard")
    assert found[:3] == [(1, "reward/mean", 0.5), (1, "loss", 2.0), (2, "reward/mean", 0.75)]
    assert found[3][2] != found[3][2]
    writer.close()


def test_an_evaluation_is_a_line_of_its_own_file_and_an_event(tmp_path: Path):
    writer = MetricsWriter(tmp_path, TelemetrySettings())
    writer.evaluation(0, {"evaluation/aime/pass@1": 0.25})
    writer.step(1, {"loss": 2.0})
    writer.close()
    assert [line["loss"] for line in read_lines(tmp_path / "metrics.jsonl")] == [2.0]
    (line,) = read_lines(tmp_path / "evaluations.jsonl")
    assert (line["policy_version"], line["evaluation/aime/pass@1"]) == (0, 0.25)
    assert scalars(tmp_path / "tensorboard") == [(0, "evaluation/aime/pass@1", 0.25), (1, "loss", 2.0)]


def test_a_value_that_is_no_number_is_kept_as_text_and_breaks_nothing(tmp_path: Path):
    writer = MetricsWriter(tmp_path, TelemetrySettings())
    writer.step(1, {"odd": Path("x"), "loss": 1.0})  # type: ignore[dict-item]
    writer.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["odd"] == "x"
    assert scalars(tmp_path / "tensorboard") == [(1, "loss", 1.0)]


def test_events_end_with_one_warning_when_the_disk_is_full(tmp_path: Path, caplog, monkeypatch):
    events = TensorBoardEvents(tmp_path / "tensorboard")
    events.close()
    full = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    monkeypatch.setattr(events, "_file", full)
    monkeypatch.setattr(events._records, "_writer", full)
    with caplog.at_level(logging.WARNING):
        events.scalars(1, {"a": 1.0}, 0.0)
        events.scalars(2, {"a": 1.0}, 0.0)
    assert len(caplog.records) == 1
    assert full.closed


def test_a_disk_that_is_full_during_training_costs_one_warning_for_each_file_and_raises_nothing(tmp_path: Path, caplog):
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        (tmp_path / name).symlink_to("/dev/full")
    writer = MetricsWriter(tmp_path, TelemetrySettings(tensorboard=False))
    for version in range(1, 4):
        writer.step(version, {"loss": 1.0})
        writer.evaluation(version, {"evaluation/held_out/pass@1": 0.5})
    writer.close()
    assert [message.partition(":")[0].rpartition("/")[2] for message in caplog.messages] == [
        "metrics.jsonl",
        "evaluations.jsonl",
    ]
    assert all("No space left on device" in message for message in caplog.messages)


def test_a_step_whose_line_was_cut_is_written_again_in_its_place(tmp_path: Path):
    first = MetricsWriter(tmp_path, TelemetrySettings(tensorboard=False))
    for version in (1, 2):
        first.step(version, {"loss": 1.0})
    first.close()
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-1])
    MetricsWriter(tmp_path, TelemetrySettings(tensorboard=False)).step(2, {"loss": 2.0})
    assert [json.loads(line)["loss"] for line in metrics.read_text().splitlines()] == [1.0, 2.0]
    assert not (tmp_path / "tensorboard").exists()


def test_a_step_that_the_folder_has_already_is_not_written_again(tmp_path: Path):
    first = MetricsWriter(tmp_path, TelemetrySettings(tensorboard=False))
    assert first.newest == 0
    for version in (1, 2):
        first.step(version, {"loss": 1.0})
    first.close()
    resumed = MetricsWriter(tmp_path, TelemetrySettings(tensorboard=False))
    assert resumed.newest == 2
    for version in (2, 3, 3):
        resumed.step(version, {"loss": 2.0})
    assert [(line["policy_version"], line["loss"]) for line in read_lines(tmp_path / "metrics.jsonl")] == [
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
    ]
