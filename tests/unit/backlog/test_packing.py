"""Packing: whole sequences, equal rows, balanced ranks, the same result every time."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trajectories import grouped, sampled

from goaly.backlog.batch import Batch, add_advantages, batch_metrics, build_batch, check_group
from goaly.backlog.packing import assign, divide
from goaly.backlog.settings import BacklogSettings
from goaly.base.errors import SchemaError
from goaly.reward.settings import AdvantageSettings
from goaly.trajectory import Group, Outcome, pack_rows, token_data

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


def test_where_dealing_sequences_takes_more_rows_whole_rows_of_the_joint_packing_are_dealt_heaviest_first():
    # dealt one by one they are 10 5 and 7 6 5, and the second rank would need three rows; jointly 10 | 7 | 6 | 5 5
    assert assign([5, 5, 6, 7, 10], 10, 2) == (((4,), (3,)), ((0, 1), (2,)))
    assert assign([4, 7, 7, 3, 6, 9], 10, 2) == (((1, 3), (5,)), ((4, 0), (2,)))


def test_few_sequences_are_dealt_over_the_ranks_not_heaped_on_one():
    assert assign([4, 4], 16, 2) == (((0,),), ((1,),))


def test_a_rank_without_sequences_gets_padding_rows():
    assert assign([4], 16, 2) == (((0,),), ((),))


def test_a_sequence_longer_than_a_row_is_refused_by_both_numbers():
    with pytest.raises(SchemaError, match=r"sequence 1 has 33 tokens, more than backlog\.row_length=32"):
        assign([4, 33], 32, 1)


def test_a_packed_row_by_hand():
    rows = pack_rows([sequence(7, 8, 9), sequence(4, 5)], [(0, 1), ()], 8, pad_token=99)
    assert rows["tokens"].tolist() == [[7, 8, 9, 4, 5, 99, 99, 99], [99] * 8]
    assert rows["positions"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], list(range(8))]
    assert rows["trained"].tolist() == [[False, True, True, False, True, False, False, False], [False] * 8]
    assert rows["sampler_versions"].tolist() == [[2, 2, 2, 2, 2, -1, -1, -1], [-1] * 8]
    assert rows["sampler_logprobs"].tolist() == [[-1.0] * 5 + [0.0] * 3, [0.0] * 8]


def test_a_column_that_only_some_sequences_hold_is_refused_by_name():
    with pytest.raises(SchemaError, match="`values` is in some sequences"):
        pack_rows([sequence(1, 2), sequence(1, 2, values=torch.zeros(2))], [(0, 1)], 8, pad_token=0)


@given(LENGTHS, st.integers(1, 5))
def test_every_group_is_whole_in_one_part_and_parts_differ_by_at_most_one_group(weights, parts):
    parts = min(parts, len(weights))
    divided = divide(weights, parts)
    assert sorted(place for part in divided for place in part) == list(range(len(weights)))
    assert len(divided) == parts
    assert all(divided)
    assert all(list(part) == sorted(part) for part in divided)
    assert [part[0] for part in divided] == sorted(part[0] for part in divided)
    loads = [sum(weights[place] for place in part) for part in divided]
    assert max(loads) - min(loads) <= max(weights)


def test_parts_by_hand():
    # heaviest first: 9 | 7, then 4 to 7, 3 to 9, 1 to 11 or 12: the lighter
    assert divide([3, 9, 1, 4, 7], 2) == ((0, 1), (2, 3, 4))
    assert divide([2, 2], 1) == ((0, 1),)


def group(ticket: int, lengths: list[int]) -> Group:
    """A group whose tokens all are its ticket."""
    return grouped(
        ticket,
        [sampled(length, index=index, tokens=[ticket] * length, version=2) for index, length in enumerate(lengths)],
    )


def batch_of(groups: Sequence[Group], **changes: Any) -> Batch:
    """The batch of these groups on one rank in rows of 16 tokens, but for what `changes` names."""
    arguments: dict[str, Any] = {
        "settings": BacklogSettings(row_length=16),
        "advantage_settings": AdvantageSettings(),
        "dp_ranks": 1,
        "pad_token": 99,
    }
    return build_batch(0, groups, **arguments | changes)


GROUPS = st.lists(st.lists(st.integers(2, 16), min_size=2, max_size=2), min_size=3, max_size=8)


@given(GROUPS, st.integers(1, 3), st.integers(1, 3))
def test_the_rows_of_a_part_hold_its_groups_and_no_others_on_every_rank(lengths, ranks, minibatches):
    groups = [group(ticket, of_group) for ticket, of_group in enumerate(lengths)]
    batch = batch_of(groups, dp_ranks=ranks, minibatches=minibatches)
    shares = [packed.split() for packed in batch.ranks]
    assert {len(share) for share in shares} == {minibatches}
    found = []
    for parts in zip(*shares, strict=True):
        assert len({part.rows.batch_size for part in parts}) == 1
        assert len({(part.batch_trained_tokens, part.batch_sequences) for part in parts}) == 1
        tokens = torch.cat([part.rows["tokens"][part.rows["trained"]] for part in parts])
        assert parts[0].batch_trained_tokens == len(tokens)
        tickets = set(tokens.tolist())
        assert parts[0].batch_sequences == 2 * len(tickets)
        assert len(tokens) == sum(length - 1 for ticket in tickets for length in lengths[ticket])
        found += sorted(tickets)
    assert sorted(found) == list(range(len(groups)))
    assert sum(part.batch_trained_tokens for part in shares[0]) == batch.ranks[0].batch_trained_tokens


def test_a_batch_in_one_part_has_the_rows_that_it_always_had():
    groups = [group(0, [4, 9]), group(1, [7, 2])]
    batch = batch_of(groups)
    assert batch.placement == assign([4, 9, 7, 2], 16, 1)
    assert batch.ranks[0].minibatches == ()


def test_minibatches_are_balanced_by_tokens_not_by_groups():
    # 16 tokens against 4 x 4: by groups it would be 3 and 2
    groups = [group(0, [8, 8]), *(group(ticket, [2, 2]) for ticket in range(1, 5))]
    batch = batch_of(groups, minibatches=2)
    assert [part.sequences for part in batch.ranks[0].minibatches] == [2, 8]


def test_a_groups_weight_multiplies_its_advantages_and_not_the_returns_that_a_critic_learns():
    groups = [group(0, [3, 4]), group(1, [5, 2])]
    found = []
    for weights in (None, (0.5, 1.5)):
        batch = batch_of(
            groups, advantage_settings=AdvantageSettings(name="gae", options={"normalize": False}), weights=weights
        )
        rows = batch.ranks[0].rows
        rows["values"] = 0.25 * rows["trained"]
        add_advantages(batch, AdvantageSettings(name="gae", options={"normalize": False}))
        found.append(rows)
    plain, weighted = found
    assert torch.equal(weighted["returns"], plain["returns"])
    assert plain["returns"].abs().sum() > 0
    weight = torch.where(plain["tokens"] == 0, 0.5, 1.5)
    torch.testing.assert_close(weighted["advantages"], weight * plain["advantages"])


def test_metrics_of_rewards_are_computed_in_double_precision():
    samples = [sampled(3, index=index, reward=reward, version=2) for index, reward in enumerate((1e8, 1.0))]
    assert batch_metrics(2, [grouped(0, samples)])["reward/mean"] == 50_000_000.5


def test_a_batch_in_which_nothing_is_trained_has_no_age():
    samples = [sampled(1, index=index, reward=1.0) for index in range(2)]
    metrics = batch_metrics(7, [grouped(0, samples)])
    assert (metrics["age/mean"], metrics["age/max"], metrics["length/max"]) == (0.0, 0.0, 0.0)


def test_a_sample_that_became_invalid_on_its_way_is_named():
    broken = group(3, [4, 5])
    broken.samples[1].tokens["sampler_logprobs"][2] = float("nan")
    with pytest.raises(SchemaError, match="trajectory p/1: `sampler_logprobs` of a trained token"):
        check_group(broken, BacklogSettings(group_size=2, row_length=16), 0)


def test_the_tokens_of_an_answer_that_the_limit_ended_are_marked_and_its_share_is_reported():
    cut = group(0, [3, 4])
    cut = dataclasses.replace(
        cut, samples=(dataclasses.replace(cut.samples[0], outcome=Outcome.TRUNCATED), cut.samples[1])
    )
    batch = batch_of([cut, group(1, [5, 2])], dp_ranks=2)
    assert batch.handle.metrics["length/truncated_share"] == 0.25
    assert sum(int(packed.rows["truncated"].sum()) for packed in batch.ranks) == 3
    for packed in batch.ranks:
        marked = packed.rows["truncated"]
        assert marked.dtype == torch.bool
        assert (packed.rows["tokens"][marked] == 0).all()
