"""The objective by hand: every factor is there, and the denominator is that of the batch."""

import math

import pytest
import torch

from goaly.base.errors import SchemaError
from goaly.losses.objective import Likelihood, PolicyObjective, finish
from goaly.losses.settings import LossSettings, Rejection
from goaly.losses.tokens import Tokens
from goaly.trajectory import PackedRows
from tests.unit.losses.tokens_by_hand import SAMPLED, columns, objective

close = torch.testing.assert_close


def share_clipped(tokens: Tokens, *, most: float = 1.5) -> torch.Tensor:
    """A user's own loss."""
    return -tokens.ratio_P.clamp(max=most) * tokens.advantages_P


def meaned(tokens: Tokens) -> torch.Tensor:
    """A user's mistake: the mean is the aggregation's business."""
    return -(tokens.ratio_P * tokens.advantages_P).mean()


def test_grpo_is_the_clipped_surrogate_and_a_plain_sum():
    # ratios 2.5 and 0.5 with A = 2: -2 * 2 and -2 * 0.5
    part, gradient = objective(LossSettings(), [2.5, 0.5], columns([1, 1], [2.0, 2.0]))
    assert part.total.item() == pytest.approx(-4.0 - 1.0)
    close(gradient, torch.tensor([0.0, -1.0]))
    assert part.count is None
    close(part.maximum["ratio_max"], torch.tensor([2.5, 0.5]))
    close(part.mean["sampler_kl"], torch.tensor([1.5 - math.log(2.5), -0.5 + math.log(2)]))


def test_with_the_trainer_as_proximal_policy_a_capped_weight_scales_the_gradient():
    # current / sampler 0.5, 1, 6: the ratio is 1, the weights are 0.5, 1 and 2
    batch = columns([3], [1.0, -3.0, 1.0])
    part, gradient = objective(LossSettings(proximal="trainer", importance_cap=2.0), [0.5, 1.0, 6.0], batch)
    close(gradient, torch.tensor([-0.5, 3.0, -2.0]))
    assert part.total.item() == pytest.approx(0.5)
    assert part.mean["importance_truncated"].tolist() == [0, 0, 1]
    _, gradient = objective(LossSettings(proximal="trainer", importance_cap=None), [0.5, 1.0, 6.0], batch)
    close(gradient, torch.tensor([-0.5, 3.0, -6.0]))


def test_after_a_batchs_first_step_the_proximal_policy_is_that_of_before_it():
    # current / sampler 3, before / sampler 2: the ratio is 1.5, the weight 2. A = 1: 1.2 * 2, and no gradient;
    # A = -1: -1.5 * 2 * -1 = 3, and so is the gradient
    batch = columns([2], [1.0, -1.0], proximal_logprobs=[math.log(2 * SAMPLED)] * 2)
    settings = LossSettings(name="ppo", proximal="trainer", importance_cap=None)
    assert PolicyObjective(settings).needs_proximal
    part, gradient = objective(settings, [3.0, 3.0], batch)
    assert part.total.item() == pytest.approx(-2.4 + 3.0)
    close(gradient, torch.tensor([0.0, 3.0]))
    close(part.mean["importance_mean"], torch.tensor([2.0, 2.0]))
    for other in ("sampler", "interpolated"):
        assert not PolicyObjective(LossSettings(proximal=other)).needs_proximal


@pytest.mark.parametrize("name", ["reinforce", "grpo"])
@pytest.mark.parametrize("proximal", ["sampler", "trainer", "interpolated"])
def test_unclipped_and_uncapped_the_gradient_is_the_same_whatever_the_proximal_policy(name: str, proximal):
    # ratio * weight is current / sampler, so the gradient is -(current / sampler) A
    options = {"clip_low": 1.0, "clip_high": 99.0} if name == "grpo" else {}
    more = {"importance_cap": None} if proximal != "sampler" else {}
    settings = LossSettings(name=name, options=options, proximal=proximal, **more)
    batch = columns([2, 1], [1.0, -2.0, 3.0], versions=[5, 3, 0])
    _, gradient = objective(settings, [1.5, 0.25, 4.0], batch, policy_version=5)
    close(gradient, torch.tensor([-1.5, 0.5, -12.0]))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum"])
