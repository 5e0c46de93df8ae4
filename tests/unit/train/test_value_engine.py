"""The critic's engine on one rank: what a value stands for, its gradient, and that it learns."""

import dataclasses
from pathlib import Path

import pytest
import torch

from goaly.models.attention import document_masks
from goaly.models.settings import ModelSettings
from goaly.models.tiny import TinyModel, write_tiny_model
from goaly.train.engine import TrainEngine
from goaly.train.microbatch import split_rows
from goaly.train.settings import CriticSettings, OptimizerSettings, TrainerSettings
from goaly.train.value import ValueEngine
from goaly.trajectory import PackedRows
from tests.unit.train.batches import Document, documents, pack

TRAINER = TrainerSettings(microbatch_rows=2)
SETTINGS = CriticSettings(optimizer=OptimizerSettings(lr=3e-3))


@pytest.fixture
def engine(tiny_model_folder: Path):
    def made(settings: CriticSettings = SETTINGS, folder: Path = tiny_model_folder) -> ValueEngine:
        return ValueEngine(ModelSettings(path=str(folder)), settings, TRAINER)

    return made


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, whose output projection is its embedding."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tied", TinyModel(layers=1, tied=True))


def moved(engine: ValueEngine) -> ValueEngine:
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


def gradients(engine: ValueEngine, packed: PackedRows, microbatch_rows: int) -> dict[str, torch.Tensor]:
    engine.forward_backward(split_rows(packed.rows, microbatch_rows), engine._loss, 1)
    found = {name: parameter.grad for name, parameter in engine._model.named_parameters()}
    engine._optimizer._optimizers.zero_grad()
    return found


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
    assert not made.values(pack(judged(2), rows=1, row_length=128).rows).any()


def test_the_critic_of_a_tied_model_keeps_the_embedding_and_has_a_head_of_its_own(engine, small_model: Path):
    made, policy = engine(folder=small_model), TrainEngine(ModelSettings(path=str(small_model)), TRAINER)
    name = "tok_embeddings.weight"
    assert torch.equal(made.named_tensors()[name], policy._model.tok_embeddings.weight)
    assert made.named_tensors()["lm_head.weight"].shape == (1, 96)


def test_a_value_is_that_of_the_state_before_its_token(engine):
    made, (document,) = moved(engine()), judged(1)
    packed = pack([document], rows=1, row_length=80).rows
    before = made.values(packed)[0]
    at = 5
    packed["tokens"][0, at] = (packed["tokens"][0, at] + 1) % 32
    after = made.values(packed)[0]
    assert torch.equal(after[: at + 1], before[: at + 1])  # VE-1: the token itself is not known yet
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


def test_values_and_gradient_are_the_same_for_any_packing_and_any_microbatches(engine):
    made, sequences = moved(engine()), judged(8)
    one = gradients(made, pack(sequences, rows=4, row_length=128), 4)  # VE-2
    assert_same(one, gradients(made, pack(sequences, rows=4, row_length=128), 1))
    assert_same(one, gradients(made, pack(sequences[::-1], rows=2, row_length=300), 1))
    apart, together = pack(sequences, rows=8, row_length=64).rows, pack(sequences, rows=1, row_length=400).rows
    values = [made.values(rows)[rows["trained"]] for rows in (apart, together)]
    torch.testing.assert_close(*values, atol=1e-5, rtol=1e-4)


def test_a_critic_learns_what_can_be_known(engine, small_model: Path):
    made = engine(dataclasses.replace(SETTINGS, epochs=15, minibatches=2, value_clip=5.0), small_model)
    rows = pack(judged(12), rows=4, row_length=180).rows

    def error() -> float:
        return float((made.values(rows) - rows["returns"])[rows["trained"]].square().mean())

    assert error() > 0.2
    first = made.train_steps(rows)
    assert made.steps_done == 15 * 2
    assert error() < 0.02
    assert first["explained_variance"] == pytest.approx(0, abs=1e-6)  # of what it said before the first step
    rows["values"] = made.values(rows)
    assert made.train_steps(rows)["explained_variance"] > 0.9


def test_a_critics_values_move_no_further_than_the_clip_lets_them_gain(engine, small_model: Path):
    made = engine(dataclasses.replace(SETTINGS, epochs=15, value_clip=0.1), small_model)
    rows = pack(judged(12), rows=4, row_length=180).rows
    metrics = made.train_steps(rows)
    assert metrics["clip_fraction"] > 0.2
    assert made.values(rows).abs().max() < 0.5  # momentum carries them on for a while


def test_what_is_not_finite_names_the_critic(engine):
    made, rows = engine(), pack(judged(2), rows=1, row_length=128).rows
    rows["returns"][rows["trained"]] = float("nan")
    with pytest.raises(FloatingPointError, match=r"critic \w+ is nan after 0 optimizer steps"):
        made.train_steps(rows)


def test_settings_that_can_not_work_are_refused_with_their_key():
    broken = CriticSettings(epochs=0, minibatches=0, value_clip=0.0, max_grad_norm=-1.0)
    assert broken.problems("critic.") == [
        "critic.epochs=0: must be at least 1",
        "critic.minibatches=0: must be at least 1",
        "critic.value_clip=0.0: must be above 0, or null",
        "critic.max_grad_norm=-1.0: must be above 0, or null",
    ]
