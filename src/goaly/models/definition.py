"""From an architecture (`architecture.py`) to torchtitan's model definition.

`prepare_torchtitan` must run before a model is built, because torchtitan assumes a GPU by default.
"""

import copy
import dataclasses
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from goaly.base.errors import ConfigError
from goaly.models import deepseek, dots1, gpt_oss
from goaly.models.architecture import Architecture, architecture, read_config
from goaly.models.device import local_device
from goaly.models.settings import LoraSettings, Numerics
from goaly.numerics import KERNEL_WIDTH, SLICES

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.protocols.module import Module

BITWISE_FAMILIES = ("qwen3", "llama3")


def prepare_torchtitan() -> torch.device:
    """Set torchtitan's device to the GPU if there is one, else the CPU, and return this process's device."""
    import torchtitan.tools.utils  # noqa: F401 - so that it is among the modules below

    kind, backend = ("cuda", torch.cuda) if torch.cuda.is_available() else ("cpu", torch.cpu)
    # Modules that are already loaded have copies of these names.
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and hasattr(module, "device_type"):
            for attribute, value in (("device_type", kind), ("device_module", backend)):
                if hasattr(module, attribute):
                    setattr(module, attribute, value)
    return local_device() if kind == "cuda" else torch.device("cpu")


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
    norm, rope = _layers(device)
    match shape.family:
        case "qwen3" | "dots1":
            family = _qwen3(shape, rope)
        case "llama3":
            family = _llama3(shape)
        case "gpt_oss":
            decoder_class, block, parallelize, adapter = gpt_oss.parts()
            family = _Family(decoder_class, block, gpt_oss.rope(shape, rope), parallelize, adapter)
        case _:
            decoder_class, block, parallelize, adapter = deepseek.parts()
            family = _Family(decoder_class, block, None, parallelize, adapter)
    decoder = _decoder(shape, family, norm, attention, fuses=lora is None)
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
        parallelize_fn=family.parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=family.adapter,
    )


def folder_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that a folder has of a torchtitan model: parameters but adapters, and biases that choose experts."""
    from goaly.models.lora import is_adapter

    biases = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(".expert_bias_E"))
    return _named((name, one) for name, one in (*model.named_parameters(), *biases) if not is_adapter(name))


def versioned_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that versions of a model differ in: those of its folder, or if it has adapters these (LR-1), with the
    digest of the folder's (LR-4)."""
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


def bitwise_problems(shape: Architecture, lora: LoraSettings | None = None) -> Iterator[str]:
    """One line for each reason why a model of this shape, with these adapters, must have fast numerics."""
    if lora is not None:
        yield "must be fast with trainer.lora: bitwise numerics have no layers with adapters"
    if shape.family not in BITWISE_FAMILIES:
        yield f"must be fast for {shape.family}: bitwise numerics have layers for {' and '.join(BITWISE_FAMILIES)} only"
    elif shape.experts and (shape.dim % KERNEL_WIDTH or shape.hidden_dim % (SLICES * KERNEL_WIDTH)):
        yield (
            f"must be fast for experts of width {shape.hidden_dim} in a model of width {shape.dim}: bitwise numerics "
            f"need multiples of {SLICES * KERNEL_WIDTH} and {KERNEL_WIDTH}"
        )


def _inner_attention(device: str, numerics: Numerics, *, sinks: bool) -> "Module.Config":
    if numerics == "bitwise":
        from goaly.numerics.bitwise_attention import BitwiseAttention

        return BitwiseAttention.Config()
    from goaly.models.attention import inner_attention

    return inner_attention(device, sinks=sinks)


class _Family(NamedTuple):
    """torchtitan's parts of a family's definition."""

    decoder: Any
    block: Any
    rope: Any
    """None: the family's attention has its own."""
    parallelize: Any
    adapter: Any


def _qwen3(shape: Architecture, rope: Any) -> _Family:
    from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
    from torchtitan.models.qwen3.model import Qwen3TransformerBlock
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    angles = rope.Config(dim=shape.head_dim, max_seq_len=shape.max_context, theta=shape.rope_theta)
    adapter = dots1.adapter if shape.family == "dots1" else Qwen3StateDictAdapter
    return _Family(Qwen3Model.Config, Qwen3TransformerBlock.Config, angles, parallelize_qwen3, adapter)


def _llama3(shape: Architecture) -> _Family:
    from torchtitan.models.common import ComplexRoPE
    from torchtitan.models.llama3 import Llama3Model, parallelize_llama
    from torchtitan.models.llama3.model import Llama3TransformerBlock
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

    rope = ComplexRoPE.Config(dim=shape.head_dim, max_seq_len=shape.max_context, theta=shape.rope_theta)
    if shape.rope_scaling:
        rope = dataclasses.replace(
            rope,
            scaling="llama",
            scaling_factor=shape.rope_scaling["factor"],
            low_freq_factor=shape.rope_scaling["low_freq_factor"],
            high_freq_factor=shape.rope_scaling["high_freq_factor"],
            original_max_position_embeddings=shape.rope_scaling["original_max_position_embeddings"],
        )
    return _Family(Llama3Model.Config, Llama3TransformerBlock.Config, rope, parallelize_llama, Llama3StateDictAdapter)


