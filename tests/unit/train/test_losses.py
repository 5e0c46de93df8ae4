"""The losses against values worked out by hand."""

import math

import pytest
import torch

from goaly.errors import SchemaError
from goaly.train.losses import finish, k3, loss_names, policy_loss
from goaly.train.settings import LOSS_NAMES, LossSettings

LOG = math.log


def columns(sampler: list[float], advantages: list[float], **more: list[float]) -> dict[str, torch.Tensor]:
    named = {"sampler_logprobs": sampler, "advantages": advantages, **more}
    return {key: torch.tensor(value) for key, value in named.items()}


def evaluated(settings: LossSettings, current: list[float], batch: dict[str, torch.Tensor]):
    logprobs = torch.tensor(current, requires_grad=True)
    output = policy_loss(settings)(logprobs, torch.zeros(len(current)), batch)
    output.loss_P.sum().backward()
    return output, logprobs.grad


def test_the_clipped_ratio_has_the_values_and_gradients_of_a_worked_example():
    # ratios 1.5, 0.5, 1.5, 0.5 with advantages 2, 2, -2, -2; clip 0.2 below, 0.3 above
    ratios, advantages = [1.5, 0.5, 1.5, 0.5], [2.0, 2.0, -2.0, -2.0]
    sampler = [LOG(0.2)] * 4
    current = [LOG(0.2 * ratio) for ratio in ratios]
    output, gradient = evaluated(LossSettings(clip_low=0.2, clip_high=0.3), current, columns(sampler, advantages))
    torch.testing.assert_close(output.loss_P.detach(), torch.tensor([-2.6, -1.0, 3.0, 1.6]))
    torch.testing.assert_close(gradient, torch.tensor([0.0, -1.0, 3.0, 0.0]))  # clipped tokens have none
    assert output.mean["clip_fraction"].tolist() == [1, 0, 0, 1]
    torch.testing.assert_close(output.maximum["ratio_max"], torch.tensor(ratios))


def test_with_the_trainer_as_proximal_policy_only_a_capped_weight_scales_the_gradient():
    sampler = [LOG(0.1)] * 3
    current = [LOG(0.05), LOG(0.1), LOG(0.6)]
    settings = LossSettings(proximal="trainer", importance_cap=2.0)
    output, gradient = evaluated(settings, current, columns(sampler, [1.0, -3.0, 1.0]))
    torch.testing.assert_close(output.loss_P.detach(), torch.tensor([-0.5, 3.0, -2.0]))
    torch.testing.assert_close(gradient, torch.tensor([-0.5, 3.0, -2.0]))
    assert output.mean["importance_truncated"].tolist() == [0, 0, 1]
    output, _ = evaluated(
        LossSettings(proximal="trainer", importance_cap=None), current, columns(sampler, [1.0, -3.0, 1.0])
    )
    torch.testing.assert_close(output.loss_P.detach(), torch.tensor([-0.5, 3.0, -6.0]))


def test_the_kl_term_is_k3_times_its_coefficient():
    batch = columns([LOG(0.5)], [0.0], reference_logprobs=[LOG(0.25)])
    output, gradient = evaluated(LossSettings(kl_coef=0.1), [LOG(0.5)], batch)
    expected = 0.5 - 1 + LOG(2)
    assert output.loss_P.item() == pytest.approx(0.1 * expected)
    assert gradient.item() == pytest.approx(0.1 * (1 - 0.5))
    assert output.mean["kl_reference"].item() == pytest.approx(expected)


def test_k3_averages_to_the_kl_divergence_over_the_current_policy():
    current, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    exact = (current * (current / reference).log()).sum()
    torch.testing.assert_close((current * k3(current.log(), reference.log())).sum(), exact)


def test_the_effective_sample_size_is_one_for_equal_ratios_and_less_otherwise():
    assert finish({"ratio_mean": 1.3, "ratio_square": 1.69})["effective_sample_size"] == pytest.approx(1.0)
    # ratios 2 and 0: mean 1, mean square 2, half of the samples count
    assert finish({"ratio_mean": 1.0, "ratio_square": 2.0}) == {"ratio_mean": 1.0, "effective_sample_size": 0.5}


def test_nll_is_the_negative_log_likelihood():
    output, gradient = evaluated(LossSettings(name="nll"), [-0.5, -2.0], {})
    assert output.loss_P.tolist() == [0.5, 2.0]
    assert gradient.tolist() == [-1.0, -1.0]


def test_a_loss_names_the_column_that_the_batch_lacks():
    with pytest.raises(SchemaError, match="loss grpo: `reference_logprobs` is missing"):
        evaluated(LossSettings(kl_coef=0.1), [-1.0], columns([-1.0], [1.0]))


def test_settings_know_every_loss():
    assert set(LOSS_NAMES) == set(loss_names())
    assert LossSettings(name="ppo").problems("loss.") == ["loss.name=ppo: must be one of grpo, nll"]
