"""Tokens that a rule, their age or a truncated answer leaves out: they have no part in the loss of the others."""

import math

import pytest
import torch

from goaly.losses.objective import PolicyObjective
from goaly.losses.policy_losses import LOSSES
from goaly.losses.settings import LossSettings, Rejection
from goaly.losses.tokens import Tokens
from tests.unit.losses.tokens_by_hand import ABOVE_3, SAMPLED, columns, objective

close = torch.testing.assert_close


def squared(tokens: Tokens) -> torch.Tensor:
    """A user's own loss, over sums of whole sequences that it makes by itself."""
    values_P = tokens.logprobs_P + tokens.entropies_P
    totals_P = torch.zeros_like(values_P).index_add(0, tokens.documents_P, values_P)
    return tokens.sequence_mean(values_P).exp() + totals_P[tokens.documents_P].square()


LEAVING_OUT = {
    "ratio": {"rejections": (Rejection(measure="ratio", level="token", low=0.5, high=2.0),)},
    "binary_kl": {"rejections": (Rejection(measure="binary_kl", level="token", high=0.05),)},
    "max_age": {"max_age": 3},
    "truncated": {"mask_truncated": True},
}


@pytest.mark.parametrize("how", LEAVING_OUT)
@pytest.mark.parametrize("name", [*LOSSES.names, f"{__name__}:squared"])
def test_a_token_that_is_left_out_has_no_gradient_and_no_part_in_the_loss_of_others(name: str, how: str):
    # before / sampler 1, 3 and 0.3 | 1 and 1 | 3: the second, third and last are left out, by whatever rule
    lengths, outside = [3, 2, 1], torch.tensor([0, 1, 1, 0, 0, 1], dtype=torch.bool)
    batch = columns(
        lengths,
        [1.0, -2.0, 3.0, -1.0, 0.5, 2.0],
        versions=[5, 1, 1, 5, 5, 1],
        proximal_logprobs=[math.log(SAMPLED * ratio) for ratio in (1.0, 3.0, 0.3, 1.0, 1.0, 3.0)],
        reference_logprobs=[-1.0] * 6,
    )
    batch["truncated"] = outside
    length = {"constant_length": 5} if name == "dr_grpo" else {}
    settings = LossSettings(
        name=name,
        proximal="trainer",
        importance="sequence",
        kl_coef=0.1,
        entropy_coef=0.2,
        **LEAVING_OUT[how],
        **length,
    )

    def found(*of_outside: float) -> tuple[float, torch.Tensor]:
        drawn = torch.tensor([1.0, of_outside[0], of_outside[1], 0.9, 1.1, of_outside[2]]) * SAMPLED
        logprobs, entropies = drawn.log().requires_grad_(), (1 - drawn).requires_grad_()
        part = PolicyObjective(settings)(logprobs, entropies, batch, 5)
        assert part.mean["rejected"].tolist() == outside.tolist()
        by_logprob, by_entropy = torch.autograd.grad(part.total, (logprobs, entropies))
        assert by_entropy[outside].tolist() == [0, 0, 0]  # losses-2
        return part.total.item(), by_logprob

    total, gradient = found(1.0, 1.0, 1.0)
    assert gradient[outside].tolist() == [0, 0, 0]
    assert (gradient[~outside] != 0).any()
    if ":" not in name:  # one's own loss looks at more than it is offered
        again, by_others = found(4.9, 1e-30, 0.1)
        assert again == pytest.approx(total, rel=1e-6)
        close(by_others, gradient)


def test_an_infinite_weight_of_a_rejected_sequence_leaves_the_others_as_they_are():
    # the product of the first sequence's weights is e^200
    rule = Rejection(measure="log_ratio", level="sequence_sum", high=5.0)
    settings = LossSettings(
        name="gspo", proximal="trainer", importance="sequence", importance_cap=None, rejections=(rule,)
    )
    batch = columns([2, 1], [1.0, 1.0, 1.0]) | {"sampler_logprobs": torch.tensor([-101.0, -101.0, -1.0])}
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    part = PolicyObjective(settings)(logprobs, torch.zeros(3), batch, 0)
    (gradient,) = torch.autograd.grad(part.total, logprobs)
    assert gradient.tolist() == [0, 0, -1]
    assert part.mean["importance_mean"].tolist() == [0, 0, 1]


def test_a_rule_compares_the_proximal_policy_with_the_sampler_unless_it_says_current():
    # before / sampler 4 and 1, current / sampler 1 and 4
    batch = columns([1, 1], [1.0, 1.0], proximal_logprobs=[math.log(4 * SAMPLED), math.log(SAMPLED)])
    rules = (Rejection(measure="ratio", level="token", high=2.0), ABOVE_3)
    part, gradient = objective(LossSettings(proximal="trainer", rejections=rules), [1.0, 4.0], batch)
    assert part.mean["rejected_ratio_token"].tolist() == [1, 0]
    assert part.mean["rejected_ratio_token_current"].tolist() == [0, 1]
    assert gradient.tolist() == [0, 0]
    # in a batch's first step both are the same
    del batch["proximal_logprobs"]
    part, _ = objective(LossSettings(proximal="trainer", rejections=rules), [1.0, 4.0], batch)
    assert part.mean["rejected_ratio_token"].tolist() == part.mean["rejected_ratio_token_current"].tolist() == [0, 1]


