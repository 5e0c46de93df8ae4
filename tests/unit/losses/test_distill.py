"""Distillation against written-out NumPy: values with their tails, gradients, and what leaves the sum."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from goaly.losses import distill
from goaly.losses.objective import PolicyObjective, finish
from goaly.losses.settings import DistillSettings, LossSettings, Rejection
from tests.unit.losses.tokens_by_hand import SAMPLED, columns

close = torch.testing.assert_close
TEACHER = [[0.5, 0.2, 0.1], [0.3, 0.3, 0.3], [0.9, 0.05, 0.01]]
POLICY = [[0.1, 0.2, 0.3], [0.3, 0.3, 0.3], [0.2, 0.2, 0.2]]
"""Probabilities of three tokens at three places; the tails have the rest."""


def binned(rows: list[list[float]]) -> np.ndarray:
    return np.array([[*row, 1 - sum(row)] for row in rows])


def test_divergences_are_those_of_the_written_out_bins_with_their_tail():
    q, p = binned(TEACHER), binned(POLICY)
    teacher, policy = (torch.tensor(rows, dtype=torch.float64).log() for rows in (TEACHER, POLICY))
    close(distill.reverse_kl(teacher, policy), torch.from_numpy((p * (np.log(p) - np.log(q))).sum(1)))
    close(distill.forward_kl(teacher, policy), torch.from_numpy((q * (np.log(q) - np.log(p))).sum(1)))
    assert distill.reverse_kl(teacher, policy)[1] == pytest.approx(0, abs=1e-12)
    # worked out once by hand: 0.1 ln 0.2 + 0.2 ln 1 + 0.3 ln 3 + 0.4 ln 2
    assert distill.reverse_kl(teacher, policy)[0].item() == pytest.approx(0.445899, abs=1e-6)
    # and 0.5 ln 5 + 0.2 ln 1 + 0.1 ln (1/3) + 0.2 ln 0.5
    assert distill.forward_kl(teacher, policy)[0].item() == pytest.approx(0.556228, abs=1e-5)


def test_a_teacher_that_leaves_no_tail_bounds_what_the_policys_tail_costs():
    teacher, policy = torch.tensor([[0.6, 0.4]]).log(), torch.tensor([[0.3, 0.2]]).log()
    by_hand = 0.3 * math.log(0.5) + 0.2 * math.log(0.5) + 0.5 * math.log(0.5 / distill.TAIL)
    assert distill.reverse_kl(teacher, policy).item() == pytest.approx(by_hand, rel=1e-4)
    assert distill.forward_kl(teacher, policy).item() == pytest.approx(math.log(2), rel=1e-4)
    both = torch.tensor([[1.0 - 1e-9, 1e-9]]).log()
    assert distill.reverse_kl(both, both).item() == distill.forward_kl(both, both).item() == 0


@pytest.mark.parametrize("by", distill.DIVERGENCES)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), vocabulary=st.integers(3, 12), scale=st.floats(0.1, 3))
def test_divergences_are_never_negative_and_at_most_those_of_the_whole_vocabulary(by, seed: int, vocabulary, scale):
    generator = torch.Generator().manual_seed(seed)
    teacher, policy = (
        (scale * torch.randn(5, vocabulary, generator=generator, dtype=torch.float64)).log_softmax(-1) for _ in range(2)
    )
    top = teacher.topk(int(torch.randint(1, vocabulary, (), generator=generator)), -1).indices
    found = distill.DIVERGENCES[by](teacher.gather(1, top), policy.gather(1, top))
    whole = (
        (policy.exp() * (policy - teacher)).sum(1)
        if by == "reverse_kl"
        else (teacher.exp() * (teacher - policy)).sum(1)
    )
    assert (found >= -1e-9).all()
    assert (found <= whole + 1e-9).all()


@pytest.mark.parametrize("by", distill.DIVERGENCES)
def test_gradients_of_divergences_are_those_of_finite_differences(by: str):
    generator = torch.Generator().manual_seed(3)
    teacher = torch.randn(4, 9, generator=generator, dtype=torch.float64).log_softmax(-1)
    logits = torch.randn(4, 9, generator=generator, dtype=torch.float64, requires_grad=True)
    top, places = teacher.topk(3, -1)
    assert torch.autograd.gradcheck(
        lambda given: distill.DIVERGENCES[by](top, given.log_softmax(-1).gather(1, places)), (logits,)
    )


def part(loss: LossSettings, ratios, *, taught, teacher=None, top=None, lengths=(2, 2)):
    """The objective's contribution of tokens with these ratios current / sampler, and its gradients."""
    batch = columns(lengths, [1.0, 1.0, -1.0, -1.0])
    batch["taught"] = torch.tensor(taught)
    if teacher is not None:
        batch["teacher_logprobs"] = torch.tensor(teacher).log()
    logprobs_P = torch.tensor([math.log(SAMPLED * ratio) for ratio in ratios], requires_grad=True)
    top_PK = None
    if top is not None:
        batch["teacher_top_logprobs"] = torch.tensor(top[0]).log()
        top_PK = torch.tensor(top[1]).log().requires_grad_()
    given = logprobs_P, torch.zeros(len(ratios)), batch, 0, top_PK
    found = PolicyObjective(loss)(*given)
    wanted = [one for one in (logprobs_P, top_PK) if one is not None]
    gradients = torch.autograd.grad(found.taught, wanted, allow_unused=True)
    return found, *gradients


