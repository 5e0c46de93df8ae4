"""The gate's test: its error rate by simulation with a look after every pair, its power, and its numbers (live-1)."""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from goaly.live.paired_test import BETS, PairedTest, Verdict, log_evidence

SEQUENCES = 3000
PAIRS = 300
Shape = Callable[[np.random.Generator, float, tuple[int, ...]], np.ndarray]


def binary(chance: np.random.Generator, mean: float, size: tuple[int, ...]) -> np.ndarray:
    """One of the two is right, the other wrong."""
    return np.where(chance.random(size) < (1 + mean) / 2, 1.0, -1.0)


def mostly_ties(chance: np.random.Generator, mean: float, size: tuple[int, ...]) -> np.ndarray:
    """Nine of ten pairs are ties."""
    return np.where(chance.random(size) < 0.1, binary(chance, 10 * mean, size), 0.0)


def all_equal(chance: np.random.Generator, mean: float, size: tuple[int, ...]) -> np.ndarray:
    return np.full(size, mean)


def rare_disasters(chance: np.random.Generator, mean: float, size: tuple[int, ...]) -> np.ndarray:
    """A small gain nearly always, and the whole loss in one pair of forty."""
    rare = 1 / 40
    return np.where(chance.random(size) < rare, -1.0, (mean + rare) / (1 - rare))


def rare_triumphs(chance: np.random.Generator, mean: float, size: tuple[int, ...]) -> np.ndarray:
    rare = 1 / 40
    return np.where(chance.random(size) < rare, 1.0, (mean - rare) / (1 - rare))


def uniform(chance: np.random.Generator, mean: float, size: tuple[int, ...]) -> np.ndarray:
    return chance.uniform(-1.0, 1 + 2 * mean, size)


def turns_wild_when_ahead(chance: np.random.Generator, mean: float, size: tuple[int, ...]) -> np.ndarray:
    """Its shape depends on the pairs before: calm at the mean, and wild after a win, with the same mean given them."""
    calm, wild = all_equal(chance, mean, size), binary(chance, mean, size)
    drawn = calm.copy()
    for time in range(1, size[-1]):
        drawn[:, time] = np.where(drawn[:, :time].mean(axis=-1) >= mean, wild[:, time], calm[:, time])
    return drawn


SHAPES = (binary, mostly_ties, all_equal, rare_disasters, rare_triumphs, uniform, turns_wild_when_ahead)


@pytest.mark.parametrize(("margin", "error_rate"), [(0.02, 0.2), (0.1, 0.05)])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_a_candidate_that_is_worse_by_the_margin_passes_at_most_at_the_error_rate(
    shape: Shape, margin: float, error_rate: float
):
    # live-1; whoever looks after every pair stops at the first moment of enough evidence, if there is one
    drawn = shape(np.random.default_rng(3), -margin, (SEQUENCES, PAIRS))
    passed = (log_evidence(drawn, -margin).max(axis=-1) >= -math.log(error_rate)).mean()
    deviation = math.sqrt(error_rate * (1 - error_rate) / SEQUENCES)
    assert passed <= error_rate + 3 * deviation


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_a_candidate_that_is_worse_by_less_than_the_margin_is_called_worse_at_most_at_the_error_rate(shape: Shape):
    drawn = shape(np.random.default_rng(4), -0.1, (SEQUENCES, PAIRS))
    worse = (log_evidence(-drawn, 0.1).max(axis=-1) >= -math.log(0.05)).mean()
    assert worse <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / SEQUENCES)


def decided(drawn: np.ndarray, margin: float, error_rate: float) -> list[tuple[Verdict, int]]:
    """The verdict of each sequence, and after how many pairs."""
    found = []
    for differences in drawn:
        test = PairedTest(margin=margin, error_rate=error_rate)
        for difference in differences:
            if test.add(max(difference, 0.0), max(-difference, 0.0)) is not Verdict.UNDECIDED:
                break
        found.append((test.verdict, test.pairs))
    return found


@pytest.mark.parametrize(
    ("shape", "mean", "pairs", "verdict"),
    [
        (binary, 0.2, 400, Verdict.NOT_WORSE),
        (mostly_ties, 0.05, 250, Verdict.NOT_WORSE),
        (all_equal, 0.0, 120, Verdict.NOT_WORSE),
        (binary, -0.6, 80, Verdict.WORSE),
        (rare_disasters, -0.3, 60, Verdict.WORSE),
    ],
)
def test_clear_cases_are_decided_within_few_pairs(shape: Shape, mean: float, pairs: int, verdict: Verdict):
    drawn = shape(np.random.default_rng(5), mean, (200, pairs))
    right = [found for found, _ in decided(drawn, 0.05, 0.05)]
    assert right.count(verdict) >= 190
    assert right.count(Verdict.UNDECIDED) == 200 - right.count(verdict)


