"""The tensors of a generator's ranks: the model that vLLM computes with, built without memory for each rank."""

from dataclasses import dataclass
from typing import Any

import torch

from goaly.generate.settings import GeneratorSettings
from goaly.models.architecture import Architecture
from goaly.models.definition import spec_of, versioned_tensors
from goaly.models.settings import LoraSettings, ModelSettings
from goaly.models.vllm_naming import VOCABULARY_MULTIPLE, vllm_naming
from goaly.plan.fake_ranks import as_fake_rank, tie
from goaly.plan.live_bytes import held_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMemory:
    """Bytes of one rank of a replica."""

    weights: int
    """Parameters, and buffers such as the angles of positions."""
    updated: int
    """The tensors that updates fill, and that have a spare."""


def replica_memory(
    shape: Architecture, model: ModelSettings, settings: GeneratorSettings, lora: LoraSettings | None
) -> dict[tuple[int, ...], ReplicaMemory]:
    """By ranks of a replica, the memory of each of them. ConfigError or torch's own error if they can't divide the
    model."""
    if settings.engine == "native":
        found = [_native(shape, model, settings.tp, rank) for rank in range(settings.tp)]
        return {tuple(rank for rank, one in enumerate(found) if one == kind): kind for kind in dict.fromkeys(found)}

    def of_rank(rank: int) -> ReplicaMemory:
        given = (rank, shape, model.dtype, model.numerics, settings.tp, settings.ep > 1, lora)
        return as_fake_rank(_built, *given, rank=rank, ranks=settings.tp)

    if of_rank(0) == of_rank(settings.tp - 1):  # tensors are cut as by `torch.chunk`: the last rank has least
        return {tuple(range(settings.tp)): of_rank(0)}
    return {(rank,): of_rank(rank) for rank in range(settings.tp)}


def _built(
    rank: int, shape: Architecture, dtype: str, numerics: Any, tp: int, divides_experts: bool, lora: LoraSettings | None
) -> ReplicaMemory:
    from torchtitan.tools.utils import set_default_dtype

    from goaly.generate.divided_model import divided_on_meta
    from goaly.models.attention import share_angles
    from goaly.plan.flash_shapes import FlashShapes

    spec = spec_of(shape, attention=FlashShapes.Config(), numerics=numerics, lora=lora)
    with set_default_dtype(getattr(torch, dtype)):
        model, _ = divided_on_meta(spec, tp, rank, divides_experts=divides_experts, numerics=numerics)
    tie(model)
    share_angles(model)
    held = {id(one): one for one in (*model.parameters(), *model.buffers())}
    updated = {id(one): one for one in versioned_tensors(model).values()}
    return ReplicaMemory(weights=held_bytes(held.values()), updated=held_bytes(updated.values()))


def _native(shape: Architecture, model: ModelSettings, tp: int, rank: int) -> ReplicaMemory:
    """vLLM's own model: several ranks have a key-value head if there are more of them, and the vocabulary is padded."""
    size = getattr(torch, model.dtype).itemsize
    naming = vllm_naming(shape, tp=tp, rank=rank)
    updated = {
        name: size * sum(torch.Size(part.shape).numel() for part in parts)
        for name, parts in naming.items()
        if not (shape.tied and name == "lm_head.weight")
    }
    padded = -(-shape.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE // tp * shape.dim * size
    vocabularies = [name for name in updated if name in ("model.embed_tokens.weight", "lm_head.weight")]
    padding = sum(padded - updated[name] for name in vocabularies)
    return ReplicaMemory(weights=sum(updated.values()) + padding, updated=sum(updated.values()))
