"""Advantages by hand, for whole batches."""

import re
from dataclasses import replace
from math import inf

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from goaly.base.config.check import check
from goaly.reward.advantages import ESTIMATORS, Estimate, Scored, gae, needs_values, rewards_of_steps, to_go
from goaly.reward.estimate import estimate, penalize_divergence, penalize_overlong, scored
from goaly.reward.settings import AdvantageSettings, OverlongSettings, RewardSettings
from goaly.trajectory import Group, Outcome, Trajectory, Turn, token_data

close = torch.testing.assert_close
RELATIVE = ["group", "group_mean", "rloo", "maxrl", "process"]
"""Estimators that compare a sample with its own group alone."""
COMPARING = [name for name in ESTIMATORS.names if name != "gae"]
"""Estimators that compare samples with each other, not with a critic's values."""


def sample(reward: float, trained: int = 1, *, credits: dict[int, float] | None = None, turns: str = "") -> Trajectory:
    """One token of prompt and so many of answer, or turns such as `p2a1p2`; credits by position."""
    turns = turns or f"p{trained}"
    made, start = [], 1
    for author, length in re.findall(r"([pa])(\d+)", turns):
        made.append(Turn(author={"p": "policy", "a": "environment"}[author], start=start, stop=start + int(length)))
        start += int(length)
    mask = torch.tensor([False] + [turn.author == "policy" for turn in made for _ in range(turn.start, turn.stop)])
    rewards = torch.zeros(start)
    rewards[int(mask.nonzero()[-1]) if mask.any() else -1] = reward
    for position, credit in (credits or {}).items():
        rewards[position] = credit
    tokens = {
        "tokens": torch.zeros(start, dtype=torch.int64),
        "trained": mask,
        "sampler_logprobs": -0.5 * mask.float(),
        "sampler_versions": torch.where(mask, 0, -1).int(),
        "rewards": rewards,
    }
    return Trajectory(
        tokens=token_data(tokens),
        prompt_id="x",
        sample_index=0,
        turns=tuple(made),
        environment="test",
        outcome=Outcome.COMPLETE,
    )


def groups(*rewards: list[float]) -> list[Group]:
    """Groups of one-token answers."""
    return [grouped(*(sample(reward) for reward in of_group)) for of_group in rewards]


def grouped(*samples: Trajectory) -> Group:
    samples = tuple(replace(sample, sample_index=index) for index, sample in enumerate(samples))
    return Group(ticket=0, prompt_id="x", source="test", samples=samples)


def values(name: str, batch: list[Group], **options: float) -> list[float]:
    """Each sample's advantage at its last token."""
    found = estimate(batch, AdvantageSettings(name=name, options=options)).advantages
    return [float(advantage_T[-1]) for advantage_T in found]


def values_of(batch: list[Group], value: float = 0.25) -> dict[str, list[torch.Tensor]]:
    """A critic that expects the same everywhere."""
    samples = [sample for group in batch for sample in group.samples]
    return {"values": [value * sample.tokens["trained"].float() for sample in samples]}


@needs_values
def surprise(batch: Scored) -> Estimate:
    """A user's own estimator over values: the sample's reward less the value."""
    returns = [rewards_T.sum().expand(len(rewards_T)) for rewards_T in batch.rewards]
    found = [return_T - values_T for return_T, values_T in zip(returns, batch.values or (), strict=True)]
    return Estimate(advantages=found, returns=returns)


def only_positive(batch: Scored, *, above: float) -> torch.Tensor:
    """A user's own estimator."""
    return (batch.totals_S - above).clamp(min=0)


def first_only(batch: Scored) -> torch.Tensor:
    """A user's mistake."""
    return batch.totals_S[:1]


def test_the_group_estimator_counts_in_standard_deviations():
    # mean 1/4, deviation sqrt(3)/4; the other group is judged by itself
    found = values("group", groups([0, 0, 0, 1], [5, 5, 5, 9]), epsilon=0)
    assert found == pytest.approx([-0.57735, -0.57735, -0.57735, 1.73205] * 2, abs=1e-5)


