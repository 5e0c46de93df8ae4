"""A token without a finite log-prob of the sampler is in no part of the objective, from the episode to the loss."""

from dataclasses import replace

import pytest
import torch

from goaly.backlog.batch import build_batch
from goaly.backlog.settings import BacklogSettings
from goaly.generate.finite_logprobs import without_non_finite
from goaly.losses.objective import PolicyObjective
from goaly.losses.settings import LossSettings
from goaly.reward.settings import AdvantageSettings
from goaly.train.microbatch import microbatch
from goaly.trajectory import PackedRows, token_data
from tests.unit.trajectories import grouped, sampled


def _packed(value: float | None) -> PackedRows:
    """Two answers of four tokens, one of which has this log-prob."""
    samples = [sampled(5, reward=reward) for reward in (1.0, 0.0)]
    if value is not None:
        columns = dict(samples[0].tokens.items())
        columns["sampler_logprobs"] = columns["sampler_logprobs"].index_fill(0, torch.tensor([2]), value)
        samples[0] = replace(samples[0], tokens=token_data(without_non_finite(columns)))
    batch = build_batch(
        0,
        [grouped(0, samples)],
        settings=BacklogSettings(groups_per_step=1, group_size=2, row_length=16),
        advantage_settings=AdvantageSettings(name="group_mean"),
        dp_ranks=1,
        pad_token=0,
    )
    return batch.ranks[0]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_token_without_a_finite_log_prob_leaves_loss_and_denominator(value: float, aggregation):
    packed = _packed(value)
    objective = PolicyObjective(LossSettings(name="reinforce", aggregation=aggregation))
    assert packed.batch_trained_tokens == 7  # not 8
    assert objective.denominator(packed) == (7 if aggregation == "token_mean" else 2)
    batch = microbatch(packed.rows)
    assert len(batch.cells_P) == 7
    logprobs_P = torch.full((7,), -0.5, requires_grad=True)
    loss = objective(logprobs_P, torch.zeros(7), batch.columns, 0).total / objective.denominator(packed)
    loss.backward()
    # advantages 1/2 and -1/2; the first answer has three tokens left, the second four
    weights = {"token_mean": [1 / 7] * 7, "sequence_mean": [1 / 6] * 3 + [1 / 8] * 4}[aggregation]
    expected = -torch.tensor([0.5] * 3 + [-0.5] * 4) * torch.tensor(weights)
    assert logprobs_P.grad is not None
    torch.testing.assert_close(logprobs_P.grad, expected)
    torch.testing.assert_close(loss.detach(), expected.sum())


def test_the_same_answers_with_finite_log_probs_have_all_their_tokens():
    assert _packed(None).batch_trained_tokens == 8
