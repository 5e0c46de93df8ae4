"""Each policy loss against values worked out by hand, its gradient against autograd of the plain formula, and what must
not change it."""

import inspect
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from goaly.losses.policy_losses import LOSSES, traits
from tests.unit.losses.tokens_by_hand import SAMPLED, evaluated, tokens

close = torch.testing.assert_close
RATIOS, ADVANTAGES = [1.5, 0.5, 1.5, 0.5], [2.0, 2.0, -2.0, -2.0]

# The plain formulas, of the ratios and advantages in double precision; `tokens` are one sequence.
FORMULAS = {
    "ppo": lambda r, a: -torch.minimum(r * a, r.clamp(0.8, 1.2) * a),
    "grpo": lambda r, a: -torch.minimum(r * a, r.clamp(0.8, 2.0) * a),
    "dr_grpo": lambda r, a: -torch.minimum(r * a, r.clamp(0.8, 1.2) * a),
    "dapo": lambda r, a: -torch.minimum(r * a, r.clamp(0.8, 1.28) * a),
    "cispo": lambda r, a: -r.detach().clamp(0, 5) * a * (r * SAMPLED).log(),
    "gspo": lambda r, a: -torch.minimum(_mean(r) * a, _mean(r).clamp(1 - 3e-4, 1 + 4e-4) * a),
    "gspo_token": lambda r, a: -torch.minimum(_mean_token(r) * a, _mean_token(r).clamp(1 - 3e-4, 1 + 4e-4) * a),
    "sapo": lambda r, a: -a * torch.where(a > 0, 4 / (1 + (1 - r).exp()), 4 / 1.05 / (1 + (1.05 * (1 - r)).exp())),
    "reinforce": lambda r, a: -r * a,
    "dppo": lambda r, a: torch.where((SAMPLED * (r - 1).abs() > 0.15) & ((r - 1) * a > 0), 0.0, -r * a),
}


def _mean(ratio: torch.Tensor) -> torch.Tensor:
    return ratio.log().mean().exp().expand(len(ratio))


def _mean_token(ratio: torch.Tensor) -> torch.Tensor:
    return _mean(ratio).detach() * ratio / ratio.detach()


@settings(max_examples=12, deadline=None)
@pytest.mark.parametrize("name", LOSSES.names)
@given(seed=st.integers(0, 999), count=st.integers(1, 9))
def test_values_and_gradients_are_those_of_autograd_on_the_plain_formula(name: str, seed: int, count: int):
    generator = torch.Generator().manual_seed(seed)
    ratios = (torch.randn(count, generator=generator) * 0.5).exp().tolist()
    advantages = torch.randn(count, generator=generator).tolist()
    output, gradient = evaluated(name, tokens(ratios, advantages))
    logprobs = torch.tensor([math.log(SAMPLED * ratio) for ratio in ratios], dtype=torch.float64, requires_grad=True)
    plain = FORMULAS[name]((logprobs - math.log(SAMPLED)).exp(), torch.tensor(advantages, dtype=torch.float64))
    plain.sum().backward()
    close(output.loss_P.double(), plain.detach(), atol=2e-5, rtol=2e-5)
    assert logprobs.grad is not None
    close(gradient.double(), logprobs.grad, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["ppo", "grpo", "dr_grpo", "dapo"])
def test_the_clipped_ratio_has_the_values_and_gradients_of_a_worked_example(name: str):
    # A = 2:  r = 1.5 is clipped to 1.3: -2.6, no gradient; r = 0.5 is not: -1, gradient -r A = -1
    # A = -2: r = 1.5 is not: 3, gradient 3;                r = 0.5 is clipped to 0.8: 1.6, no gradient
    output, gradient = evaluated(name, tokens(RATIOS, ADVANTAGES), clip_low=0.2, clip_high=0.3)
    close(output.loss_P, torch.tensor([-2.6, -1.0, 3.0, 1.6]))
    close(gradient, torch.tensor([0.0, -1.0, 3.0, 0.0]))
    assert output.mean["clip_fraction_high"].tolist() == [1, 0, 0, 0]
    assert output.mean["clip_fraction_low"].tolist() == [0, 0, 0, 1]


def test_a_clip_counts_only_where_it_keeps_a_token_from_going_further():
    # inside the clip, without an advantage, and on the side where the advantage leads back
    output, _ = evaluated("ppo", tokens([1.1, 0.9, 1.5, 0.5, 1.5, 0.5], [0.5, -0.5, 0.0, 0.0, -0.5, 0.5]))
    assert output.mean["clip_fraction_low"].tolist() == output.mean["clip_fraction_high"].tolist() == [0] * 6
    output, _ = evaluated("ppo", tokens([1.1, 0.9, 1.5, 0.5], [-0.5, 0.5, 0.5, -0.5]))
    assert output.mean["clip_fraction_low"].tolist() == [0, 0, 0, 1]
    assert output.mean["clip_fraction_high"].tolist() == [0, 0, 1, 0]