def test_the_mean_estimator_keeps_the_scale():
    assert values("group_mean", groups([0, 2, 4], [1, 1])) == [-2, 0, 2, 0, 0]


def test_leave_one_out_compares_with_the_mean_of_the_others():
    # 0 - (2 + 4) / 2, 2 - (0 + 4) / 2, 4 - (0 + 2) / 2; alone there is nothing to compare with
    assert values("rloo", groups([0, 2, 4], [7])) == pytest.approx([-3, 0, 3, 0])
    assert values("rloo", groups([0, 2], [5, 4])) == pytest.approx([-2, 2, 1, -1])


def test_maxrl_counts_in_units_of_the_groups_mean_and_gives_nothing_where_that_is_not_above_0():
    # numpy: (r - r.mean()) / r.mean(); one success of four counts 3, three of four count 1/3 each
    for rewards in ([0.0, 0, 0, 1], [1.0, 1, 1, 0], [0.25, 0.5, 1.0]):
        golden = (np.array(rewards) - np.mean(rewards)) / np.mean(rewards)
        assert values("maxrl", groups(rewards)) == pytest.approx(golden.tolist())
    assert values("maxrl", groups([0, 0, 0], [1, -1], [-1, 0, -1], [1, 1])) == [0.0] * 10


def test_reinforce_pp_normalizes_over_all_trained_tokens_of_the_batch():
    # token returns 0 (three times) and 4 (once): mean 1, deviation sqrt(3)
    batch = [grouped(sample(0.0, 3), sample(4.0, 1))]
    assert values("reinforce_pp", batch, epsilon=0) == pytest.approx([-1 / 3**0.5, 3 / 3**0.5])


def test_reinforce_pp_gives_each_token_the_rewards_from_there_on():
    # credits 1 at the first and 2 at the last of three tokens: returns 3, 2, 2; mean 7/3, deviation sqrt(2)/3
    (found,) = estimate([grouped(sample(2.0, 3, credits={1: 1.0}))], AdvantageSettings(name="reinforce_pp")).advantages
    close(found, torch.tensor([0.0, 2, -1, -1]) / 2**0.5, atol=1e-5, rtol=1e-5)


def test_reinforce_pp_discounts_what_comes_later_by_the_trained_tokens_in_between():
    # trained are tokens 1, 4 and 6; the credit at 3, where the environment speaks, is the first step's: rewards 1 + 2,
    # 0 and 8; returns 3 + 0/2 + 8/4 = 5, 4 and 8: mean 17/3, deviation sqrt(26)/3
    made = sample(8.0, turns="p1a2p1a1p1", credits={1: 1.0, 3: 2.0})
    settings = AdvantageSettings(name="reinforce_pp", options={"gamma": 0.5, "epsilon": 0.0})
    (found,) = estimate([grouped(made)], settings).advantages
    close(found, torch.tensor([0.0, -2, 0, 0, -5, 0, 7]) / 26**0.5)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=0, max_size=8), st.floats(0, 1))
def test_rewards_to_go_are_the_sums_of_their_definition(rewards: list[float], discount: float):
    found = to_go(torch.tensor(rewards, dtype=torch.float64), discount).tolist()
    due = [sum(discount**later * reward for later, reward in enumerate(rewards[at:])) for at in range(len(rewards))]
    assert found == pytest.approx(due, abs=1e-12)
    close(to_go(torch.tensor(rewards)), torch.tensor(rewards).flip(0).cumsum(0).flip(0))


def test_normalization_over_the_batch_has_the_population_deviation_and_adds_epsilon_to_it():
    # totals 0 and 4, a token each: mean 2, deviation 2 (of a sample it would be 2.83)
    assert values("reinforce_pp", groups([0], [4]), epsilon=2.0) == pytest.approx([-0.5, 0.5])


