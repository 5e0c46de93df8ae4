"""A run of a model with experts that replays the sampler's choices. (One with adapters, too, is killed and resumed.)"""

from pathlib import Path

import pytest
from conftest import launching
from launched import REWARDED, START_SECONDS, assert_whole, replayed
from random_model import write_random_model

from goaly.durable.run_log import LOG_FOLDER, records
from goaly.trajectory import Group

pytestmark = pytest.mark.timeout(900)

STEPS = 4
REPLAY = (
    f"steps={STEPS}",
    "checkpoint.every=1",
    "moe.routing=replay",
    "model.dtype=bfloat16",
    "loss.kl_coef=0.01",
    "trainer.fsdp=2",
    "trainer.ep=2",
    "trainer.optimizer.lr=1e-3",
    "evaluation.prompts=2",
    REWARDED,
)


def test_a_run_that_replays_choices_of_experts_can_be_trained_again(tmp_path: Path) -> None:
    with launching(tmp_path, write_random_model(tmp_path / "model", experts=8)) as launch:  # TE-7
        run = launch(*REPLAY)
        assert run.wait(START_SECONDS) == 0, run.text()
        assert_whole(run, STEPS)
        checked = replayed(run, "--check")
    assert checked.returncode == 0, checked.stderr
    assert f"{STEPS} digests are as recorded" in checked.stdout
    groups = list(records(run.folder / LOG_FOLDER, of=Group))
    assert len(groups) >= 2 * STEPS
    for group in groups:
        assert isinstance(group, Group)
        assert all(sample.tokens["expert_choices"].shape == (len(sample), 3, 2) for sample in group.samples)
    steps = run.lines("metrics.jsonl")
    assert [step["policy_version"] for step in steps] == list(range(1, STEPS + 1))
    assert steps[0]["experts/rerouted"] < 0.05  # by rounding, on some machines none; later the policy differs
    assert steps[0]["sampler_kl"] < 1e-3
    assert steps[0]["kl_reference"] == 0  # the reference is the same model yet
    assert all(0 < step["experts/rerouted"] < 0.5 for step in steps[1:])
