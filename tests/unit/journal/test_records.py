"""Every record of a run's log comes back as it was."""

import json
import pickle

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from trajectories import grouped, sampled

from goaly.backlog.events import Annotated, Dropped, Formed, Ticket, Trained
from goaly.journal.records import Drawn, Published, Record, Resumed, decode, encode
from goaly.prompts.prompt import Message, Prompt
from goaly.trajectory import REQUIRED, Group, Trajectory

PROMPT = Prompt(
    id="a/1",
    source="a",
    messages=(Message(role="user", content=[{"type": "text", "text": "é\x1f"}], extra={"deep": {"n": [1, None]}}),),
    answer="2",
    metadata={"digits": "1"},
    tools=[{"name": "f", "parameters": {}}],
    verifier="some.module:function",
)


@pytest.mark.parametrize(
    "record",
    [
        Ticket(index=3, min_version=1),
        Dropped.failed(4, "broken: 'x'\n"),
        Dropped.rejected(4, "no_signal"),
        Formed(batch=2, tickets=(5, 3)),
        Trained(batch=2, tickets=(5, 3)),
        Drawn(ticket=3, prompt=PROMPT, mixture={"credits": {"a": 0.1 + 0.2}, "streams": [None, 1]}, learned=2),
        Published(version=3, digest="0f"),
        Resumed(policy_version=3, trainer={"fsdp": 1}),
    ],
    ids=lambda record: type(record).__name__,
)
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    assert coded(record) == record


def test_a_record_is_a_safetensors_file() -> None:
    group = pickle.loads(pickle.dumps(grouped(7, [sampled(3), sampled(6, index=1)])))
    found = safetensors.torch.load(b"".join(encode(group)))
    assert {name: column.dtype for name, column in found.items()} == REQUIRED | {"tokens": torch.int32}
    for name, column in found.items():
        assert torch.equal(column, torch.cat([sample.tokens[name] for sample in group.samples]))
    assert safetensors.torch.load(b"".join(encode(Ticket(index=3, min_version=1)))) == {}


def test_a_record_that_safetensors_wrote_can_be_read() -> None:
    whole = b"".join(encode(grouped(7, [sampled(3), sampled(6, index=1)])))
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    again = decode(safetensors.torch.save(safetensors.torch.load(whole), header["__metadata__"]))
    assert isinstance(again, Group)
    assert [sample.tokens["tokens"].tolist() for sample in again.samples] == [[10, 11, 12], [10, 11, 12, 13, 14, 15]]


def coded(record: Record) -> Record:
    """The record, encoded and decoded."""
    return decode(b"".join(encode(record)))


def facts(sample: Trajectory) -> tuple:
    return sample.prompt_id, sample.sample_index, sample.turns, sample.environment, sample.outcome


@given(lengths=st.lists(st.integers(2, 20), min_size=1, max_size=4), reward=st.floats(-1e6, 1e6, width=32))
def test_a_group_comes_back_as_it_was(lengths: list[int], reward: float) -> None:
    samples = [sampled(length, index=at, reward=reward, version=at) for at, length in enumerate(lengths)]
    group = grouped(7, samples)
    found = coded(group)
    assert isinstance(found, Group)
    assert (found.ticket, found.prompt_id, found.source) == (group.ticket, group.prompt_id, group.source)
    assert [facts(sample) for sample in found.samples] == [facts(sample) for sample in group.samples]
    for sample, before in zip(found.samples, group.samples, strict=True):
        assert set(sample.tokens.keys()) == set(before.tokens.keys())
        for key in before.tokens.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
            assert sample.tokens[key].dtype == before.tokens[key].dtype
            assert torch.equal(sample.tokens[key], before.tokens[key])


def test_an_annotation_comes_back_as_it_was() -> None:
    values_T = torch.rand(6)
    found = coded(Annotated(batch=4, key="values", places=(2, 0), values_T=values_T))
    assert isinstance(found, Annotated)
    assert (found.batch, found.key, found.places) == (4, "values", (2, 0))
    assert torch.equal(found.values_T, values_T)