def test_reinforce_pp_with_baseline_takes_off_the_groups_mean_first():
    # distances -1, 1 | -2, 2 with one token each: mean 0, deviation sqrt(10 / 4)
    found = values("reinforce_pp_baseline", groups([0, 2], [10, 14]), epsilon=0)
    assert found == pytest.approx([value / 2.5**0.5 for value in (-1, 1, -2, 2)])
    assert values("reinforce_pp_baseline", groups([0, 2], [10, 14])) == pytest.approx(found, abs=1e-5)


def test_process_rewards_add_up_from_each_step_on():
    # steps of the first sample 1 and 3 (the credit while the environment speaks is the first step's), of the second 2
    # and 2: mean 2, deviation sqrt(1/2); scaled -s, s | 0, 0 with s = sqrt(2); from each step on: 0, s | 0, 0
    first = sample(3.0, turns="p2a1p2", credits={3: 1.0})
    second = sample(2.0, turns="p1a1p1", credits={1: 2.0})
    settings = AdvantageSettings(name="process", options={"epsilon": 0.0})
    one, other = estimate([grouped(first, second)], settings).advantages
    close(one, torch.tensor([0, 0, 0, 0, 2**0.5, 2**0.5]))
    assert other.tolist() == [0] * 4


def test_process_rewards_of_a_single_step_are_the_group_estimator():
    batch = groups([0, 1, 5], [2, 3, 3])
    assert values("process", batch) == pytest.approx(values("group", batch))


@pytest.mark.parametrize("name", ESTIMATORS.names)
def test_the_mark_says_whether_a_group_of_equal_totals_teaches(name: str):
    even = grouped(sample(1.0, turns="p2a1p2"), sample(0.0, turns="p2a1p3", credits={1: 1.0}))  # by other steps
    batch, settings = [even, *groups([0, 1, 1])], AdvantageSettings(name=name)
    found = estimate(batch, settings, values_of(batch)).advantages[:2]
    of_even = torch.cat([value_T[one.tokens["trained"]] for value_T, one in zip(found, even.samples, strict=True)])
    assert (len(of_even.unique()) == 1) is settings.compares_groups


@pytest.mark.parametrize("name", COMPARING)
@pytest.mark.parametrize("rewards", [[0.0] * 3, [0.7] * 7, [1.0]])
def test_equal_rewards_give_exactly_zero_whatever_the_rounding(name: str, rewards: list[float]):
    # shaping makes them doubles, whose mean is not exact: 0.1 + 0.1 + 0.1 is not 3 * 0.1
    shaped = AdvantageSettings(name=name, overlong=OverlongSettings(limit=2, buffer=1, penalty=0.1))
    batch = [grouped(*(sample(reward, 3) for reward in rewards))]
    assert all((advantage_T == 0).all() for advantage_T in estimate(batch, shaped).advantages)


@settings(max_examples=20, deadline=None)
@given(rewards=st.lists(st.floats(-9, 9), min_size=2, max_size=6), equal=st.floats(-9, 9))
@pytest.mark.parametrize("name", RELATIVE)
def test_a_group_of_equal_rewards_has_no_signal_beside_one_that_has(name: str, rewards: list[float], equal: float):
    found = values(name, groups([equal] * 3, rewards))
    assert found[:3] == [0.0] * 3
    assert sum(found) == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("name", [name for name in COMPARING if name != "maxrl"])  # whose unit is the mean itself
def test_adding_a_constant_to_all_rewards_changes_nothing(name: str):
    assert values(name, groups([3, 4, 6], [4, 4])) == pytest.approx(values(name, groups([0, 1, 3], [1, 1])), abs=1e-5)


