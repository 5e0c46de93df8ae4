"""The critic's engine on one rank: what a value stands for, its gradient, its steps, and that it learns."""

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from goaly.backlog.batch import build_batch
from goaly.backlog.settings import BacklogSettings
from goaly.base.config.check import check
from goaly.losses.value_loss import ValueLoss
from goaly.models.attention import document_masks
from goaly.models.settings import ModelSettings
from goaly.models.tiny_model import TinyModel, write_tiny_model
from goaly.reward.settings import AdvantageSettings
from goaly.train import row_shares
from goaly.train.model_engine import ModelEngine
from goaly.train.settings import CriticSettings, OptimizerSettings, TrainerSettings
from goaly.train.train_engine import TrainEngine
from goaly.train.value_head import train_values
from goaly.trajectory import Group, Minibatch, Outcome, PackedRows, Trajectory, token_data
from tests.unit.train.batches import Document, critic_engine, documents, pack

TRAINER = TrainerSettings(microbatch_rows=2)
SETTINGS = CriticSettings(optimizer=OptimizerSettings(lr=3e-3))


@pytest.fixture
def engine(tiny_model_folder: Path):
    def made(settings: CriticSettings = SETTINGS, folder: Path = tiny_model_folder) -> ModelEngine:
        return critic_engine(ModelSettings(path=str(folder)), settings, TRAINER)

    return made


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, whose output projection is its embedding."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tied", TinyModel(layers=1, tied=True))


def moved(engine: ModelEngine) -> ModelEngine:
    """The engine with a head that isn't 0."""
    with torch.no_grad():
        head = engine.named_tensors()["lm_head.weight"]
        head.copy_(torch.linspace(-1, 1, head.numel()).view_as(head))
    return engine


def judged(count: int, *, seed: int = 0) -> list[Document]:
    """Documents whose return is whether token 0 is above the middle of the vocabulary: told before the first step."""
    made = documents(count, seed=seed)
    for document in made:
        trained = document["trained"].float()
        document["returns"] = (document["tokens"][0] >= 16).float() * trained
        document["values"] = torch.zeros_like(trained)
    return made


def gradients(engine: ModelEngine, packed: PackedRows, microbatch_rows: int) -> dict[str, torch.Tensor]:
    engine.forward_backward(packed.rows.split(microbatch_rows), ValueLoss(None), packed.batch_trained_tokens)
    found = {name: parameter.grad for name, parameter in engine._model.named_parameters()}
    engine._optimizer._optimizers.zero_grad()
    return found


def in_parts(packed: PackedRows, *sizes: int) -> PackedRows:
    """The same rows in parts of these sizes."""
    counts = [int(rows["trained"].sum()) for rows in packed.rows.split(list(sizes))]
    minibatches = tuple(
        Minibatch(rows=rows, trained_tokens=count, sequences=1) for rows, count in zip(sizes, counts, strict=True)
    )
    return dataclasses.replace(packed, minibatches=minibatches)


