"""KL estimates, proximal policies, importance weights and rejections by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from goaly.losses.corrections import bound_by_sign, has_sign, importance_weights, proximal_logprobs, rejected, too_old
from goaly.losses.kl import K3_BOUND, binary_divergence, divergence, k1, k2, k3
from goaly.losses.settings import Rejection
from tests.unit.losses.tokens_by_hand import documents

close = torch.testing.assert_close


def logs(*ratios: float) -> torch.Tensor:
    return torch.tensor([math.log(ratio) for ratio in ratios])


def test_k1_k2_k3_by_hand():
    # drawn at 0.5, 0.25 under the other: difference -log 2
    drawn, other = logs(0.5), logs(0.25)
    assert k1(drawn, other).item() == pytest.approx(math.log(2))
    assert k2(drawn, other).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert k3(drawn, other).item() == pytest.approx(0.5 - 1 + math.log(2))
    assert divergence("k2", drawn, other) == k2(drawn, other)


def test_an_interpolated_policy_has_the_precision_of_the_log_probs():
    sampler, current = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    assert proximal_logprobs("interpolated", current, sampler, torch.tensor([2])).item() == 2 / 3


@pytest.mark.parametrize("estimate", [k1, k3])
def test_k1_and_k3_average_to_the_divergence_over_what_was_drawn(estimate):
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    close((p * estimate(p.log(), q.log())).sum(), (p * (p / q).log()).sum())


@pytest.mark.parametrize(("estimate", "of_the_divergence"), [(k1, 0.0), (k2, 1.0)])
def test_trained_through_the_drawing_policy_k2_has_the_gradient_of_the_divergence_and_k1_none(
    estimate, of_the_divergence: float
):
    logits, q = torch.tensor([0.3, -0.2, 0.9], requires_grad=True), torch.tensor([0.2, 0.2, 0.6])
    p = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((p.exp() * (p - q.log())).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((p.exp().detach() * estimate(p, q.log())).sum(), logits)
    close(expected, of_the_divergence * exact, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("difference", [5.5, 27.5, 80.0])
def test_k3_of_a_very_stale_token_goes_on_along_its_tangent(difference: float):
    # drawn at -28 - something, the other at -0.5: e^27.5 would be 9e11. At the bound 5: e^5 - 6, slope e^5 - 1
    drawn = torch.tensor([-0.5 - difference], dtype=torch.float64, requires_grad=True)
    found = k3(drawn, torch.tensor([-0.5], dtype=torch.float64))
    slope = math.exp(5) - 1
    assert found.item() == pytest.approx(math.exp(5) - 6 + slope * (difference - 5), rel=1e-12)
    (gradient,) = torch.autograd.grad(found.sum(), drawn)
    assert gradient.item() == pytest.approx(-slope, rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-40, 40), min_size=2, max_size=9))
def test_k3_is_exact_up_to_its_bound_and_convex_rising_and_never_negative_beyond(differences: list[float]):
    other = torch.tensor(sorted(differences), dtype=torch.float64, requires_grad=True)
    found = k3(torch.zeros_like(other), other)
    (slope,) = torch.autograd.grad(found.sum(), other)
    within = other.detach() <= K3_BOUND
    close(found[within], (other.exp() - 1 - other)[within], atol=1e-12, rtol=1e-12)
    assert (found >= 0).all()
    assert (slope.diff() >= -1e-12).all()
    assert slope.max() <= math.expm1(5) * (1 + 1e-12)


def test_the_divergence_of_two_outcomes_by_hand():
    # KL(0.2 || 0.4) = 0.2 log(1/2) + 0.8 log(0.8 / 0.6); a certain token has no other outcome
    p, q = torch.tensor([0.2, 1.0, 0.5], dtype=torch.float64).log(), torch.tensor([0.4, 1.0, 1.0]).double().log()
    expected = [0.2 * math.log(0.5) + 0.8 * math.log(0.8 / 0.6), 0.0, math.inf]
    assert binary_divergence("kl", p, q).tolist() == pytest.approx(expected)
    assert binary_divergence("total_variation", p, q).tolist() == pytest.approx([0.2, 0.0, 0.5])


def test_the_proximal_policy_is_the_sampler_the_trainer_or_in_between_by_age():
    current, sampler, ages = logs(0.4, 0.4, 0.4), logs(0.1, 0.1, 0.1), torch.tensor([0, 1, 3])
    assert torch.equal(proximal_logprobs("sampler", current, sampler, ages), sampler)
    assert torch.equal(proximal_logprobs("trainer", current, sampler, ages), current)
    # a = 0: 0.1; a = 1: half of the way, sqrt(0.1 * 0.4) = 0.2; a = 3: three quarters, 0.1^(1/4) 0.4^(3/4)
    close(proximal_logprobs("interpolated", current, sampler, ages).exp(), torch.tensor([0.1, 0.2, 0.282843]))
    assert not proximal_logprobs("trainer", current.requires_grad_(), sampler, ages).requires_grad


def test_token_weights_are_capped_one_by_one_and_sequence_weights_as_a_product():
    proximal, sampler = logs(0.4, 0.1, 0.6), logs(0.1, 0.2, 0.2)  # ratios 4, 0.5 | 3
    weights, cut = importance_weights(proximal, sampler, documents([2, 1]), "token", 3.5)
    close(weights, torch.tensor([3.5, 0.5, 3.0]))
    assert cut.tolist() == [True, False, False]
    weights, cut = importance_weights(proximal, sampler, documents([2, 1]), "sequence", 2.5)
    close(weights, torch.tensor([2.0, 2.0, 2.5]))
    assert cut.tolist() == [False, False, True]
    weights, cut = importance_weights(proximal, sampler, documents([2, 1]), "sequence", None)
    close(weights, torch.tensor([2.0, 2.0, 3.0]))
    assert not cut.any()


def test_a_sequences_weight_may_be_its_geometric_mean():
    # ratios 4 and 1 | 3: means 2 and 3
    weights, cut = importance_weights(logs(0.4, 0.2, 0.6), logs(0.1, 0.2, 0.2), documents([2, 1]), "geometric", 2.5)
    close(weights, torch.tensor([2.0, 2.0, 2.5]))
    assert cut.tolist() == [False, False, True]


def test_a_weight_is_raised_to_the_floor_and_counts_as_cut():
    weights, cut = importance_weights(logs(0.1, 0.3, 0.9), logs(0.2, 0.2, 0.2), documents([3]), "token", 2.0, 0.75)
    close(weights, torch.tensor([0.75, 1.5, 2.0]))
    assert cut.tolist() == [True, False, True]
    weights, cut = importance_weights(logs(0.1, 0.9), logs(0.2, 0.2), documents([2]), "token", None, 0.75)
    close(weights, torch.tensor([0.75, 4.5]))
    assert cut.tolist() == [True, False]


def test_a_weight_at_its_bound_is_not_cut():
    same = logs(0.2, 0.2)
    for cap, floor in ((1.0, None), (None, 1.0)):
        weights, cut = importance_weights(same, same, documents([2]), "token", cap, floor)
        assert weights.tolist() == [1.0, 1.0]
        assert not cut.any()


def test_a_bound_for_one_sign_leaves_the_other_sign_and_an_advantage_of_0_to_the_general_bound():
    proximal, sampler = logs(0.1, 0.1, 0.1, 0.9, 0.9), torch.full((5,), math.log(0.2))  # ratios 0.5 and 4.5
    advantages = torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0])
    floor = bound_by_sign(None, 1.0, has_sign(advantages, "positive"), otherwise=0.0)
    cap = bound_by_sign(4.0, 1.5, has_sign(advantages, "negative"), otherwise=math.inf)
    weights, cut = importance_weights(proximal, sampler, documents([5]), "token", cap, floor)
    close(weights, torch.tensor([1.0, 0.5, 0.5, 4.0, 1.5]))
    assert cut.tolist() == [True, False, False, True, True]


def test_without_a_bound_for_one_sign_the_general_bound_is_unchanged():
    mask = torch.tensor([True, False])
    assert bound_by_sign(2.0, None, mask, otherwise=math.inf) == 2.0
    assert bound_by_sign(None, None, mask, otherwise=math.inf) is None
    assert has_sign(torch.tensor([-1.0, 0.0, 1.0]), "any").all()


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_sum", "veto"])
@pytest.mark.parametrize(("measure", "value"), [("ratio", 1.0), ("k1", 2.0), ("k2", 2.0), ("log_ratio", -2.0)])
def test_what_lies_on_a_bound_is_kept_and_what_lies_beyond_it_is_not(measure, level, value: float):
    # one token a sequence, whose policy / sampler is 1, or e^-2: exact in floating point
    drawn = torch.tensor([-1.0, -1.0])
    other = drawn if measure == "ratio" else torch.tensor([-3.0, -3.0])

    def found(**bounds: float) -> set[bool]:
        rule = Rejection(measure=measure, level=level, **bounds)
        return set(rejected(rule, other, drawn, documents([1, 1])).tolist())

    assert found(low=value) == found(high=value) == {False}
    assert found(low=value + 1e-5) == found(high=value - 1e-5) == {True}


# Three sequences of two tokens; current / sampler: 4 and 1/4 | 1 and 1 | 2 and 2.
CURRENT, SAMPLER = logs(0.4, 0.1, 0.2, 0.2, 0.4, 0.4), logs(0.1, 0.4, 0.2, 0.2, 0.2, 0.2)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Rejection(measure="ratio", level="token", low=0.5, high=3.0), [1, 1, 0, 0, 0, 0]),
        (Rejection(measure="ratio", level="token", high=1.5), [1, 0, 0, 0, 1, 1]),
        # geometric means 1, 1, 2: the extremes of the first sequence cancel out
        (Rejection(measure="ratio", level="sequence", low=0.99, high=1.5), [0, 0, 0, 0, 1, 1]),
        # one catastrophic token takes its sequence along
        (Rejection(measure="ratio", level="veto", low=0.3), [1, 1, 0, 0, 0, 0]),
        # k1 of KL(sampler || current) is -log ratio: -1.39, 1.39 | 0, 0 | -0.69, -0.69
        (Rejection(measure="k1", level="token", high=1.0), [0, 1, 0, 0, 0, 0]),
        (Rejection(measure="k1", level="sequence", low=-0.5), [0, 0, 0, 0, 1, 1]),
        # k2: 0.96, 0.96 | 0, 0 | 0.24, 0.24
        (Rejection(measure="k2", level="token", high=0.2), [1, 1, 0, 0, 1, 1]),
        (Rejection(measure="k2", level="sequence", high=0.5), [1, 1, 0, 0, 0, 0]),
        # k3 = ratio - 1 - log ratio: 1.61, 0.64 | 0, 0 | 0.31, 0.31; means 1.13, 0, 0.31
        (Rejection(measure="k3", level="token", high=1.0), [1, 0, 0, 0, 0, 0]),
        (Rejection(measure="k3", level="sequence", high=0.3), [1, 1, 0, 0, 1, 1]),
        (Rejection(measure="k3", level="veto", high=1.0), [1, 1, 0, 0, 0, 0]),
        # products 1, 1, 4, and their logarithms; k1 is that with the other sign
        (Rejection(measure="ratio", level="sequence_sum", low=0.9, high=3.9), [0, 0, 0, 0, 1, 1]),
        (Rejection(measure="ratio", level="sequence_sum", high=4.1), [0, 0, 0, 0, 0, 0]),
        (Rejection(measure="log_ratio", level="sequence_sum", low=-0.1, high=1.38), [0, 0, 0, 0, 1, 1]),
        (Rejection(measure="k1", level="sequence_sum", low=-1.38, high=0.1), [0, 0, 0, 0, 1, 1]),
        (Rejection(measure="log_ratio", level="sequence", low=-0.1, high=0.7), [0, 0, 0, 0, 0, 0]),
        (Rejection(measure="log_ratio", level="token", low=-1.3), [0, 1, 0, 0, 0, 0]),
        # sums of k2: 1.92, 0, 0.48
        (Rejection(measure="k2", level="sequence_sum", high=1.9), [1, 1, 0, 0, 0, 0]),
        # of two outcomes, 0.1 and 0.4: 0.311 from 0.4 to 0.1, 0.226 back; 0.2 and 0.4: 0.105 and 0.092
        (Rejection(measure="binary_kl", level="token", high=0.25), [1, 1, 0, 0, 0, 0]),
        (Rejection(measure="binary_kl", level="token", high=0.1), [1, 1, 0, 0, 1, 1]),
        (Rejection(measure="binary_kl", level="token", high=0.107), [1, 1, 0, 0, 0, 0]),
    ],
)
def test_each_rule_rejects_what_lies_outside_its_bounds(rule: Rejection, expected: list[int]):
    assert rejected(rule, CURRENT, SAMPLER, documents([2, 2, 2])).int().tolist() == expected


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_sum", "veto"])
@pytest.mark.parametrize("measure", ["ratio", "log_ratio", "k1", "k2", "k3", "binary_kl"])
def test_a_rule_judges_a_sequence_alone(measure, level):
    rule = Rejection(measure=measure, level=level, low=-0.5, high=0.7)
    together = rejected(rule, CURRENT, SAMPLER, documents([2, 2, 2]))
    alone = [rejected(rule, CURRENT[at : at + 2], SAMPLER[at : at + 2], documents([2])) for at in (0, 2, 4)]
    assert together.tolist() == torch.cat(alone).tolist()


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_weight_is_of_its_sequence_alone(level):
    together, _ = importance_weights(CURRENT, SAMPLER, documents([2, 2, 2]), level, 3.0)
    alone = [
        importance_weights(CURRENT[at : at + 2], SAMPLER[at : at + 2], documents([2]), level, 3.0) for at in (0, 2, 4)
    ]
    assert together.tolist() == torch.cat([weights for weights, _ in alone]).tolist()


def test_too_old_is_above_the_bound():
    assert too_old(torch.tensor([0, 2, 3]), 2).tolist() == [False, False, True]
