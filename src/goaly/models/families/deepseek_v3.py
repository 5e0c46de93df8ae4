"""DeepSeek-V3: keys and values are made from a latent vector for each token (multi-head latent attention).

The sampler expands them as the trainer does, and caches them for each head. The parts for multi-token prediction are
not loaded.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from goaly.models.architecture import Architecture, LayerParts, Parameter, Torchtitan
from goaly.weights.layout import Extent

LATENT_NORM_EPS = 1e-6
"""DeepSeek's norms of latent vectors do not take the config's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeekV3(Architecture):
    """A decoder with latent attention; `head_dim` is the width of a query or key head."""

    family = "deepseek_v3"
    rope_types = ("default", "yarn")
    biased_routing = True
    has_unloaded_layers = True
    no_adapters = "the latent attention of DeepSeek-V3"

    latent_dim: int
    """Width of the latent vector of keys and values."""
    query_latent_dim: int
    """Width of that of queries; 0: they are made from the hidden state itself."""
    plain_dim: int
    """The part of a query head without rotation."""
    rotated_dim: int
    value_dim: int

    @classmethod
    def refused(cls, config: Mapping[str, Any]) -> dict[str, bool]:
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        scaled = scaling.get("mscale", 1) != scaling.get("mscale_all_dim", 1)
        return super().refused(config) | {
            "rope_interleave": config.get("rope_interleave", True) is not True,
            "scoring_func": config.get("scoring_func", "sigmoid") != "sigmoid",
            "topk_method": config.get("topk_method", "noaux_tc") != "noaux_tc",
            "moe_layer_freq": config.get("moe_layer_freq", 1) != 1,
            "rope_parameters" if "rope_parameters" in config else "rope_scaling": scaled,
        }

    @classmethod
    def sizes(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        plain, rotated = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        return (
            super().sizes(config)
            | expert_sizes(config)
            | {
                "latent_dim": config["kv_lora_rank"],
                "query_latent_dim": config.get("q_lora_rank") or 0,
                "plain_dim": plain,
                "rotated_dim": rotated,
                "value_dim": config["v_head_dim"],
                "head_dim": plain + rotated,
            }
        )

    def attention_parameters(self, prefix: str) -> Iterator[Parameter]:
        queries = self.heads * self.head_dim
        if self.query_latent_dim:
            yield Parameter(name=f"{prefix}wq_a.weight", shape=(self.query_latent_dim, self.dim))
            yield Parameter(name=f"{prefix}q_norm.weight", shape=(self.query_latent_dim,))
            yield Parameter(name=f"{prefix}wq_b.weight", shape=(queries, self.query_latent_dim), tp_dim=0)
        else:
            yield Parameter(name=f"{prefix}wq.weight", shape=(queries, self.dim), tp_dim=0)
        made = self.heads * (self.plain_dim + self.value_dim)
        yield Parameter(name=f"{prefix}wkv_a.weight", shape=(self.latent_dim + self.rotated_dim, self.dim))
        yield Parameter(name=f"{prefix}kv_norm.weight", shape=(self.latent_dim,))
        yield Parameter(name=f"{prefix}wkv_b.weight", shape=(made, self.latent_dim), tp_dim=0)
        yield Parameter(name=f"{prefix}wo.weight", shape=(self.dim, self.heads * self.value_dim), tp_dim=1)

    def folder_attention(self, prefix: str) -> Iterator[tuple[str, Extent]]:
        yield f"{prefix}o_proj.weight", (self.dim, self.heads * self.value_dim)

    def torchtitan(self) -> Torchtitan:
        from torchtitan.models.deepseek_v3 import DeepSeekV3Model, DeepSeekV3StateDictAdapter
        from torchtitan.models.deepseek_v3.model import DeepSeekV3TransformerBlock
        from torchtitan.models.deepseek_v3.parallelize import parallelize_deepseekv3

        decoder, block = DeepSeekV3Model.Config, DeepSeekV3TransformerBlock.Config
        return Torchtitan(decoder, block, parallelize_deepseekv3, DeepSeekV3StateDictAdapter)

    def rope(self, parts: LayerParts) -> Any:
        from torchtitan.models.common import ComplexRoPE

        rope = ComplexRoPE.Config(dim=self.rotated_dim, max_seq_len=self.max_context, theta=self.rope_theta)
        if not self.rope_scaling:
            return rope
        return dataclasses.replace(
            rope,
            scaling="yarn",
            rope_factor=self.rope_scaling["factor"],
            beta_fast=self.rope_scaling.get("beta_fast", 32.0),
            beta_slow=self.rope_scaling.get("beta_slow", 1.0),
            original_seq_len=self.rope_scaling["original_max_position_embeddings"],
        )

    def attention(self, layer: int, parts: LayerParts) -> Any:
        from torchtitan.models.common import Linear
        from torchtitan.models.deepseek_v3.model import Attention

        def linear(inputs: int, outputs: int) -> Any:
            return Linear.Config(in_features=inputs, out_features=outputs, param_init=parts.unset)

        queries, query_latent = self.heads * self.head_dim, self.query_latent_dim
        return Attention.Config(
            dim=self.dim,
            n_heads=self.heads,
            q_lora_rank=query_latent,
            kv_lora_rank=self.latent_dim,
            qk_nope_head_dim=self.plain_dim,
            qk_rope_head_dim=self.rotated_dim,
            v_head_dim=self.value_dim,
            mscale=self.rope_scaling.get("mscale_all_dim", 0.0),
            wq=None if query_latent else linear(self.dim, queries),
            wq_a=linear(self.dim, query_latent) if query_latent else None,
            wq_b=linear(query_latent, queries) if query_latent else None,
            q_norm=parts.norm(query_latent or 1, eps=LATENT_NORM_EPS),
            wkv_a=linear(self.dim, self.latent_dim + self.rotated_dim),
            kv_norm=parts.norm(self.latent_dim, eps=LATENT_NORM_EPS),
            wkv_b=linear(self.latent_dim, self.heads * (self.plain_dim + self.value_dim)),
            wo=linear(self.heads * self.value_dim, self.dim),
            inner_attention=parts.inner,
            rope=self.rope(parts),
        )

    def softmax_scale(self, attention: Any) -> float:
        scale = self.head_dim**-0.5
        if attention.rope.scaling == "yarn" and attention.rope.rope_factor > 1.0:
            scale *= (0.1 * attention.mscale * math.log(attention.rope.rope_factor) + 1.0) ** 2
        return scale


def expert_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that describe which layers have experts, shared ones, and groups of them."""
    return {
        "dense_layers": config["first_k_dense_replace"],
        "dense_hidden_dim": config["intermediate_size"],
        "shared_hidden_dim": config["n_shared_experts"] * config["moe_intermediate_size"],
        "expert_groups": config["n_group"],
        "groups_per_token": config["topk_group"],
        "routing_scale": config["routed_scaling_factor"],
    }
