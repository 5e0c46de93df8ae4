"""What a run with a gate needs is told before anything starts."""

from pathlib import Path

import pytest

from goaly.base.config import load
from goaly.base.errors import ConfigError
from goaly.plan.run_config import RunConfig

LIVE = Path(__file__).parents[3] / "configs/live/tiny.yaml"


def problems(model: Path, *overrides: str) -> list[str]:
    asked = [f"--config={LIVE}", f"model.path={model}", *overrides]
    try:
        load(RunConfig, asked, prog="test", description="")
    except ConfigError as error:
        return [problem.rpartition(" (")[0] or problem for problem in error.problems]
    return []


NEEDED = ("live.gate.margin=0.1", "generator.replicas=2", "weights.slots=4")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("generator.replicas=1", "generator.replicas=1: must be at least 2 with live.gate, one for the candidate"),
        ("weights.slots=3", "weights.slots=3: must be at least 4 with live.gate"),
        ("live.gate.canary=aime", "live.gate.canary=aime: must be one of evaluation.sets, which are held_out"),
        (
            "live.gate.shadow_pairs=3",
            "live.gate.shadow_pairs=3: must be 0: a live run keeps no prompts of ended sessions",
        ),
    ],
)
def test_a_run_that_cannot_hold_two_versions_is_refused(tiny_model_folder: Path, override: str, said: str):
    assert problems(tiny_model_folder, *NEEDED) == []
    assert said in "\n".join(problems(tiny_model_folder, *NEEDED, override))


def test_settings_of_a_gate_that_is_not_there_are_refused(tiny_model_folder: Path):
    said = problems(tiny_model_folder, "live.on_regression=stop")
    assert said == ["live.on_regression=stop: has no effect, live.gate is null"]
