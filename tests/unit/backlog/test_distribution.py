"""How far what is trained is from what was launched: by hand, and the bound of windowed FIFO over random schedules."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goaly.backlog.distribution import (
    BINS_PER_OCTAVE,
    KnownStep,
    LengthDistribution,
    SourceShares,
    bin_count,
    distance,
    inverse_propensity,
    length_bins,
    total_variation,
    wasserstein,
)
from goaly.backlog.order import Order
from goaly.backlog.settings import BacklogSettings

SHORT, LONG = 4, 512


def followed(
    config: BacklogSettings, lengths: list[int], finishing: list[int], dropped=()
) -> tuple[list[dict[str, float]], Sequence[KnownStep]]:
    """Every batch's metrics, and the steps known at the end.

    Tickets finish in this order, and batches are formed as soon as they can be.
    """
    order, distribution, metrics = Order.of(config), LengthDistribution(config), []
    for index in range(len(lengths)):
        order.admit(index)
        distribution.admit(index)
    for index in finishing:
        if index in dropped:
            order.drop(index)
            distribution.drop(index)
        else:
            order.finish(index)
            distribution.finish(index, [lengths[index]])
        while (tickets := order.take(config.groups_per_step)) is not None:
            distribution.deliver(tickets)
            metrics.append(distribution.metrics())
    return metrics, distribution.known


def test_bins_double_in_four_steps_and_hold_every_length_up_to_the_longest():
    assert length_bins([0, 1, 2, 3, 4, 512]).tolist() == [0, 0, 4, 6, 8, 36]
    assert bin_count(512) == 37
    assert BINS_PER_OCTAVE == 4


def test_distances_by_hand():
    first, second = np.array([3.0, 1.0, 0.0]), np.array([1.0, 0.0, 1.0])
    assert total_variation(first, second) == pytest.approx(0.5)
    steps = np.diff(2 ** ((np.arange(3) + 0.5) / 4))
    assert wasserstein(first, second) == pytest.approx(0.25 * steps[0] + 0.5 * steps[1])
    assert wasserstein(first, 2 * first) == total_variation(first, 2 * first) == 0


def test_strict_fifo_trains_exactly_what_was_launched():
    config = BacklogSettings(groups_per_step=2, window=1)
    metrics, _ = followed(config, [LONG, SHORT, SHORT, LONG, SHORT, SHORT], [5, 4, 3, 2, 1, 0])
    assert metrics[-1]["distribution/known_step"] == 3
    assert {value for key, value in metrics[-1].items() if key != "distribution/known_step"} == {0.0}


def test_steps_that_become_known_together_are_all_told_and_none_twice():
    config = BacklogSettings(groups_per_step=2, order="completion")
    lengths = [LONG, *[SHORT] * 5, LONG, SHORT]
    metrics, known = followed(config, lengths, [1, 2, 3, 4, 0, 5, 7, 6])
    assert metrics[:2] == [{}, {}]  # ticket 0 was launched and its length is not known
    assert metrics[2]["distribution/known_step"] == 3
    assert metrics[2]["distribution/tv"] == 0
    # strict FIFO's batches are long and short, twice two short; trained were twice two short, then short and long
    assert metrics[2]["distribution/step_tv"] == pytest.approx((0.5 + 0 + 0.5) / 3)
    assert metrics[3]["distribution/step_tv"] == 0
    assert [(step.so_far.tv, step.alone.tv) for step in known] == [(0.5, 0.5), (0.25, 0), (0, 0.5), (0, 0)]


def test_a_batch_before_which_no_step_became_known_repeats_what_is_known_so_far_but_no_step():
    config = BacklogSettings(groups_per_step=1, order="completion")
    metrics, known = followed(config, [SHORT, LONG, SHORT], [0, 2])  # ticket 1 is under way
    assert len(known) == metrics[1]["distribution/known_step"] == 1
    assert metrics[0].keys() - metrics[1].keys() == {f"distribution/step_{name}" for name in ("tv", "w1", "octave_tv")}


def test_lengths_of_one_octave_are_equal_to_the_octaves_total_variation_alone():
    within, across = np.zeros((2, 6)), np.zeros((2, 6))
    within[0, 0] = within[1, 3] = across[0, 3] = across[1, 4] = 1.0
    assert (distance(*within).tv, distance(*within).octave_tv) == (1.0, 0.0)
    assert (distance(*across).tv, distance(*across).octave_tv) == (1.0, 1.0)


def test_dropped_tickets_were_launched_in_vain_and_do_not_count():
    config = BacklogSettings(groups_per_step=2, window=1)
    metrics, _ = followed(config, [LONG, LONG, SHORT, LONG, SHORT], [1, 2, 0, 3, 4], dropped=(0, 3))
    assert [step["distribution/tv"] for step in metrics] == [0.0]


@st.composite
def finishes(draw):
    count = draw(st.integers(1, 40))
    return (
        BacklogSettings(groups_per_step=draw(st.integers(1, 5)), window=draw(st.integers(1, 12))),
        draw(st.lists(st.sampled_from([SHORT, 40, LONG]), min_size=count, max_size=count)),
        draw(st.permutations(range(count))),
        draw(st.sets(st.integers(0, count - 1), max_size=count // 4)),
    )


@settings(max_examples=100, deadline=None)
@given(finishes())
def test_in_windowed_order_the_total_variation_is_at_most_the_window_over_what_was_trained(schedule):
    config, lengths, finishing, dropped = schedule
    _, known = followed(config, lengths, finishing, dropped)
    for step, found in enumerate(known, 1):
        assert found.so_far.tv <= (config.window - 1) / (step * config.groups_per_step) + 1e-12


def test_the_bound_on_the_total_variation_is_reached():
    distribution = LengthDistribution(BacklogSettings(groups_per_step=1, window=2))
    for index in range(2):
        distribution.admit(index)
    distribution.finish(1, [SHORT])
    distribution.deliver([1])
    distribution.finish(0, [LONG])
    assert distribution.metrics()["distribution/tv"] == 1.0  # (window - 1) / 1 group


def test_weights_bring_the_rare_back_by_hand():
    launched, trained = np.array([8.0, 2.0]), np.array([8.0, 0.0])
    weights = inverse_propensity(launched, trained, np.array([0, 1]), 4.0)
    # with the batch, 9 of 10 are short and 1 is long: 0.8 / 0.9 and 0.2 / 0.1
    assert weights == pytest.approx(np.array([8 / 9, 2.0]) / ((8 / 9 + 2.0) / 2))
    clipped = inverse_propensity(launched, trained, np.array([0, 1]), 1.5)
    assert clipped == pytest.approx(np.array([8 / 9, 1.5]) / ((8 / 9 + 1.5) / 2))


def test_weights_are_one_where_nothing_is_known_or_nothing_is_amiss():
    nothing, even = np.zeros(2), np.array([4.0, 4.0])
    assert inverse_propensity(nothing, even, np.array([0, 1, 1]), 4.0).tolist() == [1.0, 1.0, 1.0]
    assert inverse_propensity(even, even, np.array([0, 1]), 4.0).tolist() == [1.0, 1.0]
    assert inverse_propensity(np.array([8.0, 0.0]), even, np.array([1, 1]), 4.0).tolist() == [1.0, 1.0]


def test_a_bin_of_which_no_launched_group_is_known_is_weighed_like_one_with_nothing_amiss():
    launched, trained = np.array([8.0, 0.0]), np.array([3.0, 4.0])
    weights = inverse_propensity(launched, trained, np.array([0, 1]), 4.0)
    # with the batch, 4 of 9 are in the first bin, in which all launched ones are: 1 / (4 / 9); the other's weight is 1
    assert weights == pytest.approx(np.array([9 / 4, 1.0]) / ((9 / 4 + 1.0) / 2))


CORRECTED = BacklogSettings(groups_per_step=2, order="completion", length_correction="inverse_propensity")


def corrected() -> tuple[LengthDistribution, list[float]]:
    """Two batches of short groups, then one with ticket 0, of which one sample is long; and that batch's weights."""
    distribution = LengthDistribution(CORRECTED)
    for index in range(8):
        distribution.admit(index)
    for index in (1, 2, 4, 5):
        distribution.finish(index, [SHORT, SHORT])
    assert distribution.deliver([1, 2]) == distribution.deliver([4, 5]) == [1.0, 1.0]
    distribution.finish(0, [SHORT, LONG])
    distribution.finish(6, [SHORT, SHORT])
    return distribution, distribution.deliver([0, 6])


