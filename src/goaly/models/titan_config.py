"""torchtitan's config of a model, before the model is built: its fields, and how ranks divide the model.

torchtitan's function that divides imports its trainer, to see whether the caller is one, and with it pandas, datasets
and TensorBoard: 1,100 modules, 2 s of CPU and 90 MiB in every rank, and a thread, after which no process can be forked.
"""

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

_TRAINER = "torchtitan.trainer"


def fields_of(config: Any) -> dict[str, Any]:
    """The fields of a config, by name, for the config of another class that has them too."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def divide(config: Any, parallelism: Any) -> None:
    """Let the model of this config be divided as torchtitan's `ParallelismConfig` says."""
    from torchtitan.config import TrainingConfig

    with _no_trainer():
        config.update_from_config(config=SimpleNamespace(parallelism=parallelism, training=TrainingConfig()))


@contextmanager
def _no_trainer() -> Iterator[None]:
    """Have torchtitan find a trainer that nobody is, unless its own is imported already."""
    if _TRAINER in sys.modules:
        yield
        return
    stand_in: Any = ModuleType(_TRAINER)
    stand_in.Trainer = type("Trainer", (), {"Config": type("Config", (), {})})
    sys.modules[_TRAINER] = stand_in
    try:
        yield
    finally:
        del sys.modules[_TRAINER]
