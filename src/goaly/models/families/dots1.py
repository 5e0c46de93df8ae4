"""dots.llm1: Qwen3's attention and DeepSeek-V3's experts.

Qwen3-MoE's own format has no tensors for a shared expert and for a bias that chooses experts. This one has, and plain
transformers loads it, so it is the format of a Qwen3 with both.
"""

from collections.abc import Mapping
from typing import Any

from goaly.models.architecture import Torchtitan
from goaly.models.families.deepseek_v3 import expert_sizes
from goaly.models.families.qwen3 import Qwen3

SLIDING = "sliding_attention"


class Dots1(Qwen3):
    """Qwen3 with a shared expert, and a bias that chooses experts."""

    family = "dots1"
    biased_routing = True
    has_bitwise = False
    has_vllm_naming = False
    no_adapters = "dots.llm1, whose experts have biases"

    @classmethod
    def refused(cls, config: Mapping[str, Any]) -> dict[str, bool]:
        layers = config["num_hidden_layers"]
        slides = bool(config.get("sliding_window")) and config.get("max_window_layers", layers) < layers
        types = config.get("layer_types")
        sliding = {"layer_types": SLIDING in types} if types else {"max_window_layers": slides}
        return super().refused(config) | sliding

    @classmethod
    def sizes(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return super().sizes(config) | expert_sizes(config)

    def torchtitan(self) -> Torchtitan:
        return super().torchtitan()._replace(adapter=_adapter)


def _adapter(decoder: Any, assets: str | None) -> Any:
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