def test_a_group_is_weighed_by_the_octave_of_its_longest_sample():
    _, weights = corrected()
    # Known of what was launched are tickets 0, 1, 2: one of 3 is long. Of what is trained, one of 6.
    assert weights == pytest.approx([2 / 1.4, 0.8 / 1.4])


def test_a_sample_may_be_as_long_as_a_row_of_a_power_of_two():
    distribution = LengthDistribution(BacklogSettings(groups_per_step=1, row_length=16))
    distribution.admit(0)
    distribution.finish(0, [16, 1])
    assert distribution.deliver([0]) == [1.0]
    assert distribution.metrics()["distribution/tv"] == 0


def test_a_group_was_trained_as_often_as_it_weighed():
    distribution, (long, short) = corrected()
    distribution.finish(3, [SHORT, SHORT])
    distribution.finish(7, [SHORT, LONG])
    # launched were 6 short groups and 2 long ones; trained, with this batch, 8 by weight
    share_short, share_long = 0.75 / ((5 + short) / 8), 0.25 / ((1 + long) / 8)
    mean = (share_short + share_long) / 2
    assert distribution.deliver([3, 7]) == pytest.approx([share_short / mean, share_long / mean])


def test_the_weighted_distance_counts_each_group_as_often_as_it_weighs():
    distribution, _ = corrected()
    distribution.finish(3, [SHORT, SHORT])
    metrics = distribution.metrics()
    assert metrics["distribution/known_step"] == 3
    assert metrics["distribution/tv"] == 0  # 11 of 12 samples are short in what was launched and in what was trained
    assert metrics["distribution/weighted_tv"] == pytest.approx(2 / 1.4 / 12 - 1 / 12)
    assert [step.weighted is None for step in distribution.known] == [False] * 3


