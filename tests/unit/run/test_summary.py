"""What `summary.json` says of a run that evaluated any number of times."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from goaly.config import load
from goaly.run.config import RunConfig
from goaly.run.run import Run
from goaly.run.start import write_summary


@pytest.mark.parametrize(
    ("evaluations", "start", "before", "after"),
    [
        ([(0, 0.1), (2, 0.2), (4, 0.3)], 0, 0.1, 0.3),
        ([(0, 0.1), (0, 0.15)], 0, 0.1, None),
        ([(3, 0.4)], 0, None, 0.4),
        ([(3, 0.4), (9, 0.5)], 3, 0.4, 0.5),
        ([], 0, None, None),
    ],
)
def test_before_is_the_first_evaluation_ahead_of_training_and_after_is_the_last(
    evaluations, start, before, after, tiny_model_folder: Path, tmp_path: Path
) -> None:
    argv = [f"model.path={tiny_model_folder}", "steps=9", "telemetry.tensorboard=false", "telemetry.progress=off"]
    config = load(RunConfig, argv, prog="test", description="").config

    async def summarized() -> dict:
        run = Run(config, tmp_path)
        run.trainer = SimpleNamespace(start_version=start, policy_version=9)
        run.evaluations = evaluations
        write_summary(run, "failed")
        return json.loads((tmp_path / "summary.json").read_text())

    summary = asyncio.run(summarized())
    assert (summary["pass_at_1_before"], summary["pass_at_1_after"]) == (before, after)
