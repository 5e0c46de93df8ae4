"""dots.llm1: Qwen3's attention and DeepSeek-V3's experts, from its Hugging Face config to torchtitan's Qwen3.

Qwen3-MoE's own format has no tensors for a shared expert and for a bias that chooses experts. This one has, and plain
transformers loads it, so it is the format of a Qwen3 with both.
"""

from collections.abc import Mapping
from typing import Any

from goaly.models import deepseek

SLIDING = "sliding_attention"


def refused(config: Mapping[str, Any]) -> dict[str, bool]:
    """Keys of the config, and whether its value is one that torchtitan's definition lacks."""
    layers = config["num_hidden_layers"]
    slides = bool(config.get("sliding_window")) and config.get("max_window_layers", layers) < layers
    types = config.get("layer_types")
    return {"layer_types" if types else "max_window_layers": SLIDING in types if types else slides}


def sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an `Architecture` that Qwen3 does not have."""
    return deepseek.expert_sizes(config)


def adapter(decoder: Any, assets: str | None) -> Any:
    """torchtitan's adapter of Qwen3's folders, with the names of shared experts and of biases."""
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    made = Qwen3StateDictAdapter(decoder, assets)
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    made.from_hf_map |= {
        f"model.layers.{{}}.mlp.shared_experts.{theirs}.weight": f"layers.{{}}.moe.shared_experts.{ours}.weight"
        for theirs, ours in names.items()
    }
    made.from_hf_map["model.layers.{}.mlp.gate.e_score_correction_bias"] = "layers.{}.moe.expert_bias_E"
    return made
