"""The engine over a model with experts: their balance, their biases, and the replay of the sampler's choices."""

import dataclasses
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from random_model import write_random_deepseek
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from goaly.losses.kl import k3
from goaly.losses.objective import Contribution, PolicyObjective
from goaly.models.settings import ModelSettings
from goaly.models.tiny_model import TinyModel, write_tiny_model
from goaly.numerics.experts import MixtureOfExperts
from goaly.train.microbatch import Microbatch
from goaly.train.settings import CriticSettings, OptimizerSettings
from goaly.train.train_engine import TrainEngine
from goaly.trajectory import EXPERT_CHOICES, TensorDict
from goaly.weights.dtensor_layout import local
from tests.unit.train.batches import LOSS, SETTINGS, critic_engine, documents, gradients, pack


@pytest.fixture
def with_experts(tmp_path: Path) -> Callable[[float], TrainEngine]:
    """An engine over a model of two layers of four experts, with this weight of their balance."""
    folder = write_tiny_model(tmp_path, TinyModel(layers=2, experts=4, hidden_dim=32))
    model = ModelSettings(path=str(folder))
    return lambda balance: TrainEngine(model, dataclasses.replace(SETTINGS, expert_balance=balance))


def test_a_step_reports_how_its_tokens_were_spread_over_the_experts_and_counts_no_other_pass(
    with_experts: Callable[[float], TrainEngine],
):
    engine = with_experts(0.0)
    batch, objective = pack(documents(8), rows=4, row_length=160), PolicyObjective(LOSS)
    engine.logprobs(batch.rows)
    loads = engine.train_step(batch, objective)
    assert 1 <= loads["experts/load_max"] < 2  # two of four experts at least
    with torch.no_grad():
        for name, parameter in engine._model.named_parameters():
            if name.endswith("router.gate.weight"):
                parameter.zero_()  # all experts are alike: the first two have every token
    assert engine.train_step(batch, objective)["experts/load_max"] == 2.0
    engine.logprobs(batch.rows)
    nothing = {"experts/load_max": 0.0, "experts/unused": 8.0, "experts/dropped": 0.0}  # none was trained since
    assert engine._experts.take_loads() == nothing


def test_no_choice_is_dropped_also_if_one_expert_is_chosen_by_all(with_experts: Callable[[float], TrainEngine]):
    engine = with_experts(0.0)
    batch, rows = pack(documents(8), rows=4, row_length=160), []
    with torch.no_grad():
        for layer in engine._experts.layers:
            layer.router.gate.weight.zero_()  # all experts are alike: the same two have every token
            layer.routed_experts.inner_experts.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    microbatch = engine._microbatch(batch.rows)
    engine._outputs(microbatch)
    assert rows == [2 * microbatch.tokens_1T.numel()] * 2
    for layer in engine._experts.layers:
        assert sorted(layer.tokens_per_expert_E.tolist()) == [0, 0] + [batch.batch_trained_tokens] * 2
        assert layer.routed_experts.token_dispatcher.made == rows[0]
    assert engine._experts.take_loads()["experts/dropped"] == 0.0


def test_choices_that_no_expert_computes_are_reported(
    with_experts: Callable[[float], TrainEngine], monkeypatch: pytest.MonkeyPatch
):
    from goaly.numerics.experts import LocalTokenDispatcher

    dispatch, capacity = LocalTokenDispatcher.dispatch, 60

    def with_capacity(*given: Any) -> Any:
        rows_RD, counts_E, sent = dispatch(*given)
        return rows_RD, counts_E.clamp(max=capacity), sent

    monkeypatch.setattr(LocalTokenDispatcher, "dispatch", with_capacity)
    engine, batch = with_experts(0.0), pack(documents(8), rows=4, row_length=160)
    made = []
    for layer in engine._experts.layers:
        layer.router.register_forward_hook(lambda *call: made.append(call[2][1].flatten().bincount(minlength=4)))
    engine._outputs(engine._microbatch(batch.rows))
    dropped = engine._experts.take_loads()["experts/dropped"]
    computed = sum(int(counts_E.clamp(max=capacity).sum()) for counts_E in made)
    assert dropped == pytest.approx(1 - computed / sum(int(counts_E.sum()) for counts_E in made))
    assert dropped > 0.1