@settings(max_examples=20, deadline=None)
@given(
    rewards=st.lists(st.lists(st.integers(0, 3).map(float), min_size=3, max_size=3), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
)
@pytest.mark.parametrize("name", COMPARING)
def test_the_order_of_groups_and_of_their_samples_is_nobodys_advantage(name: str, rewards, order):
    shuffled = [list(enumerate(of_group)) for of_group in rewards]
    for of_group in shuffled:
        order.shuffle(of_group)
    places = list(range(len(rewards)))
    order.shuffle(places)
    due = values(name, groups(*rewards))
    found = values(name, groups(*([reward for _, reward in shuffled[place]] for place in places)))
    expected = [due[3 * place + at] for place in places for at, _ in shuffled[place]]
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", COMPARING)
def test_rewards_in_another_unit_scale_what_has_one_and_change_nothing_else(name: str):
    options = {} if name in ("group_mean", "rloo", "maxrl") else {"epsilon": 0.0}
    factor = 10 if name in ("group_mean", "rloo") else 1
    ones, tens = (
        values(name, groups([0, 1, 3], [2, 4]), **options),
        values(name, groups([0, 10, 30], [20, 40]), **options),
    )
    assert tens == pytest.approx([factor * one for one in ones], abs=1e-5)


@pytest.mark.parametrize("name", ESTIMATORS.names)
def test_only_trained_tokens_carry_an_advantage(name: str):
    batch = [grouped(sample(1.0, turns="p1a2p1"), sample(0.0, turns="p1a1p2"))]
    found = estimate(batch, AdvantageSettings(name=name), values_of(batch))
    assert (found.returns is not None) == (name == "gae")
    for made, advantage_T in zip(batch[0].samples, found.advantages, strict=True):
        assert advantage_T.dtype == torch.float32
        assert (advantage_T[~made.tokens["trained"]] == 0).all()
        assert (advantage_T[made.tokens["trained"]] != 0).all()


def test_a_sample_without_a_trained_token_is_carried_along():
    for name in ESTIMATORS.names:
        batch = [grouped(sample(0.0, turns="a2"), sample(1.0))]
        found = estimate(batch, AdvantageSettings(name=name), values_of(batch)).advantages
        assert found[0].tolist() == [0.0] * 3


def test_long_answers_lose_more_the_closer_they_come_to_the_limit():
    # free up to 6, all gone from 10 on: 8 loses half of the penalty of 2
    first_too_many = scored([grouped(sample(1.0, 7))])
    settings = OverlongSettings(limit=10, buffer=4, penalty=2.0)
    assert penalize_overlong(first_too_many, settings).totals_S.tolist() == [0.5]
    batch = scored([grouped(*(sample(1.0, length) for length in (6, 8, 10, 12)))])
    shaped = penalize_overlong(batch, OverlongSettings(limit=10, buffer=4, penalty=2.0))
    assert shaped.totals_S.tolist() == [1.0, 0.0, -1.0, -1.0]
    assert float(shaped.rewards[1][-1]) == 0.0
    through = AdvantageSettings(name="group_mean", overlong=OverlongSettings(limit=10, buffer=4))
    found = estimate([grouped(sample(1.0, 6), sample(1.0, 10))], through).advantages
    assert [float(advantage_T[-1]) for advantage_T in found] == [0.5, -0.5]


def test_half_the_penalty_of_dapo_on_rewards_of_0_and_1_gives_its_advantages():
    lengths = (7, 9, 12, 6)

    def advantages(right: float, wrong: float, penalty: float) -> list[float]:
        rewards = (right, wrong, right, wrong)
        samples = [sample(reward, length) for reward, length in zip(rewards, lengths, strict=True)]
        shaping = OverlongSettings(limit=10, buffer=4, penalty=penalty)
        settings = AdvantageSettings(name="group", overlong=shaping)
        return [float(one_T[-1]) for one_T in estimate([grouped(*samples)], settings).advantages]

    dapo = advantages(1.0, -1.0, 1.0)
    assert advantages(1.0, 0.0, 0.5) == pytest.approx(dapo, abs=1e-5)
    assert advantages(1.0, 0.0, 1.0) != pytest.approx(dapo, abs=0.1)


def test_the_divergence_from_the_reference_is_taken_off_token_by_token():
    # sampled at -0.5; the reference has -1.5 and -0.5: k1 is 1 and 0; the prompt's token is not the policy's
    batch = [grouped(sample(1.0, 2), sample(0.0, 2))]
    references = [torch.tensor([-9.0, -1.5, -0.5]), torch.tensor([-9.0, -0.5, -0.5])]
    shaped = penalize_divergence(scored(batch), references, 0.5, "k1")
    close(shaped.rewards[0], torch.tensor([0, -0.5, 1.0], dtype=torch.float64))
    assert shaped.totals_S.tolist() == [0.5, 0.0]
    found = estimate(
        batch, AdvantageSettings(name="group_mean", kl_coef=0.5), {"reference_logprobs": references}
    ).advantages
    assert [float(advantage_T[-1]) for advantage_T in found] == [0.25, -0.25]


def test_generalized_advantages_by_hand():
    # deltas: 0 + 0.5*2 - 1 = 0; 0 + 0.5*4 - 2 = 0; 8 - 4 = 4; gamma * lam = 0.25: 4, 1, 0.25
    found, returns = gae(torch.tensor([0.0, 0, 8]), torch.tensor([1.0, 2, 4]), gamma=0.5, lam=0.5)
    assert found.tolist() == [0.25, 1.0, 4.0]
    assert returns.tolist() == [1.25, 3.0, 8.0]
    assert gae(torch.zeros(0), torch.zeros(0))[0].shape == (0,)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=8), st.floats(0, 1), st.floats(0, 1)
)
def test_generalized_advantages_are_the_sums_of_their_definition(steps, gamma: float, lam: float):
    rewards, worth = (torch.tensor(column, dtype=torch.float64) for column in zip(*steps, strict=True))
    deltas = rewards + gamma * torch.cat([worth[1:], worth.new_zeros(1)]) - worth
    due = [
        sum((gamma * lam) ** later * float(deltas[at + later]) for later in range(len(deltas) - at))
        for at in range(len(deltas))
    ]
    found, returns = gae(rewards, worth, gamma=gamma, lam=lam)
    assert found.tolist() == pytest.approx(due, abs=1e-9)
    close(returns, found + worth)