def _layers(device: str) -> tuple[Any, Any]:
    """The classes of the norm and of Qwen3's rotary embedding: torchtitan's, on a CPU with faster gradients."""
    if device == "cpu":
        from goaly.numerics.cpu_training import LeanRMSNorm, LeanRoPE

        return LeanRMSNorm, LeanRoPE
    from torchtitan.models.common import CosSinRoPE, RMSNorm

    return RMSNorm, CosSinRoPE


def _decoder(
    shape: Architecture, family: _Family, norm_class: Any, attention: "Module.Config", *, fuses: bool = True
) -> Any:
    from torchtitan.models.common import Embedding, Linear
    from torchtitan.models.common.config_utils import make_gqa_config
    from torchtitan.models.common.param_init import skip_param_init

    # Weights always come from the folder, so parameters are not initialized.
    unset = {"weight": skip_param_init, "bias": skip_param_init}

    def norm(width: int, *, eps: float = shape.norm_eps) -> Any:
        return norm_class.Config(normalized_shape=width, eps=eps, param_init=unset)

    def attention_of(layer: int) -> Any:
        inner = dataclasses.replace(attention)
        if shape.family == "gpt_oss":
            return gpt_oss.attention(shape, layer, family.rope, unset, inner)
        if shape.latent is not None:
            return deepseek.attention(shape, norm, unset, inner)
        return make_gqa_config(
            dim=shape.dim,
            n_heads=shape.heads,
            n_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            wqkv_param_init=unset,
            wo_param_init=unset,
            inner_attention=inner,
            fuse_qkv=fuses,
            rope=family.rope,
            qk_norm=norm(shape.head_dim) if shape.qk_norm else None,
        )

    layers = [
        family.block(
            attention_norm=norm(shape.dim),
            ffn_norm=norm(shape.dim),
            attention=attention_of(layer),
            **_feed_forward(shape, shape.has_experts(layer), unset),
        )
        for layer in range(shape.layers)
    ]
    return family.decoder(
        dim=shape.dim,
        vocab_size=shape.vocab_size,
        enable_weight_tying=shape.tied,
        tok_embeddings=Embedding.Config(num_embeddings=shape.vocab_size, embedding_dim=shape.dim, param_init=unset),
        norm=norm(shape.dim),
        lm_head=Linear.Config(in_features=shape.dim, out_features=shape.vocab_size, param_init=unset),
        layers=layers,
    )


def _feed_forward(shape: Architecture, experts: bool, unset: dict[str, Any]) -> dict[str, Any]:
    """The feed-forward part of a layer, dense or with experts, under its name in the layer's config."""
    from torchtitan.models.common.config_utils import make_ffn_config

    def dense(hidden_dim: int) -> Any:
        return make_ffn_config(dim=shape.dim, hidden_dim=hidden_dim, w1_param_init=unset, w2w3_param_init=unset)

    if experts:
        return {"moe": _experts(shape, dense(shape.shared_hidden_dim) if shape.shared_hidden_dim else None)}
    return {"feed_forward": dense(shape.dense_hidden_dim or shape.hidden_dim)}


def _experts(shape: Architecture, shared: Any) -> Any:
    """The feed-forward part of a layer with experts, and with the `shared` one."""
    from torchtitan.models.common.config_utils import make_router_config
    from torchtitan.models.common.moe import RoutedExperts
    from torchtitan.models.common.param_init import skip_param_init

    from goaly.numerics.experts import Dispatcher, Experts, MixtureOfExperts

    if shape.family == "gpt_oss":
        inner: Any = gpt_oss.experts(shape, skip_param_init)
    else:
        stacks = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), skip_param_init)
        inner = Experts.Config(dim=shape.dim, hidden_dim=shape.hidden_dim, num_experts=shape.experts, param_init=stacks)
    routing = {"num_experts": shape.experts, "top_k": shape.experts_per_token}
    return MixtureOfExperts.Config(
        num_experts=shape.experts,
        router=make_router_config(
            dim=shape.dim,
            gate_param_init={"weight": skip_param_init, "bias": skip_param_init},
            bias=shape.biased,
            score_func="sigmoid" if shape.biased_routing else "softmax",
            route_norm=shape.normalizes_routing,
            route_scale=shape.routing_scale,
            num_expert_groups=shape.expert_groups,
            num_limited_groups=shape.groups_per_token,
            **routing,
        ),
        routed_experts=RoutedExperts.Config(inner_experts=inner, token_dispatcher=Dispatcher.Config(**routing)),
        shared_experts=shared,
        load_balance_coeff=1.0 if shape.biased_routing else None,  # whether there is a bias; goaly changes it itself
    )