@pytest.mark.parametrize("importance", ["token", "sequence"])
@pytest.mark.parametrize("proximal", ["trainer", "interpolated"])
def test_corrected_gradients_are_those_of_autograd_on_the_plain_formula(aggregation, importance, proximal):
    lengths, generator = [3, 1, 4], torch.Generator().manual_seed(5)
    ratios, befores, references = torch.randn(3, 8, generator=generator, dtype=torch.float64).mul(0.3).exp()
    advantages, versions = torch.randn(8, generator=generator), torch.randint(0, 6, (8,), generator=generator)
    batch = columns(lengths, advantages.tolist(), versions=versions.tolist())
    batch["reference_logprobs"] = (SAMPLED * references).log().float()
    if proximal == "trainer":
        batch["proximal_logprobs"] = (SAMPLED * befores).log().float()
    length = {"constant_length": 5} if aggregation == "sequence_sum" else {}
    rule = Rejection(measure="k2", level="token", high=0.08, policy="current")
    settings = LossSettings(
        name="ppo",
        proximal=proximal,
        importance=importance,
        importance_cap=1.1,
        aggregation=aggregation,
        rejections=(rule,),
        max_age=4,
        kl_coef=0.2,
        **length,
    )
    part, gradient = objective(settings, ratios.tolist(), batch, policy_version=6)

    log_ratio = ratios.log().requires_grad_()
    age = 6 - versions.double()
    anchor = befores.log() if proximal == "trainer" else age / (age + 1) * log_ratio.detach()
    weight = torch.cat([w.sum().expand(len(w)) for w in anchor.split(lengths)]) if importance == "sequence" else anchor
    ratio = (log_ratio - anchor).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    distance = references.log() - log_ratio
    value = -weight.exp().clamp(max=1.1) * surrogate + 0.2 * (distance.exp() - 1 - distance)
    kept = (log_ratio.detach().square() / 2 <= 0.08) & (age <= 4)
    assert 0 < kept.sum() < 8
    share = {
        "token_mean": [1] * 8,
        "sequence_mean": [1 / n for n in lengths for _ in range(n)],
        "sequence_sum": [0.2] * 8,
    }
    plain = (torch.tensor(share[aggregation]) * kept * value).sum()
    plain.backward()
    assert part.total.item() == pytest.approx(plain.item(), abs=1e-5)
    assert log_ratio.grad is not None
    close(gradient.double(), log_ratio.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", math.log(2), 1.0), ("k2", math.log(2) ** 2 / 2, math.log(2)), ("k3", 0.5 - 1 + math.log(2), 1 - 0.5)],
)
def test_the_kl_term_is_its_estimate_times_its_coefficient(estimator, value: float, slope: float):
    # current 0.2, reference 0.1; d/dlogp: k1 1, k2 the difference, k3 1 - reference / current
    batch = columns([1], [0.0], reference_logprobs=[math.log(SAMPLED / 2)])
    settings = LossSettings(kl_coef=0.1, kl_estimator=estimator)
    part, gradient = objective(settings, [1.0], batch)
    assert part.total.item() == pytest.approx(0.1 * value)
    assert gradient.item() == pytest.approx(0.1 * slope)
    assert part.mean["kl_reference"].item() == pytest.approx(value)


def test_the_entropy_is_taken_off_the_loss_and_reported():
    logprobs = torch.tensor([math.log(SAMPLED)] * 2, requires_grad=True)
    entropies = torch.tensor([0.5, 2.0], requires_grad=True)
    batch = columns([2], [1.0, 1.0])
    part = PolicyObjective(LossSettings(entropy_coef=0.1))(logprobs, entropies, batch, 0)
    assert part.total.item() == pytest.approx(-2.0 - 0.1 * 2.5)
    assert part.mean["entropy"].tolist() == [0.5, 2.0]
    close(torch.autograd.grad(part.total, entropies)[0], torch.tensor([-0.1, -0.1]))
    without = PolicyObjective(LossSettings())(logprobs, entropies, batch, 0)
    assert without.mean["entropy"].tolist() == [0.5, 2.0]
    assert torch.autograd.grad(without.total, entropies, allow_unused=True) == (None,)  # costs nothing


