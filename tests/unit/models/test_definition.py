"""A model is divided without torchtitan's trainer."""

import sys
from pathlib import Path

import pytest
from torchtitan.config import ParallelismConfig

from goaly.models.definition import divide, model_spec


def test_torchtitans_trainer_and_what_it_imports_are_not_loaded(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torchtitan.trainer", raising=False)
    model = model_spec(tiny_model_folder).model
    divide(model, ParallelismConfig(tensor_parallel_degree=2))
    assert "torchtitan.trainer" not in sys.modules
    with pytest.raises(ValueError, match="must divide n_heads"):
        divide(model, ParallelismConfig(tensor_parallel_degree=7))


def test_a_trainer_that_is_loaded_stays(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = type(sys)("torchtitan.trainer")
    loaded.Trainer = type("Trainer", (), {"Config": int})
    monkeypatch.setitem(sys.modules, "torchtitan.trainer", loaded)
    divide(model_spec(tiny_model_folder).model, ParallelismConfig())
    assert sys.modules["torchtitan.trainer"] is loaded