def test_dual_clip_bounds_what_a_negative_advantage_can_cost():
    # A = -2, r = 5: the surrogate is -r A = 10; the ceiling -3 A = 6 stands in, without gradient. A = 2 has no ceiling.
    output, gradient = evaluated("ppo", tokens([5.0, 2.0, 0.5], [-2.0, -2.0, 2.0]), dual_clip=3.0)
    close(output.loss_P, torch.tensor([6.0, 4.0, -1.0]))
    close(gradient, torch.tensor([0.0, 4.0, -1.0]))
    assert output.mean["clip_fraction_dual"].tolist() == [1, 0, 0]


def test_dual_clip_leaves_small_positive_advantages_alone():
    output, gradient = evaluated("ppo", tokens([1.1], [0.5]), dual_clip=3.0)
    close(output.loss_P, torch.tensor([-0.55]))
    close(gradient, torch.tensor([-0.55]))
    assert output.mean["clip_fraction_dual"].tolist() == [0]


def test_dppo_masks_nothing_without_an_advantage_and_nothing_that_moves_against_it():
    # probabilities 0.38 and 0.02 instead of 0.2: both further than 0.15
    output, gradient = evaluated("dppo", tokens([1.9, 0.1, 1.9, 0.1], [0.0, 0.0, -1.0, 1.0]))
    assert output.mean["clip_fraction"].tolist() == [0] * 4
    close(gradient, torch.tensor([0.0, 0.0, 1.9, -0.1]))


def test_dppo_has_the_values_of_its_published_mask():
    # written out: dropped where A > 0 and pi - mu > high, or A < 0 and pi - mu < -low; kept at the bounds' other sides
    ratios, advantages = [1.9, 2.3, 0.2, 0.1, 1.1, 2.3, 0.1], [2.0, 2.0, -1.0, -1.0, 1.0, -1.0, 1.0]
    moved, pushed = SAMPLED * (np.array(ratios) - 1), np.array(advantages)
    for low, high in ((0.15, 0.15), (0.17, 0.25), (0.2, 0.28)):
        dropped = ((pushed > 0) & (moved > high)) | ((pushed < 0) & (moved < -low))
        output, gradient = evaluated("dppo", tokens(ratios, advantages), threshold=low, threshold_high=high)
        golden = np.where(dropped, 0, -np.array(ratios) * pushed)
        assert output.loss_P.tolist() == pytest.approx(golden.tolist(), abs=1e-5)
        assert gradient.tolist() == pytest.approx(golden.tolist(), abs=1e-5)  # the gradient of r by log pi is r
        assert output.mean["clip_fraction"].tolist() == dropped.tolist()


def test_cispo_counts_what_is_above_its_default_clip():
    output, _ = evaluated("cispo", tokens([4.9, 5.5], [1.0, 1.0]))
    assert output.mean["clip_fraction_high"].tolist() == [0, 1]


def test_grpo_leaves_room_above_for_stale_data_and_none_below():
    output, gradient = evaluated("grpo", tokens([1.9, 2.1, 0.7], [1.0, 1.0, -1.0]))
    close(output.loss_P, torch.tensor([-1.9, -2.0, 0.8]))
    close(gradient, torch.tensor([-1.9, 0.0, 0.0]))


def test_dapo_leaves_more_room_above_than_below():
    output, _ = evaluated("dapo", tokens([1.25, 1.3], [1.0, 1.0]))
    close(output.loss_P, torch.tensor([-1.25, -1.28]))


def test_cispo_clips_the_weight_and_keeps_every_gradient():
    # r = 8 has weight min(8, 5) = 5: loss -5 A log p, gradient -5 A; r = 0.5 keeps its weight
    output, gradient = evaluated("cispo", tokens([8.0, 0.5], [1.0, -2.0]))
    close(output.loss_P, torch.tensor([-5 * math.log(1.6), math.log(0.1)]))
    close(gradient, torch.tensor([-5.0, 1.0]))
    assert output.mean["clip_fraction_high"].tolist() == [1, 0]
    assert output.mean["clip_fraction_low"].tolist() == [0, 0]
    # with a lower bound of 0.75, r = 0.5 has that weight, whatever the sign of its advantage
    output, gradient = evaluated("cispo", tokens([8.0, 0.5, 0.5], [1.0, -2.0, 2.0]), clip_low=0.25)
    close(gradient, torch.tensor([-5.0, 1.5, -1.5]))
    assert output.mean["clip_fraction_high"].tolist() == [1, 0, 0]
    assert output.mean["clip_fraction_low"].tolist() == [0, 1, 1]