def test_generalized_advantages_look_ahead_undiscounted_at_095_by_default():
    rewards, worth = torch.tensor([0.0, 0, 1]), torch.zeros(3)
    close(gae(rewards, worth)[0], torch.tensor([0.95**2, 0.95, 1.0]))
    made, settings = grouped(sample(1.0, 3)), AdvantageSettings(name="gae", options={"normalize": False})
    (found,) = estimate([made], settings, {"values": [torch.zeros(4)]}).advantages
    close(found, torch.tensor([0.0, 0.95**2, 0.95, 1.0]))


def test_what_is_credited_between_two_steps_is_the_earlier_ones_and_before_the_first_nobodys():
    trained = torch.tensor([False, False, True, False, True, False])
    assert rewards_of_steps(torch.tensor([9.0, 9, 1, 2, 4, 8]), trained).tolist() == [3, 12]
    assert rewards_of_steps(torch.ones(2), torch.zeros(2, dtype=torch.bool)).tolist() == []


def test_advantages_over_values_step_from_trained_token_to_trained_token():
    # steps at 1 and 4 of values 1 and 2, with the environment between them; rewards 1 and 3; gamma and lambda 1/2:
    # deltas 1 + 1 - 1 = 1 and 3 - 2 = 1; advantages 1 + 1/4 and 1
    made = sample(3.0, turns="p1a2p1", credits={2: 1.0})
    batch, later = [grouped(made)], {"values": [torch.tensor([9.0, 1, 9, 9, 2])]}
    options = {"gamma": 0.5, "lam": 0.5, "normalize": False}
    found = estimate(batch, AdvantageSettings(name="gae", options=options), later)
    assert found.returns is not None
    assert found.advantages[0].tolist() == [0, 1.25, 0, 0, 1]
    assert found.returns[0].tolist() == [0, 2.25, 0, 0, 3]


