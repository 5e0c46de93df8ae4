"""What a teacher reads: each taught token once, after the tokens that the teacher shall have seen before it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from goaly.backlog.batch import Batch, add_column, annotation, build_batch, check_group, column_of_samples
from goaly.backlog.settings import BacklogSettings
from goaly.base.errors import SchemaError
from goaly.reward.settings import AdvantageSettings
from goaly.trajectory import TAUGHT, Group, TeacherContext, Trajectory, Turn
from tests.unit.trajectories import grouped, sampled

ROW = 48


def two_turns(index: int, contexts: dict[int, list[int]]) -> Trajectory:
    """Answers at places 2 to 5 and 7 to 9, with these contexts by their turns."""
    trained = torch.tensor([False, False, True, True, True, False, False, True, True])
    made = sampled(9, index=index, tokens=list(range(100 * index, 100 * index + 9)))
    made.tokens["trained"] = trained
    turns = [("prompt", 0, 2), ("policy", 2, 5), ("environment", 5, 7), ("policy", 7, 9)]
    made = replace(made, turns=tuple(Turn(author=who, start=start, stop=stop) for who, start, stop in turns))
    for place, context in contexts.items():
        made = made.taught(context, made.turns[place])
    return made


def batch_of(group: Group, taught: Any, *, dp_ranks: int = 1, minibatches: int = 1) -> Batch:
    size = BacklogSettings(groups_per_step=1, group_size=len(group.samples), row_length=ROW)
    return build_batch(
        0,
        [group],
        settings=size,
        advantage_settings=AdvantageSettings(name="group_mean"),
        dp_ranks=dp_ranks,
        pad_token=0,
        taught=taught,
    )


def read(batch: Batch) -> set[tuple[tuple[int, ...], int]]:
    """Each judged token, after all that the teacher has seen of its document before it."""
    found = []
    assert batch.lessons is not None
    for packed in batch.lessons.ranks:
        rows = packed.rows
        for row, at in rows["trained"].nonzero().tolist():
            first = at - int(rows["positions"][row, at])
            found.append((tuple(rows["tokens"][row, first:at].tolist()), int(rows["tokens"][row, at])))
    assert len(found) == len(set(found)) == batch.lessons.ranks[0].batch_trained_tokens
    return set(found)


def test_a_teacher_sees_its_context_and_then_the_turn():
    group = grouped(0, [two_turns(0, {1: [7], 3: [8, 9]}), two_turns(1, {3: [5]}), two_turns(2, {})])
    in_context = {((7,), 2), ((7, 2), 3), ((7, 2, 3), 4), ((8, 9), 7), ((8, 9, 7), 8)}
    in_context |= {((5,), 107), ((5, 107), 108)}
    assert read(batch_of(group, "context")) == in_context
    own = {(tuple(range(100, 100 + at)), 100 + at) for at in (2, 3, 4)}  # its second turn has a context
    own |= {(tuple(range(200, 200 + at)), 200 + at) for at in (2, 3, 4, 7, 8)}
    assert read(batch_of(group, "all")) == in_context | own


def test_the_last_turn_is_taught_unless_another_is_named_and_a_new_context_replaces_the_old():
    made = two_turns(0, {}).taught([1, 2]).taught([3])
    assert made.teacher_contexts == (TeacherContext(7, 9, (3,)),)
    assert made.taught([4], made.turns[1]).teacher_contexts[0] == TeacherContext(2, 5, (4,))


@pytest.mark.parametrize("taught", ["all", "context"])
@pytest.mark.parametrize("dp_ranks", [1, 2, 3])
@settings(max_examples=20, deadline=None)
@given(
    contexts=st.lists(
        st.dictionaries(st.sampled_from([1, 3]), st.lists(st.integers(900, 999), min_size=1, max_size=30)),
        min_size=1,
        max_size=7,
    )
)
def test_a_teachers_values_come_back_to_the_tokens_that_it_judged(taught, dp_ranks: int, contexts):  # backlog-10
    group = grouped(0, [two_turns(index, one) for index, one in enumerate(contexts)])
    group = replace(group, samples=tuple(replace(one, sample_index=at) for at, one in enumerate(group.samples)))
    batch = batch_of(group, taught, dp_ranks=dp_ranks)
    assert batch.lessons is not None
    assert len({len(packed.rows) for packed in batch.lessons.ranks}) == 1
    for rank, packed in enumerate(batch.lessons.ranks):
        said_RL = torch.where(packed.rows["trained"], -packed.rows["tokens"].float() - 1, 99.0)
        said_RLK = torch.stack([said_RL, 2 * said_RL], -1)
        for key, column in (("teacher_logprobs", said_RL), ("teacher_top_logprobs", said_RLK)):
            add_column(batch, annotation(batch, rank, key, column), AdvantageSettings(name="group_mean"))
    assert not batch.unfinished
    mask = torch.cat(column_of_samples(batch, TAUGHT))
    tokens = torch.cat([one.tokens["tokens"] for one in group.samples])
    expected = torch.where(mask, -tokens.float() - 1, 0.0)
    torch.testing.assert_close(torch.cat(column_of_samples(batch, "teacher_logprobs")), expected)
    top = torch.cat(column_of_samples(batch, "teacher_top_logprobs"))
    torch.testing.assert_close(top, torch.stack([expected, 2 * expected], -1))
    assert batch.ranks[0].batch_taught_tokens == int(mask.sum()) == batch.lessons.ranks[0].batch_trained_tokens


def test_minibatches_count_their_own_taught_tokens():
    groups = [grouped(ticket, [two_turns(ticket, {1: [7]}), two_turns(9, {})]) for ticket in range(4)]
    batch = build_batch(
        0,
        groups,
        settings=BacklogSettings(groups_per_step=4, group_size=2, row_length=ROW),
        advantage_settings=AdvantageSettings(name="group_mean"),
        dp_ranks=1,
        pad_token=0,
        minibatches=2,
        taught="context",
    )
    steps = batch.ranks[0].split()
    assert [one.batch_taught_tokens for one in steps] == [6, 6]
    assert [int(one.rows[TAUGHT].sum()) for one in steps] == [6, 6]


def test_contexts_survive_the_log_and_the_way_between_actors():
    group = grouped(3, [two_turns(0, {1: [7], 3: [8, 9]}), two_turns(1, {})])
    again = Group.decoded(bytearray(group.encoded()))
    assert [one.teacher_contexts for one in again.samples] == [one.teacher_contexts for one in group.samples]


def test_a_context_that_does_not_fit_or_is_for_no_turn_is_refused_by_name():
    size = BacklogSettings(groups_per_step=1, group_size=1, row_length=ROW)
    for contexts, said in [
        (((2, 5, (1,) * ROW),), r"a teacher's context and its turn have 51 tokens, which don't fit into backlog.row_l"),
        (((2, 5, ()),), "a teacher's context of 0 tokens for tokens 2 to 5 of 9"),
        (((2, 5, (1,)), (4, 9, (1,))), "a teacher's context of 1 tokens for tokens 4 to 9"),
        (((7, 12, (1,)),), "tokens 7 to 12 of 9; each must have a token, and be for a turn of its own"),
    ]:
        made = replace(two_turns(0, {}), teacher_contexts=tuple(TeacherContext(*one) for one in contexts))
        with pytest.raises(SchemaError, match=said):
            check_group(grouped(0, [made]), size, 0)


def test_a_run_without_a_teacher_has_no_lessons():
    batch = batch_of(grouped(0, [two_turns(0, {1: [7]})]), None)
    assert batch.lessons is None
    assert TAUGHT not in batch.ranks[0].rows.keys()  # noqa: SIM118
    assert batch.ranks[0].batch_taught_tokens == 0
