"""The trajectory schema: what it takes, and that each refusal names the key."""

import json
import pickle
import struct
from dataclasses import replace

import cloudpickle
import pytest
import torch
from tensordict import TensorDict

from goaly.base.errors import SchemaError
from goaly.journal.records import decode, encode
from goaly.trajectory import Group, Outcome, Trajectory, Turn, check_tokens, pack_rows, token_data


def columns(**changes) -> dict[str, torch.Tensor]:
    sound = {
        "tokens": torch.tensor([5, 6, 7]),
        "trained": torch.tensor([False, True, True]),
        "sampler_logprobs": torch.tensor([0.0, -0.5, -1.0]),
        "sampler_versions": torch.tensor([-1, 3, 4], dtype=torch.int32),
        "rewards": torch.tensor([0.0, 0.0, 1.0]),
    }
    return {key: value for key, value in {**sound, **changes}.items() if value is not None}


def trajectory(**changes) -> Trajectory:
    return Trajectory(
        tokens=TensorDict(columns(**changes), batch_size=[3]),
        prompt_id="p1",
        sample_index=2,
        turns=(Turn(author="policy", start=1, stop=3),),
        environment="addition",
        outcome=Outcome.COMPLETE,
    )


def test_a_trajectory_knows_its_reward_and_its_trained_tokens():
    one = trajectory(rewards=torch.tensor([0.0, 0.25, 1.0]))
    assert (len(one), one.reward, one.trained_tokens) == (3, 1.25, 2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rewards": None}, "`rewards` is missing"),
        ({"colour": torch.zeros(3)}, "`colour` is unknown"),
        ({"tokens": torch.tensor([5, 6, 7], dtype=torch.int32)}, "`tokens` is torch.int32, must be torch.int64"),
        ({"advantages": torch.zeros(3, dtype=torch.float64)}, "`advantages` is torch.float64"),
        ({"rewards": torch.tensor([3e38, 3e38, 0.0])}, "`rewards` add up to inf, must be a finite number"),
        ({"rewards": torch.zeros(3, 2)}, r"`rewards` has shape \(3, 2\)"),
        ({"expert_choices": torch.zeros(3, 2, 2)}, "`expert_choices` is torch.float32, must be torch.uint8"),
        ({"expert_choices": torch.zeros(3, dtype=torch.uint8)}, r"`expert_choices` has shape \(3,\), must be \[tokens"),
        ({"trained": torch.tensor([True, True, True])}, "`trained` is set on the first token"),
        ({"sampler_logprobs": torch.tensor([0.0, 0.5, -1.0])}, "`sampler_logprobs` of a trained token is positive"),
        ({"sampler_logprobs": torch.tensor([0.0, -0.5, float("nan")])}, "`sampler_logprobs` of a trained token"),
        ({"sampler_versions": torch.tensor([-1, 3, -1], dtype=torch.int32)}, "`sampler_versions` of a trained token"),
    ],
)
def test_a_broken_column_is_refused_by_name(changes, named):  # trajectory-1
    with pytest.raises(SchemaError, match=f"trajectory p1/2: {named}"):
        trajectory(**changes)


def test_untrained_tokens_need_neither_a_version_nor_a_logprob_below_zero():
    taken = trajectory(
        trained=torch.tensor([False, False, True]), sampler_versions=torch.tensor([-1, -1, 0], dtype=torch.int32)
    )
    assert taken.trained_tokens == 1


def test_an_empty_trajectory_is_refused():
    with pytest.raises(SchemaError, match="`tokens` is empty"):
        token_data({key: value[:0] for key, value in columns().items()})


def test_columns_of_later_stages_are_taken():
    later = {key: torch.arange(3.0) for key in ("reference_logprobs", "values", "advantages", "returns")}
    data = token_data(columns(**later))
    check_tokens(data, where="here")
    assert all(torch.equal(data[key], column) for key, column in later.items())


def test_a_group_pickles_whole():
    group = Group(
        ticket=4,
        prompt_id="p1",
        source="addition",
        samples=(trajectory(),),
        counts={"reward/verifier_errors": 2, "game/moves": 3},
    )
    copy = pickle.loads(pickle.dumps(group))
    assert b"_make_function" not in cloudpickle.dumps(group)  # no code: that of a class method takes milliseconds
    assert (copy.prompt_id, copy.source) == ("p1", "addition")
    assert copy.counts == {"reward/verifier_errors": 2, "game/moves": 3}
    assert (copy.ticket, copy.samples[0].turns, copy.samples[0].outcome) == (4, group.samples[0].turns, "complete")
    assert all(torch.equal(copy.samples[0].tokens[key], group.samples[0].tokens[key]) for key in columns())


