"""torchtitan's definition of a model of an architecture, and the tensors of a model that is built of it."""

import copy
import dataclasses
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from goaly.base.errors import ConfigError
from goaly.models.architecture import Architecture, LayerParts
from goaly.models.device import prepare_torchtitan
from goaly.models.families import FAMILIES, architecture, read_config
from goaly.models.settings import LoraSettings, Numerics
from goaly.numerics import KERNEL_WIDTH, SLICES

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.protocols.module import Module

_TRAINER = "torchtitan.trainer"


def model_spec(
    folder: str | Path,
    *,
    attention: "Module.Config | None" = None,
    numerics: Numerics = "fast",
    lora: LoraSettings | None = None,
) -> "ModelSpec":
    """torchtitan's definition of the folder's model, with adapters if `lora` is set; `attention` replaces the device's
    default inner attention."""
    shape = architecture(read_config(folder), where=str(Path(folder) / "config.json"))
    return spec_of(shape, attention=attention, numerics=numerics, lora=lora)


def spec_of(
    shape: Architecture,
    *,
    attention: "Module.Config | None" = None,
    numerics: Numerics = "fast",
    lora: LoraSettings | None = None,
) -> "ModelSpec":
    """torchtitan's definition of a model of this architecture."""
    if numerics == "bitwise" and (problems := list(bitwise_problems(shape, lora))):
        raise ConfigError([f"model.numerics=bitwise: {problem}" for problem in problems])
    device = prepare_torchtitan().type
    from torchtitan.protocols.model_spec import ModelSpec

    if attention is None:
        attention = _inner_attention(device, numerics, sinks=shape.biased)
    decoder = _decoder(shape, device, attention, fuses=lora is None)
    if lora is not None:
        from goaly.models.lora import add_adapters

        add_adapters(decoder, lora)
    if numerics == "bitwise":
        from goaly.numerics.bitwise_layers import make_bitwise

        make_bitwise(decoder)
    return ModelSpec(
        name=shape.family,
        flavor="",
        model=decoder,
        parallelize_fn=shape.torchtitan().parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=shape.torchtitan().adapter,
    )


def bitwise_problems(shape: Architecture, lora: LoraSettings | None = None) -> Iterator[str]:
    """One line for each reason why a model of this shape, with these adapters, must have fast numerics."""
    if lora is not None:
        yield "must be fast with trainer.lora: bitwise numerics have no layers with adapters"
    if not shape.has_bitwise:
        able = dict.fromkeys(family.family for family in FAMILIES.values() if family.has_bitwise)
        yield f"must be fast for {shape.family}: bitwise numerics have layers for {' and '.join(able)} only"
    elif shape.experts and (shape.dim % KERNEL_WIDTH or shape.hidden_dim % (SLICES * KERNEL_WIDTH)):
        yield (
            f"must be fast for experts of width {shape.hidden_dim} in a model of width {shape.dim}: bitwise numerics "
            f"need multiples of {SLICES * KERNEL_WIDTH} and {KERNEL_WIDTH}"
        )


def divide(decoder: Any, parallelism: Any) -> None:
    """Let the model of this config be divided as torchtitan's `ParallelismConfig` says.

    torchtitan's function imports its trainer, to see whether the caller is one, and with it pandas, datasets and
    TensorBoard: 1,100 modules, 2 s of CPU and 90 MiB in every rank, and a thread, after which no process can be forked.
    """
    from torchtitan.config import TrainingConfig

    stand_in: Any = ModuleType(_TRAINER)
    stand_in.Trainer = type("Trainer", (), {"Config": type("Config", (), {})})  # nobody is one
    found = sys.modules.setdefault(_TRAINER, stand_in)
    try:
        decoder.update_from_config(config=SimpleNamespace(parallelism=parallelism, training=TrainingConfig()))
    finally:
        if found is stand_in:
            del sys.modules[_TRAINER]


def folder_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that a folder has of a torchtitan model: parameters but adapters, and biases that choose experts."""
    from goaly.models.lora import is_adapter

    biases = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(".expert_bias_E"))
    return _named((name, one) for name, one in (*model.named_parameters(), *biases) if not is_adapter(name))


def versioned_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that differ between versions: those of the folder, or if the model has adapters these (models-3),
    with the digest of the folder's (models-5)."""
    from goaly.models.lora import BASE, is_adapter

    adapters = _named((name, one) for name, one in model.named_parameters() if is_adapter(name))
    base = ((name, buffer) for name, buffer in model.named_buffers() if name == BASE)
    return adapters | dict(base) or folder_tensors(model)


