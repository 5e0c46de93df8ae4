"""gpt-oss: heads have sinks, layers attend to a window of tokens or to all of them, and linear layers, routers and
experts have biases. `gpt_oss_layers.py` has the layers in which goaly differs from torchtitan.

Published folders have quantized experts, which cannot be trained, and are refused.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from goaly.models.architecture import Architecture, LayerParts, Parameter, Torchtitan
from goaly.weights.layout import Extent

SWIGLU_ALPHA = 1.702
"""The gain of torchtitan's clamped activation."""
WINDOWED, WHOLE = "sliding_attention", "full_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptOss(Architecture):
    """A decoder with biases, sinks and windows."""

    family = "gpt_oss"
    rope_types = ("default", "yarn")
    biased = True
    no_adapters = "gpt-oss, whose layers have biases"
    dequantize = (
        "is not supported: write a folder of bfloat16 weights once with transformers, "
        "`GptOssForCausalLM.from_pretrained(FOLDER, quantization_config=Mxfp4Config(dequantize=True), "
        "dtype='bfloat16').save_pretrained(OTHER)`, copy the tokenizer's files to it, and set model.path to it"
    )

    activation_limit: float
    """Where experts clamp their inputs to the product."""

    @classmethod
    def refused(cls, config: Mapping[str, Any]) -> dict[str, bool]:
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        types = _layer_types(config)
        odd_types = set(types) - {WINDOWED, WHOLE} or len(types) != config["num_hidden_layers"]
        others = ("attention_factor", "mscale", "mscale_all_dim")  # torchtitan follows `factor` alone
        return super().refused(config) | {
            "attention_bias": config.get("attention_bias", True) is not True,
            "swiglu_alpha": config.get("swiglu_alpha", SWIGLU_ALPHA) != SWIGLU_ALPHA,
            "tie_word_embeddings": bool(config.get("tie_word_embeddings")),
            "layer_types": bool(odd_types),
            "sliding_window": WINDOWED in types and not config.get("sliding_window"),
            "rope_parameters" if "rope_parameters" in config else "rope_scaling": any(map(scaling.get, others)),
            "rope_theta": not (config.get("rope_theta") or scaling.get("rope_theta")),
            "rms_norm_eps": "rms_norm_eps" not in config,
        }

    @classmethod
    def sizes(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        window = config.get("sliding_window") or 0
        return super().sizes(config) | {
            "windows": tuple(window if kind == WINDOWED else 0 for kind in _layer_types(config)),
            "activation_limit": config.get("swiglu_limit", 7.0),
            "hidden_dim": config["intermediate_size"],
            "experts": config["num_local_experts"],
            "experts_per_token": config["num_experts_per_tok"],
            "normalizes_routing": True,  # the softmax is over the chosen experts
        }

    def attention_parameters(self, prefix: str) -> Iterator[Parameter]:
        yield from super().attention_parameters(prefix)
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        yield Parameter(name=f"{prefix}qkv_linear.wqkv.bias", shape=(rows,), tp_dim=0)
        yield Parameter(name=f"{prefix}wo.bias", shape=(self.dim,))
        yield Parameter(name=f"{prefix}sinks", shape=(self.heads,), tp_dim=0)

    def expert_parameters(self, prefix: str) -> Iterator[Parameter]:
        yield from super().expert_parameters(prefix)
        yield Parameter(name=f"{prefix}router.gate.bias", shape=(self.experts,))

    def expert_stacks(self) -> Iterator[tuple[str, Extent, int | None]]:
        both = 2 * self.hidden_dim
        yield "mlp1_weight_EGD", (both, self.dim), 1
        yield "mlp1_bias_EG", (both,), 1
        yield "mlp2_weight_EDF", (self.dim, self.hidden_dim), 2
        yield "mlp2_bias_ED", (self.dim,), None

    def folder_experts(self, prefix: str) -> Iterator[tuple[str, Extent]]:
        yield f"{prefix}experts.down_proj", (self.experts, self.hidden_dim, self.dim)

    def torchtitan(self) -> Torchtitan:
        from torchtitan.models.gpt_oss import GptOssModel, parallelize_gptoss
        from torchtitan.models.gpt_oss.model import GptOssTransformerBlock

        from goaly.models.gpt_oss_layers import FolderAdapter

        return Torchtitan(GptOssModel.Config, GptOssTransformerBlock.Config, parallelize_gptoss, FolderAdapter)

    def rope(self, parts: LayerParts) -> Any:
        angles, scaling = super().rope(parts), self.rope_scaling
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

    def attention(self, layer: int, parts: LayerParts) -> Any:
        from torchtitan.models.common import Linear
        from torchtitan.models.common.attention import FusedQKVLinear

        from goaly.models.gpt_oss_layers import AttentionWithSinks, RowwiseLinear

        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        inner, window = parts.inner, self.windows[layer]
        if window:
            inner = dataclasses.replace(inner, window_size=(window - 1, 0))
        wide = {"out_features": queries + 2 * keys, "bias": True, "param_init": parts.unset}
        return AttentionWithSinks.Config(
            dim=self.dim,
            n_heads=self.heads,
            n_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            qkv_linear=FusedQKVLinear.Config(
                head_dim=self.head_dim,
                n_heads=self.heads,
                n_kv_heads=self.kv_heads,
                wqkv=Linear.Config(in_features=self.dim, **wide),
            ),
            wo=RowwiseLinear.Config(in_features=queries, out_features=self.dim, bias=True, param_init=parts.unset),
            sliding_window_size=window or None,
            inner_attention=inner,
            rope=self.rope(parts),
            param_init={"sinks": parts.unset["weight"]},
        )

    def softmax_scale(self, attention: Any) -> float:
        scale = self.head_dim**-0.5
        if attention.rope.scaling == "yarn" and attention.rope.rope_factor > 1.0:
            scale *= (0.1 * math.log(attention.rope.rope_factor) + 1.0) ** 2
        return scale

    def inner_experts(self, parts: LayerParts) -> Any:
        from goaly.models.gpt_oss_layers import ClampedExperts

        return ClampedExperts.Config(
            dim=self.dim,
            hidden_dim=self.hidden_dim,
            num_experts=self.experts,
            swiglu_limit=self.activation_limit,
            param_init=dict.fromkeys((name for name, _, _ in self.expert_stacks()), parts.unset["weight"]),
        )


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    """The attention of each layer; without the key every other one has a window, the first too."""
    layers = config["num_hidden_layers"]
    return config.get("layer_types") or [WHOLE if layer % 2 else WINDOWED for layer in range(layers)]
