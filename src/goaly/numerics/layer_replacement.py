"""Replaces the layers in torchtitan's config of a model, before the model is built."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor


def of_kind(kind: Any, config: Any, **changed: Any) -> Any:
    """The config of a layer of this class, with the fields of another class's config and those `changed`."""
    return kind.Config(**{field.name: getattr(config, field.name) for field in fields(config)} | changed)


def replace_layers(config: Any, kinds: Mapping[Any, Any]) -> None:
    """Replace each layer in the config of a model whose own class is a key, by one of the class that is its value."""
    by_config = {before.Config: after for before, after in kinds.items()}
    for field in fields(config):
        part = getattr(config, field.name)
        if type(part) in by_config:
            part = of_kind(by_config[type(part)], part)
            setattr(config, field.name, part)
        for inner in part if isinstance(part, list) else (part,):
            if is_dataclass(inner):
                replace_layers(inner, kinds)


def of_rank(tensor: Tensor) -> Tensor:
    """The part of the tensor that this rank has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
