"""Bitwise layers with adapters have the gradients of the ordinary ones, but for rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch

from goaly.losses.objective import Contribution
from goaly.models.lora import A, B, draw_adapters
from goaly.models.settings import LoraSettings, ModelSettings, Numerics
from goaly.models.tiny import TinyModel, write_tiny_model
from goaly.train.engine import TrainEngine
from goaly.train.settings import TrainerSettings
from goaly.trajectory import pack_rows, token_data


@pytest.mark.parametrize("experts", [0, 4], ids=["dense", "experts"])
def test_adapters_have_the_gradients_of_ordinary_layers(tmp_path: Path, experts: int):  # LB-1
    folder = write_tiny_model(tmp_path, TinyModel(layers=2, experts=experts))
    tokens = torch.randint(0, 32, (60,), generator=torch.Generator().manual_seed(1))
    columns = {"sampler_logprobs": torch.zeros(60), "rewards": torch.zeros(60), "advantages": torch.ones(60)}
    sequence = token_data(
        {
            "tokens": tokens,
            "trained": torch.arange(60) > 0,
            "sampler_versions": torch.zeros(60, dtype=torch.int32),
            **columns,
        }
    )
    rows = pack_rows([sequence], [[0]], 64, 0)

    def objective(logprobs_P: torch.Tensor, *_: Any) -> Contribution:
        return Contribution(total=-logprobs_P.sum())

    def gradients(numerics: Numerics) -> dict[str, torch.Tensor]:
        settings = TrainerSettings(lora=LoraSettings(rank=8))
        engine = TrainEngine(ModelSettings(path=str(folder), numerics=numerics), settings)
        draw_adapters(engine.named_tensors(), 0, which=(A, B))
        engine.forward_backward([rows], objective, 60)
        return {name: one.grad for name, one in engine._model.named_parameters() if one.grad is not None}

    fast, exact = gradients("fast"), gradients("bitwise")
    assert exact.keys() == fast.keys()
    assert all(name.endswith((A, B)) for name in exact)
    for name, gradient in exact.items():
        torch.testing.assert_close(gradient, fast[name], atol=1e-6, rtol=1e-3, msg=name)
        assert bool(gradient.any()), name