def test_gspo_has_one_ratio_a_sequence_the_geometric_mean():
    # first sequence: sqrt(4 * 1) = 2, clipped to 1.5 for A = 1: -1.5 each, no gradient.
    # second: sqrt(0.25 * 1) = 0.5 with A = 1: -0.5 each; d/dlogp of the sum of both tokens: -(0.5/2 + 0.5/2) = -0.5
    given = tokens([4.0, 1.0, 0.25, 1.0], [1.0] * 4, lengths=[2, 2])
    output, gradient = evaluated("gspo", given, clip_low=0.5, clip_high=0.5)
    close(output.loss_P, torch.tensor([-1.5, -1.5, -0.5, -0.5]))
    close(gradient, torch.tensor([0.0, 0.0, -0.5, -0.5]))


def test_gspo_token_has_the_sequences_ratio_and_each_tokens_own_advantage():
    # sqrt(0.25 * 1) = 0.5 for both: -0.5 A, and the gradient too, of each token's own A; gspo would give both the mean
    given = tokens([0.25, 1.0], [1.0, 3.0])
    output, gradient = evaluated("gspo_token", given, clip_low=0.5, clip_high=0.5)
    close(output.loss_P, torch.tensor([-0.5, -1.5]))
    close(gradient, torch.tensor([-0.5, -1.5]))
    close(evaluated("gspo", given, clip_low=0.5, clip_high=0.5)[1], torch.tensor([-1.0, -1.0]))
    # the ratio sqrt(4 * 1) = 2 is clipped for A > 0 only
    _, gradient = evaluated("gspo_token", tokens([4.0, 1.0], [1.0, -1.0]), clip_low=0.5, clip_high=0.5)
    close(gradient, torch.tensor([0.0, 2.0]))


def test_sapo_and_gspo_are_means_over_sequences_as_in_their_papers():
    assert {name for name in LOSSES.names if traits(name).aggregation == "sequence_mean"} == {
        "gspo",
        "gspo_token",
        "sapo",
    }


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_a_sequences_ratio_is_over_its_kept_tokens_and_a_token_left_out_has_no_gradient(name: str):
    # kept are ratios 4 and 1: sqrt(4) = 2. The token of ratio 0.01 would make it 0.34
    out = torch.tensor([False, True, False, True])
    given = tokens([4.0, 0.01, 1.0, 9.0], [-1.0] * 4, lengths=[3, 1])
    found = LOSSES.bound(name, {"clip_low": 0.5, "clip_high": 0.5})(given.without(out)).loss_P[~out]
    close(found, torch.tensor([2.0, 2.0]))
    (gradient,) = torch.autograd.grad(found.sum(), given.logprobs_P)
    close(gradient, torch.tensor([2.0, 0.0, 2.0, 0.0]))  # as if the sequence were its kept tokens


def test_a_ratio_or_a_distance_at_its_bound_is_not_beyond_it():
    given = tokens([2.0], [1.0])
    moved = (given.logprobs_P.exp() - given.proximal_logprobs_P.exp()).abs().item()
    output, gradient = evaluated("dppo", given, threshold=moved)
    assert output.mean["clip_fraction"].tolist() == [0]
    close(gradient, torch.tensor([-2.0]))
    costly = tokens([2.0], [-1.0])
    output, gradient = evaluated("ppo", costly, dual_clip=costly.ratio_P.item())
    assert output.mean["clip_fraction_dual"].tolist() == [0]
    close(gradient, torch.tensor([2.0]))
    for name in ("grpo", "cispo"):
        output, _ = evaluated(name, tokens([1.0, 1.0], [1.0, -1.0]), clip_low=0.0, clip_high=0.0)
        assert output.mean["clip_fraction_low"].tolist() == output.mean["clip_fraction_high"].tolist() == [0, 0]


def test_a_token_that_is_left_out_stays_out_when_another_is():
    given = tokens([1.0, 1.0, 1.0], [1.0, 1.0, 1.0])
    out = given.without(torch.tensor([True, False, False])).without(torch.tensor([False, True, False]))
    assert out.kept_P.tolist() == [False, False, True]