@pytest.mark.parametrize(("denominator", "count"), [("before", None), ("after", 1)])
def test_a_truncated_answer_is_left_out_and_counts_in_the_denominator_if_all_do(denominator, count: int | None):
    batch = columns([2, 1], [1.0, 1.0, 1.0]) | {"truncated": torch.tensor([True, True, False])}
    settings = LossSettings(name="reinforce", aggregation="sequence_mean", mask_truncated=True, denominator=denominator)
    part, gradient = objective(settings, [1.0, 1.0, 1.0], batch)
    close(gradient, torch.tensor([0.0, 0.0, -1.0]))
    assert part.count == count
    assert part.mean["rejected_truncated"].tolist() == part.mean["rejected"].tolist() == [1, 1, 0]
    _, gradient = objective(LossSettings(name="reinforce"), [1.0, 1.0, 1.0], batch)
    close(gradient, torch.tensor([-1.0, -1.0, -1.0]))


def test_what_two_rules_reject_is_gone_once_and_reported_for_each():
    batch = columns([1, 2], [1.0, 1.0, 1.0], versions=[4, 4, 1])
    settings = LossSettings(name="reinforce", max_age=2, rejections=(ABOVE_3,))
    part, gradient = objective(settings, [4.0, 1.0, 4.0], batch, policy_version=4)
    close(gradient, torch.tensor([0.0, -1.0, 0.0]))
    assert part.mean["rejected_ratio_token_current"].tolist() == [1, 0, 1]
    assert part.mean["rejected_max_age"].tolist() == [0, 0, 1]
    assert part.mean["rejected"].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("aggregation", "slope", "count"),
    # A = 1, ratio 1, one of three tokens rejected; sequences of 2 and 1: the second is gone
    [("token_mean", 1.0, 2), ("sequence_mean", 1 / 2, 1), ("sequence_sum", 1 / 8, 1)],
)
def test_the_denominator_after_rejection_counts_the_kept_tokens(aggregation, slope: float, count: int):
    length = {"constant_length": 8} if aggregation == "sequence_sum" else {}
    for denominator, counted in (("before", None), ("after", count)):
        settings = LossSettings(
            name="reinforce", aggregation=aggregation, rejections=(ABOVE_3,), denominator=denominator, **length
        )
        part, gradient = objective(settings, [1.0, 1.0, 4.0], columns([2, 1], [1.0, 1.0, 1.0]))
        close(gradient, torch.tensor([-slope, -slope, 0.0]))
        assert part.count == counted


def test_a_sequence_counted_after_rejection_is_as_long_as_what_is_kept_of_it():
    settings = LossSettings(name="reinforce", aggregation="sequence_mean", rejections=(ABOVE_3,), denominator="after")
    part, gradient = objective(settings, [1.0, 4.0, 1.0], columns([3], [1.0, 1.0, 1.0]))
    close(gradient, torch.tensor([-1 / 2, 0.0, -1 / 2]))
    assert part.count == 1


def test_a_rule_of_one_sign_leaves_out_what_is_pushed_further_down_and_keeps_what_is_on_its_way_back():
    # current / sampler 0.4, 0.4 and 1: the right token and the wrong one have both become less than half as likely
    batch = columns([1, 1, 1], [2.0, -2.0, -2.0])
    gradients = {}
    for sign in ("any", "negative", "positive"):
        rule = Rejection(measure="ratio", level="token", low=0.5, policy="proximal", advantage=sign)
        settings = LossSettings(name="reinforce", proximal="trainer", importance="sequence", rejections=(rule,))
        part, gradient = objective(settings, [0.4, 0.4, 1.0], batch)
        gradients[sign] = gradient.tolist()
        assert rule.name == "ratio_token" + ("" if sign == "any" else f"_{sign}")
        assert f"rejected_{rule.name}" in part.mean
    assert gradients["any"] == pytest.approx([0.0, 0.0, 2.0])
    assert gradients["negative"] == pytest.approx([-0.8, 0.0, 2.0])
    assert gradients["positive"] == pytest.approx([0.0, 0.8, 2.0])


def test_a_right_answer_that_has_become_unlikely_teaches_at_full_strength_with_a_floor_for_positive_advantages():
    batch = columns([2, 2], [3.0, 3.0, -1.0, -1.0])  # answers of weights 0.16 and 4
    bounds = {"importance_floor_positive": 1.0, "importance_cap_negative": 1.0}
    settings = LossSettings(name="reinforce", proximal="trainer", importance="sequence", **bounds)
    part, gradient = objective(settings, [0.4, 0.4, 2.0, 2.0], batch)
    assert gradient.tolist() == pytest.approx([-3.0, -3.0, 1.0, 1.0])
    assert part.mean["importance_truncated"].tolist() == [1.0, 1.0, 1.0, 1.0]
    without, gradient = objective(
        LossSettings(name="reinforce", proximal="trainer", importance="sequence"), [0.4, 0.4, 2.0, 2.0], batch
    )
    assert gradient.tolist() == pytest.approx([-0.48, -0.48, 2.0, 2.0])
    assert without.mean["importance_truncated"].tolist() == [0.0, 0.0, 1.0, 1.0]
