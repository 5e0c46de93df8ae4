"""Several optimizer steps on a batch: each as on a batch of its own, but for the version, the rate and the anchor."""

import dataclasses
from pathlib import Path

import pytest
import torch

from goaly.losses.objective import PROXIMAL, PolicyObjective
from goaly.losses.settings import LossSettings
from goaly.losses.tokens import Tokens
from goaly.models.settings import ModelSettings
from goaly.train.settings import OptimizerSettings, ScheduleSettings, TrainerSettings
from goaly.train.step_metrics import StepMetrics, combine
from goaly.train.train_engine import TrainEngine
from goaly.trajectory import Minibatch, PackedRows
from tests.unit.train.batches import documents, pack

SETTINGS = TrainerSettings(
    optimizer=OptimizerSettings(lr=1e-2),
    schedule=ScheduleSettings(decay="linear", total_steps=4),
    microbatch_rows=1,
)
DECOUPLED = LossSettings(name="ppo", proximal="trainer", importance_cap=None)

seen: list[Tokens] = []


def watched(tokens: Tokens) -> torch.Tensor:
    """A loss that leaves what it saw in `seen`."""
    seen.append(dataclasses.replace(tokens, logprobs_P=tokens.logprobs_P.detach()))
    return -tokens.ratio_P * tokens.advantages_P


@pytest.fixture
def engine(tiny_model_folder: Path):
    return lambda: TrainEngine(ModelSettings(path=str(tiny_model_folder)), SETTINGS)


def in_two(batch: PackedRows) -> PackedRows:
    """The batch in two parts: its first two rows, and the others."""
    rows = (batch.rows[:2], batch.rows[2:])
    minibatches = tuple(
        Minibatch(rows=len(of_part), trained_tokens=int(of_part["trained"].sum()), sequences=number)
        for of_part, number in zip(rows, (4, 2), strict=True)
    )
    return dataclasses.replace(batch, minibatches=minibatches)


def batch(seed: int = 0) -> PackedRows:
    return pack(documents(6, seed=seed), rows=3, row_length=128)  # the rows hold two documents each


def parameters(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_tensors().items()}


def assert_equal(ones: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(one, others[name]) for name, one in ones.items())


def test_a_batch_in_one_part_is_one_step_to_the_last_bit(engine):
    trained, by_hand = engine(), engine()
    objective = PolicyObjective(DECOUPLED)
    whole = batch()
    assert whole.split() == [whole]
    metrics = trained.train_step(whole, objective)
    expected = by_hand.forward_backward(whole.rows.split(1), objective, whole.batch_trained_tokens).metrics
    assert metrics == expected | by_hand.optimizer_step()
    assert_equal(parameters(trained), parameters(by_hand))


@pytest.mark.parametrize("loss", [LossSettings(kl_coef=0.05), LossSettings(aggregation="sequence_mean")])
def test_two_parts_are_two_steps_each_over_its_own_tokens_and_sequences(engine, loss: LossSettings):
    trained, by_hand = engine(), engine()
    objective, whole = PolicyObjective(loss), in_two(batch())
    metrics = trained.train_step(whole, objective)
    steps = []
    for rows, sequences in ((whole.rows[:2], 4), (whole.rows[2:], 2)):
        count = sequences if loss.aggregation == "sequence_mean" else int(rows["trained"].sum())
        found = by_hand.forward_backward(rows.split(1), objective, count).metrics
        found |= {"grad_norm": by_hand._optimizer.clip()}
        by_hand._optimizer._optimizers.step()
        by_hand._optimizer._optimizers.zero_grad()
        steps.append((int(rows["trained"].sum()), found))
    assert_equal(parameters(trained), parameters(by_hand))
    tokens = sum(count for count, _ in steps)
    for name in ("loss", "ratio_mean", "entropy", "grad_norm"):
        assert metrics[name] == pytest.approx(sum(count * found[name] for count, found in steps) / tokens)
    assert metrics["ratio_max"] == max(found["ratio_max"] for _, found in steps)


def test_version_and_rate_go_on_with_the_batch_not_with_its_steps(engine):
    made, objective = engine(), PolicyObjective(LossSettings())
    rates = []
    for seed in range(3):
        rates.append(made.train_step(in_two(batch(seed)), objective)["lr"])
        assert made.policy_version == seed + 1
    assert rates == pytest.approx([1e-2, 0.75e-2, 0.5e-2])


def test_each_of_many_parts_has_the_proximal_policy_of_before_the_batch(engine):
    made, whole = engine(), batch()
    minibatches = tuple(
        Minibatch(rows=1, trained_tokens=int(row["trained"].sum()), sequences=2) for row in whole.rows.split(1)
    )
    before = made.logprobs(whole.rows)
    seen.clear()
    settings = LossSettings(name=f"{__name__}:watched", proximal="trainer")
    made.train_step(dataclasses.replace(whole, minibatches=minibatches), PolicyObjective(settings))
    first, *_, last = seen
    assert len(seen) == 3
    for row, tokens in enumerate(seen):
        assert torch.equal(tokens.proximal_logprobs_P, before[row][whole.rows["trained"][row]])
    assert (first.ratio_P == 1).all()
    assert (last.ratio_P - 1).abs().max() > 0.01
    assert PROXIMAL not in whole.rows.keys()  # noqa: SIM118


def test_ages_are_counted_from_the_version_that_trains(engine):
    made, objective = engine(), PolicyObjective(LossSettings(name=f"{__name__}:watched"))
    for version in range(3):
        seen.clear()
        made.train_step(in_two(batch()), objective)  # drawn by version 0
        assert all((tokens.ages_P == version).all() for tokens in seen)


def test_only_a_loss_that_looks_back_pays_for_it(engine, monkeypatch: pytest.MonkeyPatch):
    made = engine()
    monkeypatch.setattr(made, "logprobs", lambda rows: pytest.fail("a forward pass that nothing asked for"))
    made.train_step(in_two(batch()), PolicyObjective(LossSettings()))
    made.train_step(batch(), PolicyObjective(DECOUPLED))


def test_a_later_part_that_is_not_finite_raises_and_its_step_changes_nothing(engine):
    made, alone, whole = engine(), engine(), in_two(batch())
    objective = PolicyObjective(LossSettings())
    alone.train_step(whole.split()[0], objective)
    whole.rows["advantages"][2:] = float("nan")
    with pytest.raises(FloatingPointError, match="train loss is nan at policy version 0"):
        made.train_step(whole, objective)
    assert_equal(parameters(made), parameters(alone))  # train-2
    assert made.policy_version == 0


def test_steps_together_are_means_over_all_their_tokens_and_the_greatest_maximum():
    steps = [
        StepMetrics(tokens=30, means={"ratio_mean": 1.0, "ratio_square": 1.0}, maxima={"ratio_max": 1.0}),
        StepMetrics(tokens=10, means={"ratio_mean": 3.0, "ratio_square": 9.0}, maxima={"ratio_max": 3.0}),
    ]
    # mean (30 + 30) / 40 = 1.5, mean square (30 + 90) / 40 = 3: variance 0.75, 1.5^2 / 3 = 0.75 of the tokens count
    assert combine(steps).metrics == pytest.approx(
        {"ratio_mean": 1.5, "ratio_std": 0.75**0.5, "effective_sample_size": 0.75, "ratio_max": 3.0}
    )
