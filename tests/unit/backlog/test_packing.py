"""Packing: whole sequences, equal rows, balanced ranks, the same result every time."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from goaly.backlog.packing import assign, pack
from goaly.errors import SchemaError
from goaly.trajectory import token_data

LENGTHS = st.lists(st.integers(1, 32), min_size=1, max_size=60)


def sequence(*tokens: int, **extra: torch.Tensor):
    count = len(tokens)
    return token_data(
        {
            "tokens": torch.tensor(tokens),
            "trained": torch.tensor([False] + [True] * (count - 1)),
            "sampler_logprobs": torch.full((count,), -1.0),
            "sampler_versions": torch.full((count,), 2, dtype=torch.int32),
            "rewards": torch.zeros(count),
            **extra,
        }
    )


@given(LENGTHS, st.integers(1, 4))
def test_every_sequence_lies_whole_in_one_row_and_all_ranks_have_as_many_rows(lengths, ranks):
    dealt = assign(lengths, 32, ranks)
    assert len(dealt) == ranks
    assert len({len(rows) for rows in dealt}) == 1
    assert sorted(place for rows in dealt for row in rows for place in row) == list(range(len(lengths)))
    assert all(sum(lengths[place] for place in row) <= 32 for rows in dealt for row in rows)
    assert dealt == assign(list(lengths), 32, ranks)


@given(LENGTHS, st.integers(1, 4))
def test_rows_are_at_most_what_first_fit_decreasing_needs_rounded_up_to_the_ranks(lengths, ranks):
    joint = len(assign(lengths, 32, 1)[0])
    assert len(assign(lengths, 32, ranks)[0]) == -(-joint // ranks)
    assert joint <= 2 * -(-sum(lengths) // 32)


@given(LENGTHS, st.integers(2, 4))
def test_the_ranks_tokens_differ_by_at_most_one_row(lengths, ranks):
    loads = [sum(lengths[place] for row in rows for place in row) for rows in assign(lengths, 32, ranks)]
    assert max(loads) - min(loads) <= 32


def test_first_fit_decreasing_by_hand():
    assert assign([3, 7, 5, 2, 3], 10, 1) == (((1, 0), (2, 4, 3)),)


def test_few_sequences_are_dealt_over_the_ranks_not_heaped_on_one():
    assert assign([4, 4], 16, 2) == (((0,),), ((1,),))


def test_a_rank_without_sequences_gets_padding_rows():
    assert assign([4], 16, 2) == (((0,),), ((),))


def test_a_sequence_longer_than_a_row_is_refused_by_both_numbers():
    with pytest.raises(SchemaError, match="sequence 1 has 33 tokens, more than row_length=32"):
        assign([4, 33], 32, 1)


def test_a_packed_row_by_hand():
    rows = pack([sequence(7, 8, 9), sequence(4, 5)], [(0, 1), ()], 8, pad_token=99)
    assert rows["tokens"].tolist() == [[7, 8, 9, 4, 5, 99, 99, 99], [99] * 8]
    assert rows["positions"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], list(range(8))]
    assert rows["trained"].tolist() == [[False, True, True, False, True, False, False, False], [False] * 8]
    assert rows["sampler_versions"].tolist() == [[2, 2, 2, 2, 2, -1, -1, -1], [-1] * 8]
    assert rows["sampler_logprobs"].tolist() == [[-1.0] * 5 + [0.0] * 3, [0.0] * 8]


def test_a_column_that_only_some_sequences_hold_is_refused_by_name():
    with pytest.raises(SchemaError, match="`values` is in some sequences"):
        pack([sequence(1, 2), sequence(1, 2, values=torch.zeros(2))], [(0, 1)], 8, pad_token=0)
