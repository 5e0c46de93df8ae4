"""A whole run of PPO, as a user starts it."""

from collections.abc import Callable

import pytest
from launched import START_SECONDS, LaunchedRun

STEPS = 5


@pytest.mark.timeout(400)
def test_a_run_trains_policy_and_critic_on_every_batch(launch: Callable[..., LaunchedRun]) -> None:
    overrides = ["critic.epochs=2", "critic.value_clip=0.5", "evaluation.prompts=2"]
    overrides += ["trainer.minibatches=2", "loss.proximal=trainer"]
    overrides += ["reward.verifier=tests.loop.verifiers:share_of_digits"]
    run = launch(f"steps={STEPS}", *overrides, app="ppo")
    assert run.wait(START_SECONDS) == 0, run.text()
    assert "held-out pass@1" in run.text().splitlines()[-1]
    steps = run.lines("metrics.jsonl")
    assert [step["policy_version"] for step in steps] == list(range(1, STEPS + 1))
    assert steps[0]["critic/value"] == 0  # it began with a head of 0,
    assert all(step["critic/value"] != 0 for step in steps[1:])  # and learned from each batch
    reported = {"loss", "critic/loss", "critic/explained_variance", "critic/clip_fraction", "critic/grad_norm"}
    assert all(reported <= step.keys() for step in steps)
    summary = run.summary()
    assert summary["admitted"] == summary["trained"] == 2 * STEPS
    events = (run.folder / "trace.json").read_text()
    assert all(f'"{name}"' in events for name in ("values", "train_critic", "train"))