def test_tool_calls_of_a_turn_reach_the_log_and_a_turn_without_any_costs_nothing_there():
    calling = Turn(author="policy", start=1, stop=3, calls=("add", "find"), malformed=1)
    plain = Turn(author="prompt", start=0, stop=1)
    sample = replace(trajectory(), turns=(plain, calling))
    group = Group(ticket=4, prompt_id="p", source="s", samples=(sample,))
    (back,) = decode(b"".join(encode(group))).samples
    assert back.turns == (plain, calling)
    assert rb"{\"author\": \"prompt\", \"start\": 0, \"stop\": 1}" in bytes(group.encoded())


def with_choices(**changes) -> Trajectory:
    """A trajectory with choices of two experts in each of four layers."""
    return trajectory(expert_choices=torch.arange(24, dtype=torch.uint8).view(3, 4, 2), **changes)


def untrained() -> Trajectory:
    """A trajectory of an episode in which the policy wrote nothing, so that nothing was recorded."""
    return trajectory(trained=torch.zeros(3, dtype=torch.bool))


def test_choices_of_experts_are_packed_and_an_untrained_sequence_needs_none():  # trajectory-2
    samples = [with_choices().tokens, untrained().tokens]
    packed = pack_rows(samples, [(1, 0)], 8, 0)
    assert torch.equal(packed["expert_choices"][0, 3:6], samples[0]["expert_choices"])
    assert packed["expert_choices"][0, [0, 1, 2, 6, 7]].count_nonzero() == 0
    with pytest.raises(SchemaError, match="sequence 1: `expert_choices` is in some sequences of the batch and not in"):
        pack_rows([samples[0], trajectory().tokens], [(0, 1)], 8, 0)
    assert "expert_choices" not in pack_rows([samples[1]], [(0,)], 8, 0)


def test_weights_of_forms_are_1_where_no_form_was_also_in_another_process_and_in_the_log():
    formed = trajectory(form_weights=torch.tensor([1.0, 0.25, 0.5]))
    packed = pack_rows([formed.tokens, trajectory().tokens], [(1, 0)], 8, 0)
    assert packed["form_weights"][0, :6].tolist() == [1.0, 1.0, 1.0, 1.0, 0.25, 0.5]
    group = Group(ticket=0, prompt_id="p", source="s", samples=(trajectory(), formed))
    for back in (pickle.loads(pickle.dumps(group)), decode(b"".join(encode(group)))):
        assert [one.tokens["form_weights"].tolist() for one in back.samples] == [[1.0, 1.0, 1.0], [1.0, 0.25, 0.5]]
    assert "form_weights" not in pack_rows([trajectory().tokens], [(0,)], 8, 0)


def test_choices_of_experts_survive_the_way_to_another_process_and_to_the_log():  # trajectory-2
    group = Group(ticket=0, prompt_id="p", source="s", samples=(untrained(), with_choices()))
    for back in (pickle.loads(pickle.dumps(group)), decode(b"".join(encode(group)))):
        assert torch.equal(back.samples[1].tokens["expert_choices"], with_choices().tokens["expert_choices"])
        assert back.samples[0].tokens["expert_choices"].shape == (3, 4, 2)
        assert pickle.loads(pickle.dumps(back)).encoded() == group.encoded()


def test_the_bytes_of_a_group_have_its_notes_and_older_bytes_have_none():
    noted = replace(trajectory(), notes=({"command": "ls", "after": 1},))
    group = Group(ticket=1, prompt_id="p1", source="s", samples=(noted, trajectory()))
    encoded = bytes(group.encoded())
    assert [list(one.notes) for one in Group.decoded(bytearray(encoded)).samples] == [
        [{"command": "ls", "after": 1}],
        [],
    ]
    length = struct.unpack("<Q", encoded[:8])[0]
    header = json.loads(encoded[8 : 8 + length])
    content = json.loads(header["__metadata__"]["content"])
    content["samples"] = [sample[:-2] for sample in content["samples"]]
    header["__metadata__"]["content"] = json.dumps(content)
    older = json.dumps(header).encode().ljust(length)[:length]
    decoded = Group.decoded(bytearray(encoded[:8] + older + encoded[8 + length :]))
    assert [one.notes for one in decoded.samples] == [(), ()]
