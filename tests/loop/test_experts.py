"""Runs of models with experts: they replay the sampler's choices, or generators follow a trainer of other ranks.

One with adapters, too, is killed and resumed (`test_lora_run.py`).
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from conftest import launching
from launched import REWARDED, START_SECONDS, assert_whole, replayed
from random_model import write_random_deepseek, write_random_dots, write_random_gpt_oss, write_random_model

from goaly.journal.run_log import LOG_FOLDER, records
from goaly.trajectory import Group

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

STEPS = 4
REPLAY = (
    f"steps={STEPS}",
    "checkpoint.every=1",
    "moe.routing=replay",
    "moe.compare_every=2",
    "model.dtype=bfloat16",
    "loss.kl_coef=0.01",
    "trainer.fsdp=2",
    "trainer.ep=2",
    "trainer.optimizer.lr=1e-3",
    "evaluation.prompts=2",
    REWARDED,
)

FRESH = (
    "steps=2",
    "backlog.max_staleness=0",
    "trainer.optimizer.lr=1e-2",
    "evaluation.prompts=1",
    REWARDED,
)
NOISE = 1e-8
"""More than rounding in float32 moves `sampler_kl`."""


def test_a_run_that_replays_choices_of_experts_can_be_trained_again(tmp_path: Path) -> None:
    with launching(tmp_path, write_random_model(tmp_path / "model", experts=8)) as launch:  # train-3
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
    assert all(step["experts/dropped"] == 0 for step in steps)
    assert [number for number, step in enumerate(steps) if "experts/kl_own" in step] == [0, 2]
    assert 0 <= steps[0]["experts/kl_replay"] < 1e-3
    assert steps[2]["experts/kl_own"] != steps[2]["experts/kl_replay"]


TWO, FOUR = ("trainer.fsdp=2", "trainer.ep=2"), ("trainer.fsdp=2", "trainer.tp=2", "trainer.ep=4")
SHARES = ("trainer.cp=2", "trainer.ep=2")
MODELS: dict[str, tuple[Callable[..., Path], tuple[str, ...]]] = {
    "Qwen3": (partial(write_random_model, experts=8), (*FOUR, "generator.tp=2")),
    "dots.llm1": (write_random_dots, (*FOUR, "trainer.expert_bias_rate=0.1", "generator.tp=2", "generator.ep=2")),
    "DeepSeek-V3": (write_random_deepseek, (*TWO, "trainer.pp=2", "generator.tp=2", "generator.ep=2")),
    "gpt-oss": (write_random_gpt_oss, (*SHARES, "generator.tp=2", "generator.ep=2")),
}
"""Models with experts, and the ranks of their trainers and generators."""


@pytest.mark.parametrize("model", MODELS)
def test_a_generator_samples_from_what_a_trainer_with_divided_experts_has_published(tmp_path: Path, model: str) -> None:
    write, ranks = MODELS[model]
    with launching(tmp_path, write(tmp_path / "model")) as launch:
        run = launch(*FRESH, *ranks)
        assert run.wait(START_SECONDS) == 0, run.text()
    steps = run.lines("metrics.jsonl")
    assert [step["age/max"] for step in steps] == [0, 0]
    assert steps[0]["grad_norm"] > 0.01
    assert steps[-1]["generator/verified_updates"] > 0
    assert all(abs(step["sampler_kl"]) < NOISE for step in steps)  # a generator of the first weights: above 1e-3
