"""Whole runs with bitwise numerics: every importance ratio is 1, and the number of replicas changes no bit. A run whose
trainer has a broken rank ends with what is broken."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import launching
from launched import REWARDED, START_SECONDS, LaunchedRun, gone_within
from random_model import write_random_model
from test_agent_run import TEMPLATE

STEPS = 3
BITWISE = [
    f"steps={STEPS}",
    REWARDED,
    "model.numerics=bitwise",
    "generator.on_update=recompute",
    "rollout.repeatable=true",
    "backlog.max_staleness=0",
    "evaluation.every=null",
    "evaluation.prompts=1",
]

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]


def metrics_of(run: LaunchedRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


def assert_exact(run: LaunchedRun) -> None:
    """Every step trained tokens, and each had the sampler's bits."""
    metrics = metrics_of(run)
    assert len(metrics) == STEPS
    for step in metrics:
        assert step["ratio_mean"] == step["ratio_max"] == 1.0
        assert step["parity/differing_tokens"] == 0
        assert step["parity/tokens"] > 0
        assert step["parity/share"] == 1
    assert any(step["grad_norm"] > 0 for step in metrics)


@pytest.mark.parametrize(("experts", "dtype"), [(0, "float32"), (8, "bfloat16")])
def test_ratios_are_one_and_two_replicas_make_the_policy_of_one_to_the_last_bit(  # train-9
    tmp_path: Path, experts: int, dtype: str
):
    model = write_random_model(tmp_path / "model", experts=experts)
    policies = set()
    with launching(tmp_path, model) as launch:
        for replicas, transfer in ((1, "null"), (2, "float32")):  # a reader rounds as the trainer does
            run = launch(
                *BITWISE,
                f"model.dtype={dtype}",
                f"generator.replicas={replicas}",
                f"weights.transfer_dtype={transfer}",
            )
            assert run.wait(START_SECONDS) == 0, run.text()
            assert_exact(run)
            policies.add((run.folder / "policy" / "model.safetensors").read_bytes())
    assert len(policies) == 1


def test_an_asynchronous_run_compares_all_tokens_with_the_policies_that_sampled_them(tmp_path: Path):  # train-9
    ahead = ["backlog.max_staleness=2", "backlog.groups_per_step=2", "backlog.window=2", "rollout.repeatable=false"]
    with launching(tmp_path, write_random_model(tmp_path / "model", experts=8)) as launch:
        run = launch(*BITWISE, *ahead, "steps=6", "trainer.fsdp=2", "trainer.ep=2", "model.dtype=bfloat16")
        assert run.wait(START_SECONDS) == 0, run.text()
    metrics = metrics_of(run)
    assert len(metrics) == 6
    assert max(step["age/max"] for step in metrics) > 0
    for step in metrics:
        assert step["parity/share"] == 1
        assert step["parity/differing_tokens"] == 0


def test_an_agent_all_of_whose_answers_have_a_form_is_trained_to_the_last_bit(  # generate-16
    launch: Callable[..., LaunchedRun], tmp_path: Path
) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    overrides = ["rollout.endpoint={}", "agent.function=tests.loop.asking_agent:in_a_form"]
    overrides += [f"chat.template_file={tmp_path}/chat.jinja"]
    run = launch(*BITWISE, *overrides, app="agent", config="grpo/tiny.yaml")
    assert run.wait(START_SECONDS) == 0, run.text()
    assert_exact(run)
    assert all(0 < step["form_weight"] < 1 for step in metrics_of(run))


def test_a_run_with_a_broken_rank_ends_with_the_token_and_the_command_that_searches(
    tmp_path: Path,
):
    with launching(tmp_path, write_random_model(tmp_path / "model")) as launch:
        run = launch(*BITWISE, "trainer.fsdp=2", "loss.name=tests.loop.broken_rank:gradient")
        assert run.wait(START_SECONDS) != 0, run.text()
        text = run.text()
        left = gone_within(run.processes())
    (ended,) = [line for line in text.splitlines() if "ParityError: trainer and sampler differ" in line]
    assert "tokens of policy version 0. The first is token " in ended
    assert "the trainer's log-prob is -" in ended
    assert f"python -m goaly.parity --config {run.folder}/config.yaml" in text
    assert not left
