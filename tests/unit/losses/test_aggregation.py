"""Aggregation by hand, and whatever the packing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from goaly.losses.objective import batch_denominator, counted, token_weights
from goaly.losses.tokens import sequence_count, sequence_mean, sequence_sum
from tests.unit.losses.tokens_by_hand import documents

close = torch.testing.assert_close
LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(any)


def aggregated(kind, values: torch.Tensor, lengths: list[int], kept: torch.Tensor | None = None) -> float:
    documents_P = documents(lengths)
    counted_P = torch.ones_like(documents_P, dtype=torch.bool) if kept is None else kept
    total = (token_weights(kind, documents_P, counted_P, 8) * values * counted_P).sum()
    if kept is not None:
        return float(total / counted(kind, documents_P, counted_P))
    return float(total / batch_denominator(kind, len(values), len(lengths)))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token_mean", (1 + 2 + 3 + 10) / 4),
        ("sequence_mean", ((1 + 2 + 3) / 3 + 10) / 2),
        ("sequence_sum", ((1 + 2 + 3) / 8 + 10 / 8) / 2),
    ],
)
def test_each_aggregation_by_hand(kind, expected: float):
    assert aggregated(kind, torch.tensor([1.0, 2.0, 3.0, 10.0]), [3, 1]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # tokens 2 and 10 are left out: the second sequence is gone
        ("token_mean", (1 + 3) / 2),
        ("sequence_mean", (1 + 3) / 2 / 1),
        ("sequence_sum", (1 + 3) / 8 / 1),
    ],
)
def test_counted_after_rejection_only_what_is_kept_counts(kind, expected: float):
    kept = torch.tensor([True, False, True, False])
    assert aggregated(kind, torch.tensor([1.0, 2.0, 3.0, 10.0]), [3, 1], kept) == pytest.approx(expected)


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 99))
@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "sequence_sum"])
def test_any_split_of_the_sequences_adds_up_to_the_whole(kind, lengths: list[int], seed: int):  # losses-1
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(lengths), generator=generator)
    whole = aggregated(kind, values, lengths)
    parts = zip(lengths, values.split(lengths), strict=True)
    bottom = batch_denominator(kind, sum(lengths), len(lengths))  # losses-1: of the batch, never of a part
    apart = sum(
        float((token_weights(kind, documents([n]), torch.ones(n, dtype=torch.bool), 8) * part).sum()) / bottom
        for n, part in parts
    )
    assert apart == pytest.approx(whole, rel=1e-5, abs=1e-6)


@given(lengths=LENGTHS, seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_sums_over_sequences_are_those_of_a_loop_bit_for_bit_on_any_packing(lengths: list[int], seed: int):
    values = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(seed))
    numbered = documents(lengths)
    sums, means = sequence_sum(values, numbered), sequence_mean(values, numbered)
    for number, length in enumerate(lengths):
        here = numbered == number
        alone = sequence_sum(values[here], torch.zeros(length, dtype=torch.int64))
        assert torch.equal(sums[here], alone)
        if length:
            close(means[here], values[here].mean().expand(length))
    assert sequence_count(numbered) == sum(length > 0 for length in lengths)


def test_sums_over_sequences_have_the_gradient_of_a_loop():
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    # s1 = v0 + v1 seen twice, s2 = v2: d(s1^2 * 2 + s2^2) = 4 s1 for both, 2 s2
    sequence_sum(values, documents([2, 0, 1])).square().sum().backward()
    close(values.grad, torch.tensor([12.0, 12.0, 6.0]))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum"])
def test_weights_are_floats_of_single_precision(aggregation):
    weights = token_weights(aggregation, documents([2, 1]), torch.ones(3, dtype=torch.bool), 4)
    assert weights.dtype == torch.float32