@pytest.mark.parametrize("placement", [Shard(1), Partial()])
def test_the_balance_adds_to_a_divided_gradient_in_bfloat16(placement: Placement):
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh, trained_BL1 = dist.init_device_mesh("cpu", (1,)), torch.tensor([1.0, 0.0, 1.0])[None, :, None]
    ones_BLE = torch.ones(1, 3, 4, dtype=torch.bfloat16)
    scores_BLE = DTensor.from_local(ones_BLE, mesh, [Shard(1)]).requires_grad_()
    layer = SimpleNamespace(tokens_per_expert_E=torch.zeros(4), score_gradient_E=torch.tensor([0.5, 0.25, 1.0, 0.0]))
    MixtureOfExperts._balance(layer, scores_BLE, ones_BLE, trained_BL1)
    given_BLE = DTensor.from_local(2 * ones_BLE, mesh, [placement])
    (found_BLE,) = torch.autograd.grad(scores_BLE * 1.0, scores_BLE, given_BLE)
    assert torch.equal(found_BLE.to_local(), (2 + trained_BL1 * layer.score_gradient_E).bfloat16())
    assert torch.equal(layer.tokens_per_expert_E, torch.full((4,), 2.0))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_the_balance_adds_the_gradient_of_its_loss(tmp_path: Path, dtype: str, tolerance: float):
    folder = write_tiny_model(tmp_path, TinyModel(layers=2, experts=4, hidden_dim=32))
    engine = TrainEngine(ModelSettings(path=str(folder), dtype=dtype), SETTINGS)
    batch, weight, scores = pack(documents(8), rows=4, row_length=160), 2.0, []
    layers, shares_LE = engine._experts.layers, torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]])
    engine._experts.loads_LE.copy_(shares_LE)
    for layer in layers:
        layer.router.register_forward_hook(lambda *call: scores.append(call[2][2]))

    class WithBalance(PolicyObjective):
        def __call__(self, *given: Any) -> Contribution:
            part = super().__call__(*given)
            trained = zip(scores[-2:], shares_LE, layers, strict=True)
            sums = [(one_BLE * share_E * layer.trained_BL1).sum() for one_BLE, share_E, layer in trained]
            return dataclasses.replace(part, total=part.total + weight * 4 * torch.stack(sums).mean())

    def found_by(objective: PolicyObjective) -> dict[str, torch.Tensor]:
        engine.forward_backward(batch.rows.split(2), objective, batch.batch_trained_tokens)
        found = {name: local(parameter.grad).clone() for name, parameter in engine._model.named_parameters()}
        engine._optimizer._optimizers.zero_grad()
        return found

    without, expected = found_by(PolicyObjective(LOSS)), found_by(WithBalance(LOSS))
    engine._experts.balance(weight, batch.batch_trained_tokens)
    found = found_by(PolicyObjective(LOSS))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=tolerance * gradient.abs().max().item(), rtol=1e-4)
    routers = [name for name in expected if "router" in name]
    assert all((expected[name] - without[name]).norm() > 0.2 * without[name].norm() for name in routers)


def test_a_bias_that_follows_the_loads_spreads_the_tokens(tmp_path: Path):
    batch, objective = pack(documents(8), rows=4, row_length=160), PolicyObjective(LOSS)
    model = ModelSettings(path=str(write_random_deepseek(tmp_path)))
    still = dataclasses.replace(SETTINGS, optimizer=OptimizerSettings(lr=1e-9))

    def steps(rate: float, count: int) -> tuple[list[float], TrainEngine]:
        engine = TrainEngine(model, dataclasses.replace(still, expert_bias_rate=rate))
        return [engine.train_step(batch, objective)["experts/load_max"] for _ in range(count)], engine

    unchanged, engine = steps(0.0, 2)
    assert unchanged[0] == unchanged[1]
    name = "layers.1.moe.expert_bias_E"
    before_E, tokens_E = engine.named_tensors()[name].clone(), engine._experts.loads_LE[0].clone()
    once_E = steps(0.01, 1)[1].named_tensors()[name]
    torch.testing.assert_close(once_E - before_E, 0.01 * (tokens_E.mean() - tokens_E).sign(), atol=1e-7, rtol=0)
    assert {1.0, -1.0} <= set((once_E - before_E).sign().tolist())
    balanced, _ = steps(0.01, 60)
    assert balanced[0] == unchanged[0]
    assert max(balanced[-10:]) < 0.75 * unchanged[0]


