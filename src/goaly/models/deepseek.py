"""DeepSeek-V3's attention and routing, from its Hugging Face config to torchtitan's.

Keys and values are made from a latent vector for each token (multi-head latent attention). The sampler expands them as
the trainer does, and caches them for each head. The parts for multi-token prediction are not loaded.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from goaly.models.decoder import Latent

if TYPE_CHECKING:
    from goaly.models.architecture import Architecture

LATENT_NORM_EPS = 1e-6
"""DeepSeek's norms of latent vectors do not take the config's."""


def refused(config: Mapping[str, Any]) -> dict[str, bool]:
    """Keys of the config, and whether its value is one that torchtitan's definition lacks."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {
        "rope_interleave": config.get("rope_interleave", True) is not True,
        "scoring_func": config.get("scoring_func", "sigmoid") != "sigmoid",
        "topk_method": config.get("topk_method", "noaux_tc") != "noaux_tc",
        "moe_layer_freq": config.get("moe_layer_freq", 1) != 1,
        "rope_parameters" if "rope_parameters" in config else "rope_scaling": scaling.get("mscale", 1)
        != scaling.get("mscale_all_dim", 1),
    }


def sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an `Architecture` that only this family has."""
    latent = Latent(
        query_rank=config.get("q_lora_rank") or 0,
        rank=config["kv_lora_rank"],
        plain_dim=config["qk_nope_head_dim"],
        rotated_dim=config["qk_rope_head_dim"],
        value_dim=config["v_head_dim"],
    )
    return {
        "latent": latent,
        "head_dim": latent.head_dim,
        **expert_sizes(config),
    }


def expert_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an `Architecture` that describe which layers have experts, shared ones, and groups of them."""
    return {
        "dense_layers": config["first_k_dense_replace"],
        "dense_hidden_dim": config["intermediate_size"],
        "shared_hidden_dim": config["n_shared_experts"] * config["moe_intermediate_size"],
        "expert_groups": config["n_group"],
        "groups_per_token": config["topk_group"],
        "routing_scale": config["routed_scaling_factor"],
    }


def parts() -> tuple[Any, Any, Any, Any]:
    """torchtitan's configs of the decoder and of a block, its plan of parallelism, and the adapter of folders."""
    from torchtitan.models.deepseek_v3 import DeepSeekV3Model, DeepSeekV3StateDictAdapter
    from torchtitan.models.deepseek_v3.model import DeepSeekV3TransformerBlock
    from torchtitan.models.deepseek_v3.parallelize import parallelize_deepseekv3

    return DeepSeekV3Model.Config, DeepSeekV3TransformerBlock.Config, parallelize_deepseekv3, DeepSeekV3StateDictAdapter


def attention(shape: "Architecture", norm: Callable[..., Any], unset: dict[str, Any], inner: Any) -> Any:
    """torchtitan's latent attention with this inner attention; `norm` makes a norm of a width."""
    from torchtitan.models.common import ComplexRoPE, Linear
    from torchtitan.models.deepseek_v3.model import Attention

    latent = shape.latent
    assert latent is not None

    def linear(inputs: int, outputs: int) -> Any:
        return Linear.Config(in_features=inputs, out_features=outputs, param_init=unset)

    rope = ComplexRoPE.Config(dim=latent.rotated_dim, max_seq_len=shape.max_context, theta=shape.rope_theta)
    scaling = shape.rope_scaling
    if scaling:
        rope = dataclasses.replace(
            rope,
            scaling="yarn",
            rope_factor=scaling["factor"],
            beta_fast=scaling.get("beta_fast", 32.0),
            beta_slow=scaling.get("beta_slow", 1.0),
            original_seq_len=scaling["original_max_position_embeddings"],
        )
    queries = shape.heads * latent.head_dim
    return Attention.Config(
        dim=shape.dim,
        n_heads=shape.heads,
        q_lora_rank=latent.query_rank,
        kv_lora_rank=latent.rank,
        qk_nope_head_dim=latent.plain_dim,
        qk_rope_head_dim=latent.rotated_dim,
        v_head_dim=latent.value_dim,
        mscale=scaling.get("mscale_all_dim", 0.0),
        wq=None if latent.query_rank else linear(shape.dim, queries),
        wq_a=linear(shape.dim, latent.query_rank) if latent.query_rank else None,
        wq_b=linear(latent.query_rank, queries) if latent.query_rank else None,
        q_norm=norm(latent.query_rank or 1, eps=LATENT_NORM_EPS),
        wkv_a=linear(shape.dim, latent.rank + latent.rotated_dim),
        kv_norm=norm(latent.rank, eps=LATENT_NORM_EPS),
        wkv_b=linear(latent.rank, shape.heads * (latent.plain_dim + latent.value_dim)),
        wo=linear(shape.heads * latent.value_dim, shape.dim),
        inner_attention=inner,
        rope=rope,
    )


def softmax_scale(attention: Any) -> float:
    """The factor by which torchtitan's latent attention multiplies scores."""
    scale = (attention.qk_nope_head_dim + attention.qk_rope_head_dim) ** -0.5
    if attention.rope.scaling == "yarn" and attention.rope.rope_factor > 1.0:
        scale *= (0.1 * attention.mscale * math.log(attention.rope.rope_factor) + 1.0) ** 2
    return scale