@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_what_is_drawn_under_a_form_has_the_expected_gradient_of_the_policy_among_what_the_form_allows(kl_coef):
    logits_V, reference_V = torch.randn(7, requires_grad=True), torch.randn(7).log_softmax(0)
    advantages_V, allowed = torch.randn(7), torch.tensor([0, 2, 3])
    logprobs_V = logits_V.log_softmax(0)
    probs_A = logprobs_V.detach().exp()[allowed]
    drawn_A = probs_A / probs_A.sum()  # under the form
    batch = {
        "sampler_logprobs": logprobs_V.detach()[allowed],
        "sampler_versions": torch.zeros(3, dtype=torch.int32),
        "advantages": advantages_V[allowed],
        "documents": torch.arange(3),
        "reference_logprobs": reference_V[allowed],
        "form_weights": probs_A / drawn_A,
    }
    settings = LossSettings(name="reinforce", kl_coef=kl_coef, kl_estimator="k3", aggregation="sequence_mean")

    def loss(count_A: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = [
            PolicyObjective(settings)(
                logprobs_V[allowed[at, None]], torch.zeros(1), {key: v[at, None] for key, v in batch.items()}, 0
            )
            for at in range(3)
        ]
        assert all(("form_weight" in part.mean) == ("form_weights" in batch) for part in parts)
        return sum(count * part.total for count, part in zip(count_A, parts, strict=True))  # ty: ignore

    (found,) = torch.autograd.grad(loss(drawn_A, batch), logits_V, retain_graph=True)
    del batch["form_weights"]
    (expected,) = torch.autograd.grad(loss(probs_A, batch), logits_V)
    torch.testing.assert_close(found, expected)


def test_the_entropy_is_not_importance_weighted():
    batch = columns([1], [1.0])
    entropies = torch.tensor([1.0], requires_grad=True)
    part = PolicyObjective(LossSettings(name="reinforce", proximal="trainer", entropy_coef=0.1))(
        torch.tensor([math.log(1.5 * SAMPLED)], requires_grad=True), entropies, batch, 0
    )
    assert part.total.item() == pytest.approx(-1.5 - 0.1)
    assert torch.autograd.grad(part.total, entropies)[0].item() == pytest.approx(-0.1)


def test_gspo_with_a_geometric_weight_is_the_geometric_mean_of_the_whole_way_from_the_sampler():
    # current / sampler 4 and 1, before / sampler 2 and 1: ratio sqrt(2) times weight sqrt(2)
    batch = columns([2], [1.0, 1.0], proximal_logprobs=[math.log(2 * SAMPLED), math.log(SAMPLED)])
    settings = LossSettings(
        name="gspo",
        options={"clip_low": 1.0, "clip_high": 9.0},
        proximal="trainer",
        importance="geometric",
        importance_cap=None,
    )
    part, gradient = objective(settings, [4.0, 1.0], batch)
    assert part.total.item() == pytest.approx(-2.0)  # a mean over the sequence
    close(gradient, torch.tensor([-1.0, -1.0]))


def test_the_floor_of_the_importance_weight_keeps_a_lesson_of_what_became_unlikely():
    settings = LossSettings(proximal="trainer", importance_floor=0.5)
    part, gradient = objective(settings, [0.1, 1.0, 6.0], columns([3], [1.0, 1.0, 1.0]))
    close(gradient, torch.tensor([-0.5, -1.0, -2.0]))
    assert part.mean["importance_truncated"].tolist() == [1, 0, 1]


def test_the_denominator_is_the_batchs_trained_tokens_or_sequences():
    packed = PackedRows(rows=None, batch_trained_tokens=7, batch_sequences=3)  # type: ignore[arg-type]
    assert PolicyObjective(LossSettings()).denominator(packed) == Likelihood().denominator(packed) == 7
    assert PolicyObjective(LossSettings(name="gspo")).denominator(packed) == 3
    assert PolicyObjective(LossSettings(name="dr_grpo", constant_length=5)).denominator(packed) == 3


def test_likelihood_is_the_negative_log_likelihood_and_reports_the_entropy():
    logprobs = torch.tensor([-0.5, -2.0], requires_grad=True)
    part = Likelihood()(logprobs, torch.tensor([0.25, 1.0]), {}, 0)
    part.total.backward()
    assert part.total.item() == 2.5
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, -1.0]
    assert {name: value_P.tolist() for name, value_P in part.mean.items()} == {"entropy": [0.25, 1.0]}


@pytest.mark.parametrize(
    ("mean", "square", "deviation", "effective"),
    [(2.0, 8.0, 2.0, 0.5), (1.5, 2.25, 0.0, 1.0), (1.0, 2.0, 1.0, 0.5)],  # ratios 0 and 4; equal ones; 2 and 0
)
def test_the_ratios_have_the_populations_deviation_and_their_effective_share(mean, square, deviation, effective):
    assert finish({"ratio_mean": mean, "ratio_square": square}) == {
        "ratio_mean": mean,
        "ratio_std": deviation,
        "effective_sample_size": effective,
    }
    assert finish({"entropy": 1.0}) == {"entropy": 1.0}  # supervised training has no ratios


def test_a_loss_of_ones_own_is_found_by_its_path_and_takes_its_options():
    mine = f"{__name__}:share_clipped"
    settings = LossSettings(name=mine, options={"most": 1.25}, aggregation="sequence_mean")
    assert settings.problems("loss.") == []
    part, gradient = objective(settings, [2.0, 0.5], columns([2], [1.0, 1.0]))
    close(gradient, torch.tensor([0.0, -0.25]))
    assert {"ratio_mean", "sampler_kl", "entropy"} <= part.mean.keys()


def test_a_loss_that_is_not_one_value_a_token_is_refused():
    with pytest.raises(ValueError, match=r"meaned: returned a tensor \(\), must be \(2,\): one value for each token"):
        objective(LossSettings(name=f"{__name__}:meaned"), [1.0, 1.0], columns([2], [1.0, 1.0]))


def test_a_missing_column_is_named_with_what_the_batch_holds():
    with pytest.raises(SchemaError, match="loss grpo: `reference_logprobs` is missing; the batch holds sampler_logp"):
        objective(LossSettings(kl_coef=0.1), [1.0], columns([1], [1.0]))
    with pytest.raises(SchemaError, match="loss grpo: `truncated` is missing"):
        objective(LossSettings(mask_truncated=True), [1.0], columns([1], [1.0]))