def test_the_advantage_of_a_token_is_its_distance_from_the_teacher_and_has_no_gradient_of_its_own():
    loss = LossSettings(name="reinforce", distill=DistillSettings(weight=0.5))
    teacher, ratios = [0.4, 0.1, 0.3, 0.9], [1.0, 2.0, 0.5, 1.5]
    found, gradient = part(loss, ratios, taught=[True, True, False, True], teacher=teacher)
    probabilities = SAMPLED * np.array(ratios)
    advantages = np.log(teacher) - np.log(probabilities)
    golden = -0.5 * np.array(ratios) * advantages * np.array([1, 1, 0, 1])
    assert found.taught.item() == pytest.approx(golden.sum(), rel=1e-5)
    assert gradient.tolist() == pytest.approx(golden.tolist(), rel=1e-5)  # that of r A by log p, with A fixed
    shown = finish({name: value.mean().item() for name, value in found.mean.items() if name.startswith("distill")})
    assert shown == pytest.approx({"distill/divergence": -advantages[[0, 1, 3]].mean()}, rel=1e-5)


@pytest.mark.parametrize("by", ["reverse_kl", "forward_kl"])
def test_a_divergence_counts_where_a_teacher_judges_and_reaches_only_those_tokens(by: str):
    loss = LossSettings(reward_weight=0.0, distill=DistillSettings(by=by, weight=2.0))
    top = [*TEACHER, [0.1, 0.1, 0.1]], [*POLICY, [0.5, 0.2, 0.1]]
    found, _, gradient = part(loss, [1.0] * 4, taught=[True, False, True, False], top=top)
    q, p = binned(TEACHER), binned(POLICY)
    golden = (p * np.log(p / q)).sum(1) if by == "reverse_kl" else (q * np.log(q / p)).sum(1)
    assert found.taught.item() == pytest.approx(2 * (golden[0] + golden[2]), rel=1e-5)
    assert found.total.item() == 0
    assert gradient[[1, 3]].abs().max() == 0 < gradient[[0, 2]].abs().min()


def test_the_rewards_part_is_the_same_with_a_teacher_beside_it():
    alone, beside = LossSettings(name="ppo"), LossSettings(name="ppo", distill=DistillSettings())
    given = dict(taught=[True] * 4, teacher=[0.3] * 4)
    found, _ = part(beside, [1.0, 1.3, 0.7, 1.0], **given)
    batch = columns([2, 2], [1.0, 1.0, -1.0, -1.0])
    logprobs_P = torch.tensor([math.log(SAMPLED * ratio) for ratio in [1.0, 1.3, 0.7, 1.0]], requires_grad=True)
    plain = PolicyObjective(alone)(logprobs_P, torch.zeros(4), batch, 0)
    assert found.total.item() == plain.total.item()
    assert plain.taught is None
    half, _ = part(replace(beside, reward_weight=0.5), [1.0, 1.3, 0.7, 1.0], **given)
    assert half.total.item() == pytest.approx(0.5 * plain.total.item())
    assert half.taught.item() == found.taught.item()


def test_a_rejected_token_leaves_the_teachers_part_too():  # losses-2
    rule = Rejection(measure="ratio", level="token", high=3.0, policy="current")
    loss = LossSettings(name="reinforce", rejections=(rule,), distill=DistillSettings())
    found, gradient = part(loss, [1.0, 4.0, 1.0, 1.0], taught=[True] * 4, teacher=[0.4] * 4)
    assert gradient[1] == 0
    assert found.taught.item() == pytest.approx(3 * -math.log(2), rel=1e-5)


def test_settings_that_would_have_no_effect_are_refused():
    def problems(**given) -> list[str]:
        return LossSettings(**given).problems("loss.")

    assert problems(distill=DistillSettings()) == problems(distill=DistillSettings(by="forward_kl", top_k=3)) == []
    assert problems(distill=DistillSettings(), reward_weight=0.0) == []
    assert problems(reward_weight=0.0) == [
        "loss.reward_weight=0.0: must be above 0 where loss.distill is null: nothing would be trained"
    ]
    assert any(
        "loss.denominator=after: must be before" in one
        for one in problems(distill=DistillSettings(), denominator="after", max_age=3)
    )
    (idle,) = problems(distill=DistillSettings(by="reverse_kl"), reward_weight=0.0, name="ppo")
    assert idle.startswith("loss.name=ppo: has no effect")
    (idle,) = problems(distill=DistillSettings(), reward_weight=0.0, kl_coef=0.1)
    assert idle.startswith("loss.kl_coef=0.1: has no effect")