def test_sapo_is_reinforce_where_the_ratio_is_one_and_fades_away_from_it():
    # at r = 1 the gate is 4/t * 1/2 = 2/t and its slope 4/t * t/4 = 1: the gradient is -A, as reinforce's
    output, gradient = evaluated("sapo", tokens([1.0, 1.0], [1.0, -1.0]), positive=2.0, negative=4.0)
    close(output.loss_P, torch.tensor([-1.0, 0.5]))
    close(gradient, torch.tensor([-1.0, 1.0]))
    # r = 3, t = 2: sigmoid(4) = 0.9820138, slope 4 s (1 - s) = 0.0706508, times r
    _, far = evaluated("sapo", tokens([3.0], [1.0]), positive=2.0)
    close(far, torch.tensor([-3 * 0.0706508]), atol=1e-5, rtol=1e-4)


def test_dppo_masks_by_how_far_the_probability_moved_not_by_the_ratio():
    # sampled at 0.2. r = 2 moves it by 0.2 > 0.15: masked for A > 0, kept for A < 0, which pulls it back.
    # r = 1.5 moves it by 0.1, within the threshold, though PPO would have clipped it.
    output, gradient = evaluated("dppo", tokens([2.0, 2.0, 1.5], [1.0, -1.0, 1.0]))
    close(output.loss_P, torch.tensor([0.0, 2.0, -1.5]))
    close(gradient, torch.tensor([0.0, 2.0, -1.5]))
    assert output.mean["clip_fraction"].tolist() == [1, 0, 0]


def test_dppo_by_kl_uses_the_divergence_of_two_outcomes():
    # KL(0.2 || 0.4) = 0.2 log(1/2) + 0.8 log(0.8/0.6) = -0.138629 + 0.230146 = 0.091517
    for threshold, expected in ((0.0915, 0.0), (0.0916, -2.0)):
        output, _ = evaluated("dppo", tokens([2.0], [1.0]), divergence="kl", threshold=threshold)
        close(output.loss_P, torch.tensor([expected]))


@pytest.mark.parametrize("name", LOSSES.names)
def test_a_loss_does_not_depend_on_what_stands_beside_a_sequence(name: str):
    alone, gradient = evaluated(name, tokens([1.4, 0.6, 1.1], [1.0, -1.0, 0.5]))
    among, gradients = evaluated(name, tokens([9.0, 1.4, 0.6, 1.1, 0.1], [3.0, 1.0, -1.0, 0.5, 3.0], lengths=[1, 3, 1]))
    assert torch.equal(among.loss_P[1:4], alone.loss_P)
    assert torch.equal(gradients[1:4], gradient)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ppo", {"clip_low": 0.0, "clip_high": 0.0, "dual_clip": 1.0}),
        ("grpo", {"clip_low": 0.0, "clip_high": 0.0}),
        ("dr_grpo", {"clip_low": 0.0, "clip_high": 0.0}),
        ("dapo", {"clip_low": 0.0, "clip_high": 0.0}),
        ("cispo", {"clip_low": 0.0, "clip_high": 0.0}),
        ("gspo", {"clip_low": 0.0, "clip_high": 0.0}),
        ("gspo_token", {"clip_low": 0.0, "clip_high": 0.0}),
        ("sapo", {"positive": 9.0, "negative": 0.1}),
        ("dppo", {"divergence": "kl", "threshold": 1e-9, "threshold_high": 1e-9}),
        ("reinforce", {}),
    ],
)
def test_no_option_of_a_registered_loss_has_an_effect_where_the_ratio_is_one(name: str, options: dict[str, object]):
    assert traits(name).bounds_ratio
    assert options.keys() == inspect.signature(LOSSES.find(name)).parameters.keys() - {"tokens"}
    _, gradient = evaluated(name, tokens([1.0, 1.0], [1.5, -0.5], lengths=[1, 1]), **options)
    close(gradient, torch.tensor([-1.5, 0.5]))


@pytest.mark.parametrize("name", LOSSES.names)
def test_the_ratio_of_a_loss_is_the_tokens_or_the_sequences_as_its_traits_say(name: str):
    _, (alone, *_) = evaluated(name, tokens([1.0002, 1.0], [1.0, 1.0]))
    _, (among, *_) = evaluated(name, tokens([1.0002, 1.0004], [1.0, 1.0]))
    assert torch.equal(alone, among) is (traits(name).ratio == "token")


@pytest.mark.parametrize("name", LOSSES.names)
def test_no_tokens_are_no_loss(name: str):
    output, gradient = evaluated(name, tokens([], [], lengths=[0]))
    assert output.loss_P.shape == gradient.shape == (0,)