def layer_adapter(spec: "ModelSpec", folder: str | None = None) -> Any:
    """torchtitan's adapter of folders for a layer at a time: that of tied weights needs the embedding with each."""
    untied: Any = copy.copy(spec.model)
    untied.enable_weight_tying = False
    return spec.state_dict_adapter(untied, folder)


def _named(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    from torchtitan.components.checkpointer.utils import canonical_fqn

    return {canonical_fqn(name): tensor for name, tensor in tensors}


def _inner_attention(device: str, numerics: Numerics, *, sinks: bool) -> "Module.Config":
    if numerics == "bitwise":
        from goaly.numerics.bitwise_attention import BitwiseAttention

        return BitwiseAttention.Config()
    from goaly.models.attention import inner_attention

    return inner_attention(device, sinks=sinks)


def _layers(device: str) -> tuple[Any, Any]:
    """The classes of the norm and of Qwen3's rotary embedding: torchtitan's, on a CPU with faster gradients."""
    if device == "cpu":
        from goaly.numerics.cpu_training import LeanRMSNorm, LeanRoPE

        return LeanRMSNorm, LeanRoPE
    from torchtitan.models.common import CosSinRoPE, RMSNorm

    return RMSNorm, CosSinRoPE


def _decoder(shape: Architecture, device: str, attention: "Module.Config", *, fuses: bool) -> Any:
    from torchtitan.models.common import Embedding, Linear
    from torchtitan.models.common.param_init import skip_param_init

    norm_class, rope_class = _layers(device)
    unset = {"weight": skip_param_init, "bias": skip_param_init}

    def norm(width: int, *, eps: float = shape.norm_eps) -> Any:
        return norm_class.Config(normalized_shape=width, eps=eps, param_init=unset)

    def block(layer: int) -> Any:
        inner = dataclasses.replace(attention)
        parts = LayerParts(norm=norm, rope=rope_class, inner=inner, fuses=fuses, unset=unset)
        return family.block(
            attention_norm=norm(shape.dim),
            ffn_norm=norm(shape.dim),
            attention=shape.attention(layer, parts),
            **_feed_forward(shape, shape.has_experts(layer), parts),
        )

    family = shape.torchtitan()
    return family.decoder(
        dim=shape.dim,
        vocab_size=shape.vocab_size,
        enable_weight_tying=shape.tied,
        tok_embeddings=Embedding.Config(num_embeddings=shape.vocab_size, embedding_dim=shape.dim, param_init=unset),
        norm=norm(shape.dim),
        lm_head=Linear.Config(in_features=shape.dim, out_features=shape.vocab_size, param_init=unset),
        layers=[block(layer) for layer in range(shape.layers)],
    )


def _feed_forward(shape: Architecture, experts: bool, parts: LayerParts) -> dict[str, Any]:
    """The feed-forward part of a layer, dense or with experts, under its name in the layer's config."""
    from torchtitan.models.common.config_utils import make_ffn_config, make_router_config
    from torchtitan.models.common.moe import RoutedExperts

    from goaly.numerics.experts import Dispatcher, MixtureOfExperts

    def dense(hidden_dim: int) -> Any:
        unset = parts.unset
        return make_ffn_config(dim=shape.dim, hidden_dim=hidden_dim, w1_param_init=unset, w2w3_param_init=unset)

    if not experts:
        return {"feed_forward": dense(shape.feed_forward_dim)}
    routing = {"num_experts": shape.experts, "top_k": shape.experts_per_token}
    mixture = MixtureOfExperts.Config(
        num_experts=shape.experts,
        router=make_router_config(
            dim=shape.dim,
            gate_param_init=parts.unset,
            bias=shape.biased,
            score_func="sigmoid" if shape.biased_routing else "softmax",
            route_norm=shape.normalizes_routing,
            route_scale=shape.routing_scale,
            num_expert_groups=shape.expert_groups,
            num_limited_groups=shape.groups_per_token,
            **routing,
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=shape.inner_experts(parts), token_dispatcher=Dispatcher.Config(**routing)
        ),
        shared_experts=dense(shape.shared_hidden_dim) if shape.shared_hidden_dim else None,
        load_balance_coeff=1.0 if shape.biased_routing else None,  # whether there is a bias; goaly changes it itself
    )
    return {"moe": mixture}
