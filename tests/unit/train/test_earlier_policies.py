"""A trainer's earlier parameters take the place of the live ones for a while."""

from pathlib import Path

import pytest
import torch

from goaly.models.definition import versioned_tensors
from goaly.models.settings import ModelSettings
from goaly.models.tiny_model import TinyModel, write_tiny_model
from goaly.train.earlier_policies import EarlierPolicies
from goaly.train.settings import TrainerSettings
from goaly.train.train_engine import TrainEngine


def tensors() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, generator=random))
    return {"weight": weight, "bias": torch.randn(3, generator=random), "version": torch.zeros((), dtype=torch.int64)}


def test_within_loaded_the_tensors_are_those_of_the_version_as_it_is_computed():
    live = tensors()
    kept = EarlierPolicies(live, 3, torch.bfloat16)
    before = {name: one.detach().clone() for name, one in live.items()}
    kept.keep(0)
    with torch.no_grad():
        for one in live.values():
            one.add_(1)
    changed = {name: one.detach().clone() for name, one in live.items()}

    def fails_in_version_0() -> None:
        with kept.loaded(0):
            assert torch.equal(live["weight"], before["weight"].bfloat16().float())
            assert torch.equal(live["bias"], before["bias"])
            assert int(live["version"]) == 0
            raise InterruptedError

    with pytest.raises(InterruptedError):
        fails_in_version_0()
    assert all(torch.equal(one, changed[name]) for name, one in live.items())


def test_the_last_versions_are_kept():
    live = tensors()
    kept = EarlierPolicies(live, 2, torch.float32)
    for version in range(4):
        live["version"].fill_(version)
        kept.keep(version)
        kept.keep(version)
    assert kept.versions == [2, 3]
    for version in kept.versions:
        with kept.loaded(version):
            assert int(live["version"]) == version
    none = EarlierPolicies(live, 0, torch.float32)
    none.keep(0)
    assert not none.versions


def test_the_biases_of_experts_and_the_version_belong_to_a_policy(tmp_path: Path):
    folder = write_tiny_model(tmp_path, TinyModel(layers=2, experts=6, experts_per_token=3, hidden_dim=64))
    engine = TrainEngine(ModelSettings(path=str(folder), numerics="bitwise"), TrainerSettings(), earlier_policies=1)
    engine._earlier.keep(0)
    before = {name: one.detach().clone() for name, one in versioned_tensors(engine._model).items()}
    with torch.no_grad():
        for one in versioned_tensors(engine._model).values():
            one.add_(1)
    engine.steps_done = 5
    with engine._earlier.loaded(0):
        assert engine.policy_version == 0
        live = versioned_tensors(engine._model)
        assert all(torch.equal(one, before[name]) for name, one in live.items())
    assert engine.policy_version == 5