def groups_of_two(sequences: Sequence[Document]) -> list[Group]:
    samples = [
        Trajectory(
            tokens=token_data(document),
            prompt_id=str(number // 2),
            sample_index=number % 2,
            turns=(),
            environment="",
            outcome=Outcome.COMPLETE,
        )
        for number, document in enumerate(sequences)
    ]
    return [
        Group(ticket=first // 2, prompt_id=str(first // 2), source="", samples=tuple(samples[first : first + 2]))
        for first in range(0, len(samples), 2)
    ]


def of_one_critic_rank(groups: list[Group], *, trainer_ranks: int, row_length: int) -> PackedRows:
    """A batch in three parts, packed for this number of trainer ranks, as a critic of one rank pulls it."""
    batch = build_batch(
        0,
        groups,
        settings=BacklogSettings(row_length=row_length),
        advantage_settings=AdvantageSettings(name="group_mean"),
        dp_ranks=trainer_ranks,
        pad_token=0,
        minibatches=3,
    )

    async def rows(batch_id: int, dp_rank: int) -> PackedRows:
        return batch.ranks[dp_rank]

    queue = SimpleNamespace(rows=SimpleNamespace(call_one=rows))
    return asyncio.run(row_shares.rows(queue, 0, SimpleNamespace(dp_rank=0, dp_ranks=1), count=trainer_ranks))


def assert_same(ones: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert ones.keys() == others.keys()
    for name, one in ones.items():
        assert one.abs().max() > 0
        torch.testing.assert_close(others[name], one, atol=2e-6 * one.abs().max().item() + 1e-8, rtol=2e-4, msg=name)


def test_a_critic_begins_with_the_models_trunk_and_expects_nothing(engine, tiny_model_folder: Path):
    made, policy = engine(), TrainEngine(ModelSettings(path=str(tiny_model_folder)), TRAINER)
    ours, theirs = made.named_tensors(), policy.named_tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if name != "lm_head.weight")
    assert ours["lm_head.weight"].shape == (1, 96)
    assert not made.column(pack(judged(2), rows=1, row_length=128).rows).any()


def test_the_critic_of_a_tied_model_keeps_the_embedding_and_has_a_head_of_its_own(engine, small_model: Path):
    made, policy = engine(folder=small_model), TrainEngine(ModelSettings(path=str(small_model)), TRAINER)
    name = "tok_embeddings.weight"
    assert torch.equal(made.named_tensors()[name], policy._model.tok_embeddings.weight)
    assert made.named_tensors()["lm_head.weight"].shape == (1, 96)


def test_a_value_is_that_of_the_state_before_its_token(engine):
    made, (document,) = moved(engine()), judged(1)
    packed = pack([document], rows=1, row_length=80).rows
    before = made.column(packed)[0]
    at = 5
    packed["tokens"][0, at] = (packed["tokens"][0, at] + 1) % 32
    after = made.column(packed)[0]
    assert torch.equal(after[: at + 1], before[: at + 1])  # the token itself is not known yet
    assert (after[at + 1 : len(document["tokens"])] != before[at + 1 : len(document["tokens"])]).all()
    assert not before[~packed["trained"][0]].any()


def test_the_gradient_is_that_of_the_mean_squared_error_written_plainly(engine):
    made, sequences = moved(engine()), judged(3)
    packed = pack(sequences, rows=1, row_length=200)
    found = gradients(made, packed, 1)
    losses = []
    for document in sequences:
        length = len(document["tokens"])
        alone = pack([document], rows=1, row_length=length)
        batch = made._microbatch(alone.rows)
        hidden = made._model(
            batch.tokens_1T,
            positions=batch.positions_1T,
            attention_masks=document_masks(made._model, batch.positions_1T),
        )[0]
        values = hidden[:-1] @ made._model.lm_head.weight[0]  # state t - 1 says what token t is worth
        trained = document["trained"][1:]
        losses.append((values[trained] - document["returns"][1:][trained]).square() / 2)
    torch.cat(losses).mean().backward()
    plain = {name: parameter.grad for name, parameter in made._model.named_parameters()}
    assert_same(plain, found)


def test_a_critic_learns_what_can_be_known(engine, small_model: Path):
    settings = dataclasses.replace(SETTINGS, epochs=15, value_clip=5.0)
    made = engine(settings, small_model)
    packed = in_parts(pack(judged(12), rows=4, row_length=180), 2, 2)
    rows = packed.rows

    def error() -> float:
        return float((made.column(rows) - rows["returns"])[rows["trained"]].square().mean())

    assert error() > 0.2
    first = train_values(made, packed, settings)
    assert error() < 0.02
    assert first["explained_variance"] == pytest.approx(0, abs=1e-6)  # of what it said before the first step
    rows["values"] = made.column(rows)
    assert train_values(made, packed, settings)["explained_variance"] > 0.9


def test_the_steps_on_a_batch_are_the_same_on_any_packing_and_any_number_of_ranks(engine, small_model: Path):
    smooth = OptimizerSettings(lr=0.3, eps=1.0)  # AdamW that is nearly linear: rounding stays rounding
    settings = dataclasses.replace(SETTINGS, epochs=2, value_clip=0.5, optimizer=smooth)
    groups = groups_of_two(judged(12))
    found = []
    for trainer_ranks, row_length in ((1, 60), (1, 200), (2, 80), (3, 120)):
        made = moved(engine(settings, small_model))
        packed = of_one_critic_rank(groups, trainer_ranks=trainer_ranks, row_length=row_length)
        metrics = train_values(made, packed, settings)
        found.append((metrics, {name: tensor.clone() for name, tensor in made.named_tensors().items()}))
    (metrics, parameters), *others = found
    started = moved(engine(folder=small_model)).named_tensors()
    assert max(float((parameters[name] - started[name]).abs().max()) for name in started) > 0.05
    for of_other, theirs in others:
        assert of_other == pytest.approx(metrics, rel=1e-4, abs=1e-5)
        torch.testing.assert_close(theirs, parameters, atol=1e-5, rtol=1e-3)


def test_a_part_without_trained_tokens_makes_no_step(engine):
    packed = pack(judged(4), rows=2, row_length=200)
    idle = packed.rows[:1].clone()
    idle["trained"].zero_()
    with_idle = dataclasses.replace(packed, rows=torch.cat([packed.rows, idle]))
    one, other = engine(), engine()
    metrics = train_values(one, in_parts(packed, 1, 1), SETTINGS)
    assert metrics == train_values(other, in_parts(with_idle, 1, 1, 1), SETTINGS)
    theirs = other.named_tensors()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in one.named_tensors().items())


def test_a_critics_values_move_no_further_than_the_clip_lets_them_gain(engine, small_model: Path):
    settings = dataclasses.replace(SETTINGS, epochs=15, value_clip=0.1)
    made = engine(settings, small_model)
    packed = pack(judged(12), rows=4, row_length=180)
    metrics = train_values(made, packed, settings)
    assert metrics["clip_fraction"] > 0.2
    assert made.column(packed.rows).abs().max() < 0.5  # momentum carries them on for a while


def test_what_is_not_finite_names_the_critic(engine):
    made, packed = engine(), pack(judged(2), rows=1, row_length=128)
    packed.rows["returns"][packed.rows["trained"]] = float("nan")
    with pytest.raises(FloatingPointError, match=r"critic \w+ is nan at policy version 0"):
        train_values(made, packed, SETTINGS)


def test_settings_that_can_not_work_are_refused_with_their_key():
    assert check(CriticSettings, {"epochs": 0, "value_clip": 0.0, "max_grad_norm": -1.0}, "critic")[1] == [
        "critic.epochs=0: must be at least 1",
        "critic.value_clip=0.0: must be above 0, or null",
        "critic.max_grad_norm=-1.0: must be above 0, or null",
    ]
