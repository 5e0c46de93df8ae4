"""The objective by hand: every factor is there, what is rejected is gone, what would have no effect is refused."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from goaly.config.check import check
from goaly.config.schema import plain
from goaly.errors import SchemaError
from goaly.losses.objective import Likelihood, PolicyObjective, finish
from goaly.losses.policy import LOSSES
from goaly.losses.settings import LossSettings, Rejection
from goaly.losses.tokens import Tokens
from goaly.trajectory import PackedRows
from tests.unit.losses.tokens_by_hand import SAMPLED, columns, objective

close = torch.testing.assert_close
NONE_LEFT = Rejection(measure="ratio", level="token", high=3.0, policy="current")


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
    # OB-1: ratio * weight is current / sampler, so the gradient is -(current / sampler) A
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


def test_interpolated_decoupled_ppo_by_hand():
    # current / sampler = 4, age 1: half of the way is 2. A = 1: the ratio 4 / 2 = 2 is clipped to 1.2, the weight is 2.
    # A = -1: nothing is clipped, -2 * 2 * -1 = 4, and so is the gradient.
    settings = LossSettings(name="ppo", proximal="interpolated", importance_cap=None)
    part, gradient = objective(settings, [4.0, 4.0], columns([2], [1.0, -1.0], versions=[6, 6]), policy_version=7)
    assert part.total.item() == pytest.approx(-2.4 + 4.0)
    close(gradient, torch.tensor([0.0, 4.0]))
    # at age 0 it is PPO
    batch = columns([2], [1.0, -1.0], versions=[7, 7])
    part, _ = objective(settings, [4.0, 4.0], batch, policy_version=7)
    assert part.total.item() == pytest.approx(-1.2 + 4.0)


def test_sequence_weights_are_one_for_all_of_a_sequence():
    # weights: 2 * 0.25 = 0.5 for the first sequence, 3 capped to 2 for the second
    settings = LossSettings(proximal="trainer", importance="sequence")
    _, gradient = objective(settings, [2.0, 0.25, 3.0], columns([2, 1], [1.0, 1.0, 1.0]))
    close(gradient, torch.tensor([-0.5, -0.5, -2.0]))


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


def test_a_rejected_token_adds_neither_loss_nor_gradient_nor_kl():
    batch = columns([1, 1], [1.0, 1.0], reference_logprobs=[-1.0, -1.0])
    settings = LossSettings(kl_coef=0.5, rejections=(NONE_LEFT,))
    part, gradient = objective(settings, [1.0, 4.0], batch)
    alone, gradient_alone = objective(settings, [1.0], {key: column[:1] for key, column in batch.items()})
    assert part.total.item() == pytest.approx(alone.total.item())  # OB-2
    close(gradient, torch.tensor([gradient_alone.item(), 0.0]))
    assert part.mean["rejected_ratio_token_current"].tolist() == part.mean["rejected"].tolist() == [0, 1]


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
        assert by_entropy[outside].tolist() == [0, 0, 0]  # OB-2
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
    rules = (Rejection(measure="ratio", level="token", high=2.0), NONE_LEFT)
    part, gradient = objective(LossSettings(proximal="trainer", rejections=rules), [1.0, 4.0], batch)
    assert part.mean["rejected_ratio_token"].tolist() == [1, 0]
    assert part.mean["rejected_ratio_token_current"].tolist() == [0, 1]
    assert gradient.tolist() == [0, 0]
    # in a batch's first step both are the same
    del batch["proximal_logprobs"]
    part, _ = objective(LossSettings(proximal="trainer", rejections=rules), [1.0, 4.0], batch)
    assert part.mean["rejected_ratio_token"].tolist() == part.mean["rejected_ratio_token_current"].tolist() == [0, 1]


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


def test_the_entropy_is_not_importance_weighted():
    batch = columns([1], [1.0])
    entropies = torch.tensor([1.0], requires_grad=True)
    part = PolicyObjective(LossSettings(name="reinforce", proximal="trainer", entropy_coef=0.1))(
        torch.tensor([math.log(1.5 * SAMPLED)], requires_grad=True), entropies, batch, 0
    )
    assert part.total.item() == pytest.approx(-1.5 - 0.1)
    assert torch.autograd.grad(part.total, entropies)[0].item() == pytest.approx(-0.1)


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


def test_gspo_with_a_geometric_weight_is_the_geometric_mean_of_the_whole_way_from_the_sampler():
    # OB-1: current / sampler 4 and 1, before / sampler 2 and 1: ratio sqrt(2) times weight sqrt(2)
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


def test_what_two_rules_reject_is_gone_once_and_reported_for_each():
    batch = columns([1, 2], [1.0, 1.0, 1.0], versions=[4, 4, 1])
    settings = LossSettings(name="reinforce", max_age=2, rejections=(NONE_LEFT,))
    part, gradient = objective(settings, [4.0, 1.0, 4.0], batch, policy_version=4)
    close(gradient, torch.tensor([0.0, -1.0, 0.0]))
    assert part.mean["rejected_ratio_token_current"].tolist() == [1, 0, 1]
    assert part.mean["rejected_max_age"].tolist() == [0, 0, 1]
    assert part.mean["rejected"].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("aggregation", "before", "after", "count"),
    [
        # A = 1, ratio 1, one of three tokens rejected; sequences of 2 and 1: the second is gone
        ("token_mean", [-1, -1, 0], [-1, -1, 0], 2),
        ("sequence_mean", [-1 / 2, -1 / 2, 0], [-1 / 2, -1 / 2, 0], 1),
        ("sequence_sum", [-1 / 8, -1 / 8, 0], [-1 / 8, -1 / 8, 0], 1),
    ],
)
def test_the_denominator_after_rejection_counts_what_is_kept(aggregation, before, after, count: int):
    length = {"constant_length": 8} if aggregation == "sequence_sum" else {}
    settings = LossSettings(name="reinforce", aggregation=aggregation, rejections=(NONE_LEFT,), **length)
    batch = columns([2, 1], [1.0, 1.0, 1.0])
    part, gradient = objective(settings, [1.0, 1.0, 4.0], batch)
    close(gradient, torch.tensor(before, dtype=torch.float32))
    assert part.count is None
    part, gradient = objective(dataclasses.replace(settings, denominator="after"), [1.0, 1.0, 4.0], batch)
    close(gradient, torch.tensor(after, dtype=torch.float32))
    assert part.count == count


def test_a_sequence_counted_after_rejection_is_as_long_as_what_is_kept_of_it():
    settings = LossSettings(name="reinforce", aggregation="sequence_mean", rejections=(NONE_LEFT,), denominator="after")
    part, gradient = objective(settings, [1.0, 4.0, 1.0], columns([3], [1.0, 1.0, 1.0]))
    close(gradient, torch.tensor([-1 / 2, 0.0, -1 / 2]))
    assert part.count == 1


def test_the_denominator_is_the_batchs_trained_tokens_or_sequences():
    packed = PackedRows(rows=None, batch_trained_tokens=7, batch_sequences=3)  # type: ignore[arg-type]
    assert PolicyObjective(LossSettings()).denominator(packed) == Likelihood().denominator(packed) == 7
    assert PolicyObjective(LossSettings(name="gspo")).denominator(packed) == 3
    assert PolicyObjective(LossSettings(name="dr_grpo", constant_length=5)).denominator(packed) == 3


def test_likelihood_is_the_negative_log_likelihood():
    logprobs = torch.tensor([-0.5, -2.0], requires_grad=True)
    part = Likelihood()(logprobs, torch.zeros(2), {}, 0)
    part.total.backward()
    assert part.total.item() == 2.5
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, -1.0]


def test_the_effective_sample_size_is_one_for_equal_ratios_and_less_otherwise():
    assert finish({"ratio_mean": 1.3, "ratio_square": 1.69})["effective_sample_size"] == pytest.approx(1.0)
    # ratios 2 and 0: mean 1, mean square 2, half of the samples count
    assert finish({"ratio_mean": 1.0, "ratio_square": 2.0}) == {
        "ratio_mean": 1.0,
        "ratio_std": 1.0,
        "effective_sample_size": 0.5,
    }


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


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            dict(name="pop"),
            "name=pop: there is no such loss; known are ppo, grpo, dr_grpo, dapo, cispo, gspo, gspo_token, sapo, "
            "reinforce, dppo, and your own as package.module:function",
        ),
        (
            dict(name="sapo", options={"clip_high": 0.3}),
            "options.clip_high=0.3: the loss sapo does not take it, its options are positive, negative; ppo, grpo, "
            "dr_grpo, dapo, cispo, gspo, gspo_token take it",
        ),
        (dict(options={"clip_low": 2}), "options.clip_low=2: must be between 0 and 1"),
        (dict(options={"clip_low": "x"}), "options.clip_low=x: must be a number"),
        (dict(name="ppo", options={"dual_clip": 0.5}), "options.dual_clip=0.5: must be at least 1, or null"),
        (
            dict(name="dppo", options={"divergence": "js"}),
            "options.divergence=js: must be one of total_variation, kl",
        ),
        (dict(name="dr_grpo"), "constant_length: is not set, the aggregation sequence_sum needs it"),
        (dict(constant_length=9), "constant_length=9: has no effect, the aggregation is token_mean"),
        (dict(importance_cap=0, proximal="trainer"), "importance_cap=0: must be above 0, or null"),
        (
            dict(importance_cap=math.inf, proximal="trainer"),
            "importance_cap=inf: must be a finite number, or null",
        ),
        (
            dict(name="gspo", proximal="trainer"),
            "importance=token: must be sequence or geometric, because with loss.proximal=trainer the weight goes with "
            "the ratio, and the loss gspo has one ratio a sequence",
        ),
        (
            dict(importance="sequence"),
            "importance=sequence: has no effect, with loss.proximal=sampler the weight is 1",
        ),
        (
            dict(importance_cap=5.0),
            "importance_cap=5.0: has no effect, with loss.proximal=sampler the weight is 1",
        ),
        (dict(rejections=(NONE_LEFT, NONE_LEFT)), "rejections.1: ratio by token is there already"),
        (
            dict(importance_floor=0.5),
            "importance_floor=0.5: has no effect, with loss.proximal=sampler the weight is 1",
        ),
        (
            dict(proximal="trainer", importance_floor=2.0),
            "importance_floor=2.0: must be below loss.importance_cap=2.0",
        ),
        (dict(importance_floor=0, proximal="trainer"), "importance_floor=0: must be above 0, or null"),
        (
            dict(rejections=(Rejection(measure="ratio", level="token", high=3.0),)),
            "rejections.0.policy=proximal: has no effect, with loss.proximal=sampler the proximal policy is the "
            "sampler itself; current compares the policy that is trained",
        ),
        (dict(entropy_coef=-1.0), "entropy_coef=-1.0: must be at least 0"),
        (dict(max_age=-1), "max_age=-1: must be at least 0, or null"),
        (dict(denominator="after"), "denominator=after: has no effect, nothing is left out"),
        (dict(kl_coef=-1.0), "kl_coef=-1.0: must be at least 0"),
        (dict(kl_coef=math.inf), "kl_coef=inf: must be a finite number"),
        (dict(kl_estimator="k1"), "kl_estimator=k1: has no effect, loss.kl_coef is 0"),
    ],
)
def test_settings_that_can_not_work_or_have_no_effect_are_refused(given: dict[str, Any], problem: str):
    assert check(LossSettings, plain(given), "loss")[1] == [f"loss.{problem}"]
    with pytest.raises(ValueError, match=r"[Ll]oss"):
        PolicyObjective(LossSettings(**given))


def test_a_rejection_needs_bounds_in_order():
    assert Rejection(measure="k3", level="token").problems("r.") == [
        "r.high: is not set, and neither is r.low: one is needed"
    ]
    assert Rejection(measure="k3", level="token", low=1.0, high=0.5).problems("r.") == [
        "r.low=1.0: must be below r.high=0.5"
    ]
    for measure in ("k1", "log_ratio"):  # these may be below 0
        assert Rejection(measure=measure, level="token", low=-0.5, high=0.0).problems("r.") == []


@pytest.mark.parametrize("measure", ["ratio", "k2", "k3", "binary_kl"])
def test_a_bound_that_rejects_nothing_or_all_is_refused(measure):
    def problems(low: float | None, high: float | None) -> list[str]:
        return check(Rejection, {"measure": measure, "level": "token", "low": low, "high": high}, "r")[1]

    assert problems(1e-4, 0.5) == []
    for bound in (0.0, -1.0):
        said = f"={bound}: must be above 0, or null: no {measure} is below 0"
        assert problems(bound, None) == [f"r.low{said}"]
        assert problems(None, bound) == [f"r.high{said}"]
    assert problems(None, math.inf) == ["r.high=inf: must be a finite number, or null"]
    assert problems(-math.inf, 1.0) == ["r.low=-inf: must be a finite number, or null"]


def test_the_help_of_the_setting_names_every_loss():
    from goaly.config.help import docs

    assert all(name in docs(LossSettings)["name"] for name in LOSSES.names)
