"""A step of a run with bitwise numerics compares its log-probs with the sampler's, and ends the run if one differs."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from goaly.base.errors import ParityError, SchemaError
from goaly.losses.objective import Likelihood, PolicyObjective
from goaly.losses.settings import LossSettings
from goaly.models.settings import ModelSettings
from goaly.train.settings import OptimizerSettings, TrainerSettings
from goaly.train.train_engine import TrainEngine
from goaly.trajectory import Minibatch, PackedRows
from tests.unit.train.batches import documents, pack

SETTINGS = TrainerSettings(optimizer=OptimizerSettings(lr=1e-2), microbatch_rows=2)
OBJECTIVE = PolicyObjective(LossSettings())


@pytest.fixture(params=["float32"])
def engine(tiny_model_folder: Path, request: pytest.FixtureRequest) -> TrainEngine:
    model = ModelSettings(path=str(tiny_model_folder), dtype=request.param, numerics="bitwise")
    return TrainEngine(model, SETTINGS, earlier_policies=2)


def as_sampled(engine: TrainEngine, **counts: Any) -> PackedRows:
    """A batch whose sampler gave every token the log-prob that this engine gives it, packed in another way."""
    sequences = documents(8)
    rows = pack(sequences[::-1], rows=1, row_length=400)
    logprobs = engine.logprobs(rows.rows)[0]
    start = 0
    for sequence in sequences[::-1]:
        stop = start + len(sequence["tokens"])
        sequence["sampler_logprobs"] = logprobs[start:stop]
        sequence["sampler_versions"] = torch.where(sequence["trained"], engine.policy_version, -1).int()
        start = stop
    packed = pack(sequences, rows=4, row_length=200)
    return PackedRows(
        rows=packed.rows,
        batch_trained_tokens=packed.batch_trained_tokens,
        batch_sequences=packed.batch_sequences,
        **counts,
    )


def test_a_step_counts_the_tokens_that_it_compares_and_the_ratio_is_one(engine: TrainEngine):  # train-9
    for _ in range(2):
        batch = as_sampled(engine)
        metrics = engine.train_step(batch, OBJECTIVE)
        assert metrics["parity/tokens"] == batch.batch_trained_tokens
        assert metrics["parity/share"] == 1
        assert metrics["parity/differing_tokens"] == 0
        assert metrics["ratio_mean"] == metrics["ratio_max"] == 1.0


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_recomputed_activations_change_no_bit(engine: TrainEngine, tiny_model_folder: Path, checkpointing: Any):
    settings = dataclasses.replace(SETTINGS, activation_checkpointing=checkpointing)
    recomputing = TrainEngine(ModelSettings(path=str(tiny_model_folder), numerics="bitwise"), settings)
    batch = as_sampled(engine)
    recomputing.train_step(batch, OBJECTIVE)
    engine.train_step(batch, OBJECTIVE)
    assert recomputing.digest() == engine.digest()


TWO_STEPS = tuple(Minibatch(rows=2, trained_tokens=100, sequences=4) for _ in range(2))


def with_tokens_of(batch: PackedRows, other: PackedRows, every: int) -> None:
    """Let every n-th token of the batch be the one that another policy sampled in the same sequences."""
    taken_RL = batch.rows["trained"] & (batch.rows["positions"] % every == 0)
    for column in ("sampler_logprobs", "sampler_versions"):
        batch.rows[column] = torch.where(taken_RL, other.rows[column], batch.rows[column])


@pytest.mark.parametrize("engine", ["float32", "bfloat16"], indirect=True)
@pytest.mark.parametrize("proximal", ["trainer", "sampler"])
def test_all_tokens_of_all_minibatches_are_compared_those_of_older_versions_with_these(
    engine: TrainEngine, proximal: Any
):  # train-9
    objective = PolicyObjective(LossSettings(proximal=proximal))
    versions = []
    for _ in range(3):
        versions.append(as_sampled(engine, minibatches=TWO_STEPS))
        engine.train_step(as_sampled(engine), objective)
    batch = as_sampled(engine, minibatches=TWO_STEPS)
    with_tokens_of(batch, versions[2], 2)
    with_tokens_of(batch, versions[1], 5)
    assert set(batch.rows["sampler_versions"][batch.rows["trained"]].tolist()) == {1, 2, 3}
    metrics = engine.train_step(batch, objective)
    assert metrics["parity/tokens"] == batch.batch_trained_tokens
    assert metrics["parity/share"] == 1


def test_comparing_older_versions_changes_no_parameter(engine: TrainEngine, tiny_model_folder: Path):
    other = TrainEngine(ModelSettings(path=str(tiny_model_folder), numerics="bitwise"), SETTINGS)
    first = as_sampled(engine)
    for one in (engine, other):
        one.train_step(first, OBJECTIVE)
    batch = as_sampled(engine)
    with_tokens_of(batch, first, 2)
    assert [one.train_step(batch, OBJECTIVE)["parity/share"] == 1 for one in (engine, other)] == [True, False]
    assert engine.digest() == other.digest()


def test_a_token_of_an_older_version_that_differs_is_named_with_its_version(engine: TrainEngine):  # train-9
    first = as_sampled(engine)
    engine.train_step(first, OBJECTIVE)
    batch = as_sampled(engine)
    with_tokens_of(batch, first, 1)
    place = int(batch.rows["trained"][2].nonzero()[3])
    batch.rows["sampler_logprobs"][2, place] -= 1e-3
    assert f"differ at 1 of {batch.batch_trained_tokens} tokens of policy version 0. " in differing(engine, batch)


def test_a_difference_in_a_later_minibatch_is_found_before_any_step(engine: TrainEngine):  # train-9
    batch = as_sampled(engine, minibatches=TWO_STEPS)
    place = int(batch.rows["trained"][3].nonzero()[7])
    batch.rows["sampler_logprobs"][3, place] -= 1e-3
    said = differing(engine, batch, PolicyObjective(LossSettings(proximal="trainer")))
    assert f"token {int(batch.rows['tokens'][3, place])} at position {int(batch.rows['positions'][3, place])}" in said


def test_the_first_step_that_does_not_compare_all_is_logged(engine: TrainEngine, caplog: pytest.LogCaptureFixture):
    first = as_sampled(engine)
    for _ in range(3):
        engine.train_step(as_sampled(engine), OBJECTIVE)
    for _ in range(2):
        batch = as_sampled(engine)
        with_tokens_of(batch, first, 2)  # these are 3 and 4 versions old
        metrics = engine.train_step(batch, OBJECTIVE)
        assert metrics["parity/tokens"] == int((batch.rows["sampler_versions"] > 0).sum())
        assert 0 < metrics["parity/share"] < 1
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "The trainer has no parameters of the policy versions that sampled the others" in warning


def test_a_token_of_a_version_that_is_still_to_come_ends_the_step(engine: TrainEngine):
    batch = as_sampled(engine)
    batch.rows["sampler_versions"][1, int(batch.rows["trained"][1].nonzero()[7])] = 1
    with pytest.raises(SchemaError, match="sampler_versions: tokens of versions after 0, the trainer's own: 1"):
        engine.train_step(batch, OBJECTIVE)
    assert engine.policy_version == 0
    assert all(parameter.grad is None for parameter in engine._model.parameters())


def test_what_no_policy_sampled_is_not_compared(engine: TrainEngine):
    batch = pack(documents(8), rows=4, row_length=200)
    assert "parity/tokens" not in engine.train_step(batch, Likelihood())


def differing(engine: TrainEngine, batch: PackedRows, objective: PolicyObjective = OBJECTIVE) -> str:
    before = engine.digest()
    with pytest.raises(ParityError) as error:
        engine.train_step(batch, objective)
    assert engine.digest() == before
    assert all(parameter.grad is None for parameter in engine._model.parameters())
    return str(error.value)


def test_a_step_after_one_that_failed_compares_each_token_once(engine: TrainEngine):  # train-9
    batch = as_sampled(engine)
    sound = batch.rows["sampler_logprobs"].clone()
    batch.rows["sampler_logprobs"] -= 1e-3
    differing(engine, batch)
    batch.rows["sampler_logprobs"] = sound
    assert engine.train_step(batch, OBJECTIVE)["parity/share"] == 1


def test_a_difference_in_the_last_bit_ends_the_step_with_the_token_and_both_values(engine: TrainEngine):
    batch = as_sampled(engine)
    place = int(batch.rows["trained"][1].nonzero()[7])
    sampler = batch.rows["sampler_logprobs"]
    own = float(sampler[1, place])
    sampler[1, place] = torch.nextafter(sampler[1, place], torch.tensor(0.0))
    said = differing(engine, batch)
    assert f"token {int(batch.rows['tokens'][1, place])} at position {int(batch.rows['positions'][1, place])}" in said
    assert f"the trainer's log-prob is {own!r}, the sampler's {float(sampler[1, place])!r}" in said