def test_without_weights_there_is_no_weighted_distance():
    metrics, known = followed(BacklogSettings(groups_per_step=1), [SHORT, LONG], [1, 0])
    assert [step.weighted for step in known] == [None, None]
    assert not [key for key in metrics[-1] if "weighted" in key]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 50), min_size=3, max_size=3),
    st.lists(st.floats(0, 50), min_size=3, max_size=3),
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
)
def test_weights_have_a_mean_of_one_and_never_turn_an_advantage(launched, trained, bins):
    weights = inverse_propensity(np.array(launched, dtype=float), np.array(trained), np.array(bins), 4.0)
    assert weights.mean() == pytest.approx(1.0)
    assert (weights > 0).all()
    assert weights.max() <= 16 * weights.min() * (1 + 1e-9)


def test_source_shares_of_a_batch_and_of_all_so_far():
    shares = SourceShares()
    assert shares.metrics(["a", "a"]) == {"distribution/source/a": 1.0, "distribution/source_total/a": 1.0}
    assert shares.metrics(["b", "b"]) == {
        "distribution/source/a": 0.0,
        "distribution/source_total/a": 0.5,
        "distribution/source/b": 1.0,
        "distribution/source_total/b": 0.5,
    }


def test_source_shares_go_on_from_their_saved_counts():
    shares, loaded = SourceShares(), SourceShares()
    shares.metrics(["a", "a", "b"])
    loaded.load_state_dict(shares.state_dict())
    assert loaded.metrics(["b"]) == {
        "distribution/source/a": 0.0,
        "distribution/source_total/a": 0.5,
        "distribution/source/b": 1.0,
        "distribution/source_total/b": 0.5,
    }