def test_advantages_over_values_are_normalized_over_the_batch_and_returns_are_not():
    # one step each: advantages 3 - 1 and 0 - 4, of mean -1 and deviation 3
    batch = [grouped(sample(3.0)), grouped(sample(0.0))]
    found = estimate(batch, AdvantageSettings(name="gae"), {"values": [torch.tensor([0.0, 1]), torch.tensor([0.0, 4])]})
    assert [float(value[1]) for value in found.advantages] == pytest.approx([1, -1], abs=1e-5)
    assert [float(value[1]) for value in found.returns or ()] == [3, 0]


def test_an_estimator_of_ones_own_is_found_by_its_path_and_takes_its_options():
    mine = AdvantageSettings(name=f"{__name__}:only_positive", options={"above": 1.0})
    assert mine.problems("advantages.") == []
    assert [float(found[-1]) for found in estimate(groups([0, 3], [2]), mine).advantages] == [0, 2, 1]


def test_an_estimator_of_ones_own_that_forgets_a_sample_is_refused():
    with pytest.raises(ValueError, match="first_only: returned 1 values for 2 samples"):
        estimate(groups([0, 3]), AdvantageSettings(name=f"{__name__}:first_only"))


def test_an_estimator_of_ones_own_may_be_over_a_critics_values():
    mine = AdvantageSettings(name=f"{__name__}:surprise")
    assert mine.uses_values
    assert not AdvantageSettings(name=f"{__name__}:only_positive").uses_values
    found = estimate([grouped(sample(1.0, 2))], mine, {"values": [torch.tensor([9.0, 0.25, 0.5])]})
    assert found.returns is not None
    assert (found.advantages[0].tolist(), found.returns[0].tolist()) == ([0, 0.75, 0.5], [0, 1, 1])


def test_settings_that_can_not_work_are_refused_with_the_known_names():
    known = "group, group_mean, rloo, maxrl, reinforce_pp, reinforce_pp_baseline, process, gae"
    with pytest.raises(ValueError, match=f"there is no such advantage; known are {known}"):
        estimate(groups([0.0, 1.0]), AdvantageSettings(name="gea"))
    assert AdvantageSettings(name="rloo", options={"epsilon": 0.1}, kl_estimator="k3").problems("advantages.") == [
        "advantages.options.epsilon=0.1: the advantage rloo does not take it, it has no options; group, reinforce_pp, "
        "reinforce_pp_baseline, process take it",
        "advantages.kl_estimator=k3: has no effect, advantages.kl_coef is 0",
    ]
    assert check(AdvantageSettings, {"options": {"epsilon": -1.0}, "kl_coef": -1}, "advantages")[1] == [
        "advantages.kl_coef=-1: must be at least 0",
        "advantages.options.epsilon=-1.0: must be at least 0",
    ]
    assert check(AdvantageSettings, {"options": {"epsilon": inf}, "kl_coef": inf}, "advantages")[1] == [
        "advantages.kl_coef=inf: must be a finite number",
        "advantages.options.epsilon=inf: must be a finite number",
    ]
    assert AdvantageSettings(name="gae", options={"lam": 1.5, "normalize": 1}).problems("advantages.") == [
        "advantages.options.lam=1.5: must be between 0 and 1",
        "advantages.options.normalize=1: must be true or false",
    ]
    assert check(OverlongSettings, {"limit": 4, "buffer": 4, "penalty": 0}, "o")[1] == [
        "o.penalty=0: must be above 0",
        "o.limit=4: must be above o.buffer=4",
    ]
    assert check(OverlongSettings, {"limit": 4, "buffer": 0}, "o")[1] == ["o.buffer=0: must be at least 1"]


def test_the_help_of_the_setting_names_every_estimator():
    from goaly.base.config.help import docs

    assert all(name in docs(AdvantageSettings)["name"] for name in ESTIMATORS.names)


def test_reward_settings_that_cannot_work_are_listed_with_their_keys():
    assert check(RewardSettings, {"verifier": "no function", "workers": 0, "time_limit_seconds": 0.0}, "reward")[1] == [
        "reward.workers=0: must be at least 1",
        "reward.time_limit_seconds=0.0: must be above 0",
        "reward.verifier=no function: must be package.module:function",
    ]
    assert RewardSettings().problems("reward.") == []
