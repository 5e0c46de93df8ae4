"""Rows become one line of tokens that keeps all that trained tokens depend on."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from goaly.train.microbatch import microbatch
from tests.unit.train.batches import documents, pack


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 12), rows=st.integers(1, 5), multiple=st.sampled_from([1, 2, 8, 300]), seed=st.integers(0, 99)
)
def test_every_trained_token_keeps_its_past_its_columns_and_its_cell(count: int, rows: int, multiple: int, seed: int):
    packed = pack(documents(count, seed=seed, longest=20), rows=rows, row_length=240)
    line = microbatch(packed.rows, multiple_of=multiple)
    tokens, positions = line.tokens_1T[0], line.positions_1T[0]
    flat = packed.rows.flatten(0, 1)
    assert len(tokens) % multiple == 0
    assert positions.max() <= flat["positions"].max()
    assert line.cells_P.tolist() == flat["trained"].nonzero().flatten().tolist()
    assert torch.equal(line.columns["advantages"], flat["advantages"][line.cells_P])
    for index, cell in enumerate(line.cells_P.tolist()):
        at = int(line.predicting_P[index]) + 1
        past = int(flat["positions"][cell]) + 1
        assert line.targets_P[index] == flat["tokens"][cell] == tokens[at]
        assert torch.equal(tokens[at + 1 - past : at + 1], flat["tokens"][cell + 1 - past : cell + 1])
        assert positions[at + 1 - past : at + 1].tolist() == list(range(past))
    # the line ends with the last trained token of each row, up to the multiple
    used = sum(int(row.nonzero().max()) + 1 for row in packed.rows["trained"] if row.any())
    assert len(tokens) == -(-used // multiple) * multiple
    assert line.columns["documents"].unique().numel() == count


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 12), rows=st.integers(1, 5), seed=st.integers(0, 99))
def test_parts_of_the_line_have_each_trained_token_once_with_its_columns(count: int, rows: int, seed: int):
    packed = pack(documents(count, seed=seed, longest=20, choices=(2, 8, 3)), rows=rows, row_length=240)
    line = microbatch(packed.rows, multiple_of=8)
    order = torch.randperm(line.tokens_1T.shape[1], generator=torch.Generator().manual_seed(seed))
    found = []
    for places in order.chunk(4):
        part, own = line.part(places)
        found += own.tolist()
        assert torch.equal(places[part.predicting_P], line.predicting_P[own])
        assert torch.equal(part.tokens_1T[0], line.tokens_1T[0, places])
        assert torch.equal(part.positions_1T[0], line.positions_1T[0, places])
        assert torch.equal(part.choices_1TNK[0], line.choices_1TNK[0, places])
        assert torch.equal(part.replayed_1T[0], line.replayed_1T[0, places])
        assert torch.equal(part.targets_P, line.targets_P[own])
        assert torch.equal(part.cells_P, line.cells_P[own])
        assert all(torch.equal(part.columns[key], column[own]) for key, column in line.columns.items())
    assert sorted(found) == list(range(len(line.cells_P)))


def test_rows_without_a_trained_token_still_make_a_line():
    packed = pack(documents(2), rows=2, row_length=80)
    packed.rows["trained"].zero_()
    line = microbatch(packed.rows, multiple_of=4)
    assert line.tokens_1T.shape == (1, 4)
    assert line.cells_P.numel() == 0


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 12), rows=st.integers(1, 5), multiple=st.sampled_from([1, 8]), seed=st.integers(0, 99))
def test_tokens_before_the_last_trained_one_of_their_document_have_choices_to_replay(
    count: int, rows: int, multiple: int, seed: int
):  # trajectory-2
    sequences = documents(count, seed=seed, longest=20, choices=(2, 8, 3))
    for number, sequence in enumerate(sequences):
        sequence["trained"][-1 - number % 3 :] = False  # as if an environment had the last word
        sequence["tokens"][:] = torch.arange(len(sequence["tokens"])) + 1000 * (number + 1)
    line = microbatch(pack(sequences, rows=rows, row_length=240).rows, multiple_of=multiple)
    replayed = dict(zip(line.tokens_1T[0].tolist(), line.replayed_1T[0].tolist(), strict=True))
    choices = dict(zip(line.tokens_1T[0].tolist(), line.choices_1TNK[0], strict=True))
    for sequence in sequences:
        tokens = sequence["tokens"].tolist()
        trained = sequence["trained"].nonzero().flatten().tolist()
        needed = tokens[: trained[-1]] if trained else []
        assert [token for token in tokens if replayed.get(token)] == needed
        for at, token in enumerate(needed):
            assert torch.equal(choices[token], sequence["expert_choices"][at])
    assert "expert_choices" not in line.columns