def test_the_loads_of_the_last_step_are_part_of_the_state(with_experts: Callable[[float], TrainEngine]):
    batch, objective = pack(documents(8), rows=4, row_length=160), PolicyObjective(LOSS)
    one, other = with_experts(2.0), with_experts(2.0)
    one.train_step(batch, objective)
    other.load_state_dict({name: tensor.clone() for name, tensor in one.state_dict().items()})
    assert one.train_step(batch, objective) == other.train_step(batch, objective)
    assert one.digest() == other.digest()


def test_experts_have_the_same_gradients_each_time_with_several_threads(tmp_path: Path):
    folder = write_tiny_model(tmp_path, TinyModel(layers=1, experts=8, experts_per_token=5, hidden_dim=16))
    engine = TrainEngine(ModelSettings(path=str(folder)), SETTINGS)
    batch, threads = pack(documents(40), rows=8, row_length=320), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first, *others = [gradients(engine, batch, 8) for _ in range(6)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def test_the_scores_of_a_pass_are_freed_with_it(with_experts: Callable[[float], TrainEngine]):
    engine, kept = with_experts(0.1), []
    for layer in engine._experts.layers:
        layer.router.register_forward_hook(lambda *call: kept.append(weakref.ref(call[2][2])))
    batch, objective = pack(documents(8), rows=4, row_length=160), PolicyObjective(LOSS)
    for _ in range(2):
        engine.train_step(batch, objective)
    gc.collect()
    assert len(kept) >= 4
    assert [scores() for scores in kept if scores() is not None] == []


CHOICES = (2, 4, 2)
"""Layers, experts and experts of a token in `with_experts`."""
Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def routed(engine: TrainEngine, rows: TensorDict) -> tuple[Microbatch, list[Routed]]:
    """A pass over these rows; for each layer the experts' weights, the experts and the router's scores."""
    found: list[Routed] = []

    def keep(router: Any, inputs: Any, outputs: Routed) -> None:
        if torch.is_grad_enabled():  # not of the pass that counts the choices that differ
            found.append(tuple(part[0] for part in outputs))

    hooks = [layer.router.register_forward_hook(keep) for layer in engine._experts.layers]
    batch = engine._microbatch(rows)
    engine._outputs(batch)
    for hook in hooks:
        hook.remove()
    return batch, found


def test_tokens_go_to_the_experts_that_the_sampler_chose_and_others_to_their_own(
    with_experts: Callable[[float], TrainEngine],
):  # train-3
    engine = with_experts(0.0)
    rows = pack(documents(8, choices=CHOICES), rows=4, row_length=160).rows
    batch, found = routed(engine, rows)
    without, own = routed(engine, rows.exclude(EXPERT_CHOICES))
    replayed_T = batch.replayed_1T[0]
    assert 0 < int((~replayed_T).sum()) == len(batch.columns["documents"].unique())  # the last token of each document
    for layer, (weights_TK, experts_TK, scores_TE) in enumerate(found):
        chosen_TK = batch.choices_1TNK[0, :, layer].long()
        assert torch.equal(experts_TK[replayed_T].sort().values, chosen_TK[replayed_T].sort().values)
        assert torch.equal(experts_TK[~replayed_T], scores_TE.topk(2, sorted=False).indices[~replayed_T])
        expected_TK = scores_TE.gather(1, experts_TK)
        torch.testing.assert_close(weights_TK, expected_TK / expected_TK.sum(1, keepdim=True))
    torch.testing.assert_close(found[0][2], own[0][2])  # the first layer's scores do not depend on its choices
    assert without.choices_1TNK is None


def test_replay_trains_the_routers_and_reports_what_they_would_have_chosen_differently(
    with_experts: Callable[[float], TrainEngine],
):  # train-3
    engine = with_experts(0.0)
    batch = pack(documents(8, choices=CHOICES), rows=4, row_length=160)
    line, found = routed(engine, batch.rows)
    at_P = line.predicting_P
    differ = [
        ~(line.choices_1TNK[0, at_P, layer][..., None] == scores_TE.topk(2).indices[at_P][:, None]).any(-1)
        for layer, (_, _, scores_TE) in enumerate(found)
    ]
    assert all(made.abs().max() > 0 for name, made in gradients(engine, batch, 2).items() if "router.gate" in name)
    engine._experts.take_loads()
    metrics = engine.train_step(batch, PolicyObjective(LOSS))
    assert metrics["experts/rerouted"] == pytest.approx(torch.stack(differ).float().mean().item())
    assert 0.3 < metrics["experts/rerouted"] < 0.7
    assert "experts/rerouted" not in engine.train_step(
        dataclasses.replace(batch, rows=batch.rows.exclude(EXPERT_CHOICES)), PolicyObjective(LOSS)
    )


def test_the_effect_of_replay_is_the_divergence_from_the_sampler_with_its_choices_and_with_own_ones(
    with_experts: Callable[[float], TrainEngine],
):
    engine = with_experts(0.0)
    batch = pack(documents(8, choices=CHOICES), rows=4, row_length=160)
    first = batch.rows[: engine.settings.microbatch_rows]
    before, rerouted = engine.digest(), engine._experts.layers[0].rerouted.clone()

    def divergence(rows: TensorDict) -> float:
        at = rows["trained"]
        return k3(rows["sampler_logprobs"][at], engine.logprobs(rows)[at]).mean().item()

    found = engine.effect_of_replay(batch.rows)
    assert found == {
        "experts/kl_own": pytest.approx(divergence(first.exclude(EXPERT_CHOICES))),
        "experts/kl_replay": pytest.approx(divergence(first)),
    }
    assert abs(found["experts/kl_own"] - found["experts/kl_replay"]) > 1e-4
    assert engine.digest() == before
    assert engine._experts.layers[0].rerouted == rerouted


def test_replaying_its_own_choices_changes_nothing(with_experts: Callable[[float], TrainEngine]):
    one, other = with_experts(0.5), with_experts(0.5)
    own = pack(documents(8), rows=4, row_length=160)
    row = own.rows[:1]  # one at a time, of which the used part is one line
    packed = dataclasses.replace(own, rows=row, batch_trained_tokens=int(row["trained"].sum()))
    _, found = routed(one, row)
    line_TNK = torch.stack([experts_TK for _, experts_TK, _ in found], 1)
    choices = torch.zeros(1, row.batch_size[1], 2, 2, dtype=torch.uint8)
    choices[0, : len(line_TNK)] = line_TNK.to(torch.uint8)
    replayed = dataclasses.replace(packed, rows=TensorDict({**row, EXPERT_CHOICES: choices}, row.batch_size))
    assert torch.equal(one.logprobs(packed.rows), other.logprobs(replayed.rows))
    expected = one.train_step(packed, PolicyObjective(LOSS))
    assert other.train_step(replayed, PolicyObjective(LOSS)) == expected | {"experts/rerouted": 0.0}
    assert one.digest() == other.digest()


def test_a_critic_chooses_experts_itself(tmp_path: Path):
    folder = write_tiny_model(tmp_path, TinyModel(layers=2, experts=4, hidden_dim=32))
    critic = critic_engine(ModelSettings(path=str(folder)), CriticSettings(), SETTINGS)
    torch.nn.init.normal_(critic._model.lm_head.weight)
    rows = pack(documents(4, choices=CHOICES), rows=2, row_length=160).rows
    assert torch.equal(critic.column(rows), critic.column(rows.exclude(EXPERT_CHOICES)))
