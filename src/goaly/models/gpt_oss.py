"""gpt-oss's attention and experts, from its Hugging Face config to torchtitan's.

Heads have sinks, layers attend to a window of tokens or to all of them, and linear layers, routers and experts have
biases. Published folders have quantized experts, which cannot be trained: `architecture` refuses them.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from goaly.models.architecture import Architecture

SWIGLU_ALPHA = 1.702
"""The gain of torchtitan's clamped activation."""
DEQUANTIZE = (
    "is not supported: write a folder of bfloat16 weights once with transformers, "
    "`GptOssForCausalLM.from_pretrained(FOLDER, quantization_config=Mxfp4Config(dequantize=True), dtype='bfloat16')"
    ".save_pretrained(OTHER)`, copy the tokenizer's files to it, and set model.path to it"
)
WINDOWED, WHOLE = "sliding_attention", "full_attention"


def refused(config: Mapping[str, Any]) -> dict[str, bool]:
    """Keys of the config, and whether its value is one that torchtitan's definition lacks."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    types = _layer_types(config)
    odd_types = set(types) - {WINDOWED, WHOLE} or len(types) != config["num_hidden_layers"]
    others = ("attention_factor", "mscale", "mscale_all_dim")  # torchtitan follows `factor` alone
    return {
        "attention_bias": config.get("attention_bias", True) is not True,
        "swiglu_alpha": config.get("swiglu_alpha", SWIGLU_ALPHA) != SWIGLU_ALPHA,
        "tie_word_embeddings": bool(config.get("tie_word_embeddings")),
        "layer_types": bool(odd_types),
        "sliding_window": WINDOWED in types and not config.get("sliding_window"),
        "rope_parameters" if "rope_parameters" in config else "rope_scaling": any(map(scaling.get, others)),
        "rope_theta": not (config.get("rope_theta") or scaling.get("rope_theta")),
        "rms_norm_eps": "rms_norm_eps" not in config,
    }


def sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an `Architecture` that only this family has, or has by other names."""
    window = config.get("sliding_window") or 0
    return {
        "biased": True,
        "windows": tuple(window if kind == WINDOWED else 0 for kind in _layer_types(config)),
        "activation_limit": config.get("swiglu_limit", 7.0),
        "hidden_dim": config["intermediate_size"],
        "experts": config["num_local_experts"],
        "experts_per_token": config["num_experts_per_tok"],
        "normalizes_routing": True,  # the softmax is over the chosen experts
    }


def parts() -> tuple[Any, Any, Any, Any]:
    """torchtitan's configs of the decoder and of a block, its plan of parallelism, and the adapter of folders."""
    from torchtitan.models.gpt_oss import GptOssModel, parallelize_gptoss
    from torchtitan.models.gpt_oss.model import GptOssTransformerBlock

    from goaly.models.gpt_oss_layers import FolderAdapter

    return GptOssModel.Config, GptOssTransformerBlock.Config, parallelize_gptoss, FolderAdapter


def rope(shape: "Architecture", kind: Any) -> Any:
    """The rotary embedding, of this class."""
    angles = kind.Config(dim=shape.head_dim, max_seq_len=shape.max_context, theta=shape.rope_theta)
    scaling = shape.rope_scaling
    if not scaling:
        return angles
    return dataclasses.replace(
        angles,
        scaling="yarn",
        rope_factor=scaling["factor"],
        beta_fast=scaling.get("beta_fast") or 32.0,
        beta_slow=scaling.get("beta_slow") or 1.0,
        truncate=scaling.get("truncate", True),
        original_seq_len=scaling["original_max_position_embeddings"],
    )


def attention(shape: "Architecture", layer: int, angles: Any, unset: dict[str, Any], inner: Any) -> Any:
    """torchtitan's attention of a layer with this inner attention, which gets the layer's window."""
    from torchtitan.models.common import Linear
    from torchtitan.models.common.attention import FusedQKVLinear

    from goaly.models.gpt_oss_layers import AttentionWithSinks, RowwiseLinear

    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    window = shape.windows[layer]
    if window:
        inner = dataclasses.replace(inner, window_size=(window - 1, 0))
    return AttentionWithSinks.Config(
        dim=shape.dim,
        n_heads=shape.heads,
        n_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        qkv_linear=FusedQKVLinear.Config(
            head_dim=shape.head_dim,
            n_heads=shape.heads,
            n_kv_heads=shape.kv_heads,
            wqkv=Linear.Config(in_features=shape.dim, out_features=queries + 2 * keys, bias=True, param_init=unset),
        ),
        wo=RowwiseLinear.Config(in_features=queries, out_features=shape.dim, bias=True, param_init=unset),
        sliding_window_size=window or None,
        inner_attention=inner,
        rope=dataclasses.replace(angles),
        param_init={"sinks": unset["weight"]},
    )


def experts(shape: "Architecture", unset: Any) -> Any:
    """The experts of a layer."""
    from goaly.models.gpt_oss_layers import ClampedExperts

    names = ("mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF", "mlp2_bias_ED")
    return ClampedExperts.Config(
        dim=shape.dim,
        hidden_dim=shape.hidden_dim,
        num_experts=shape.experts,
        swiglu_limit=shape.activation_limit,
        param_init=dict.fromkeys(names, unset),
    )


def softmax_scale(attention: Any) -> float:
    """The factor by which torchtitan's attention multiplies scores."""
    scale = attention.head_dim**-0.5
    if attention.rope.scaling == "yarn" and attention.rope.rope_factor > 1.0:
        scale *= (0.1 * math.log(attention.rope.rope_factor) + 1.0) ** 2
    return scale


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    """The attention of each layer; without the key every other one has a window, the first too."""
    layers = config["num_hidden_layers"]
    return config.get("layer_types") or [WHOLE if layer % 2 else WINDOWED for layer in range(layers)]