def test_the_evidence_of_three_pairs_is_that_of_the_formula():
    differences = [Fraction(1), Fraction(-1, 2), Fraction(0)]
    mean = Fraction(-1, 20)
    total = Fraction(0)
    for bet in BETS:
        wealth = Fraction(1)
        for difference in differences:
            wealth *= 1 - Fraction(bet) + Fraction(bet) * (1 + difference) / (1 + mean)
        total += wealth
    expected = math.log(total / len(BETS))
    assert log_evidence(np.array(differences, dtype=float), float(mean))[-1] == pytest.approx(expected, abs=1e-12)


def test_ties_at_a_margin_of_5_percent_pass_after_95_pairs():
    """Golden: both policies answer alike, which is the most frequent case of a small step."""
    ((verdict, pairs),) = decided(np.zeros((1, 200)), 0.05, 0.05)
    assert (verdict, pairs) == (Verdict.NOT_WORSE, 95)


def test_numbers_of_a_verdict_are_those_of_its_pairs():
    test = PairedTest(margin=0.05, error_rate=0.05)
    for _ in range(100):
        test.add(1.0, 1.0)
        test.add(1.0, 0.0)
    found = test.evidence()
    assert (found.verdict, found.pairs, found.mean) == (Verdict.NOT_WORSE, 200, 0.5)
    assert found.threshold == pytest.approx(math.log(20))
    assert 0.3 < found.lower < 0.5 < found.upper < 0.7
    assert found.not_worse > found.threshold > found.worse
    assert str(found).startswith("not_worse after 200 pairs: mean difference +0.500, between +0.")


def test_nothing_is_known_without_pairs():
    found = PairedTest(margin=0.05, error_rate=0.05).evidence()
    assert (found.verdict, found.mean, found.lower, found.upper) == (Verdict.UNDECIDED, None, -1.0, 1.0)
    assert (found.not_worse, found.worse) == (0.0, 0.0)


@given(
    scores=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=120),
    margin=st.floats(0.01, 0.5),
    error_rate=st.floats(0.01, 0.5),
)
def test_a_verdict_says_the_same_as_its_bounds_and_stays(
    scores: list[tuple[float, float]], margin: float, error_rate: float
):
    test = PairedTest(margin=margin, error_rate=error_rate)
    verdicts = [test.add(*pair) for pair in scores]
    reached = [verdict for verdict in verdicts if verdict is not Verdict.UNDECIDED]
    assert len(set(reached)) <= 1
    assert verdicts[len(verdicts) - len(reached) :] == reached
    found = test.evidence()
    near = 1e-6
    if found.verdict is Verdict.NOT_WORSE:
        assert found.lower >= -margin - near
    elif found.verdict is Verdict.WORSE:
        assert found.upper <= -margin + near
    else:
        assert found.lower <= -margin + near
        assert found.upper >= -margin - near


@given(
    scores=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=60),
    swap=st.permutations(range(9)),
)
def test_evidence_does_not_depend_on_the_order_of_the_pairs(scores: list[tuple[float, float]], swap: list[int]):
    differences = np.array([one - other for one, other in scores])
    mixed = differences[np.argsort([swap[i % 9] * 100 + i for i in range(len(scores))])]
    assert log_evidence(mixed, -0.05)[-1] == pytest.approx(log_evidence(differences, -0.05)[-1], abs=1e-9)


@pytest.mark.parametrize("scores", [(1.5, 0.0), (0.0, -0.1), (math.nan, 0.0)])
def test_a_score_outside_of_its_range_is_refused(scores: tuple[float, float]):
    with pytest.raises(ValueError, match=r"must be in \[0, 1\]"):
        PairedTest(margin=0.05, error_rate=0.05).add(*scores)


@pytest.mark.parametrize("wrong", [{"margin": 0.0}, {"margin": 1.0}, {"error_rate": 0.0}, {"error_rate": 1.0}])
def test_margin_and_error_rate_must_be_proper_shares(wrong: dict[str, float]):
    with pytest.raises(ValueError, match="must be above 0 and below 1"):
        PairedTest(**{"margin": 0.05, "error_rate": 0.05} | wrong)
