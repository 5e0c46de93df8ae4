"""Reads a Hugging Face `config.json`.

Families: Qwen3, dense and with experts in every layer, Llama 3, DeepSeek-V3 (`deepseek.py`) and dots.llm1 (`dots1.py`),
with tied or untied embeddings, and gpt-oss (`gpt_oss.py`); all of any size.
Features that torchtitan's definition of a family lacks (biases, sliding windows, other RoPE scalings) are refused by
name, so no model is silently changed.
"""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from goaly.base.errors import ConfigError
from goaly.models import deepseek, dots1, gpt_oss
from goaly.models.decoder import Decoder
from goaly.models.settings import no_model


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Architecture(Decoder):
    """The decoder that `config.json` describes."""

    family: str
    max_context: int
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any]
    experts_per_token: int = 0
    normalizes_routing: bool = True
    """Whether the weights of a token's experts add up to 1 before `routing_scale`."""
    routing_scale: float = 1.0
    expert_groups: int | None = None
    """Groups of experts, of which each token chooses `groups_per_token` and then its experts among theirs."""
    groups_per_token: int | None = None
    windows: tuple[int, ...] = ()
    """How many tokens each layer attends to, 0 for all; without entries all layers do."""
    activation_limit: float = 0.0
    """Where gpt-oss's experts clamp what they multiply."""

    @property
    def biased_routing(self) -> bool:
        """Whether experts are chosen by sigmoid scores plus a bias."""
        return self.family in ("deepseek_v3", "dots1")


LAYER = re.compile(r"model\.layers\.(\d+)\.")
"""The beginning of a layer's names in a folder."""
FAMILIES = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama3",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Dots1ForCausalLM": "dots1",
    "GptOssForCausalLM": "gpt_oss",
}
ROPE_SCALINGS = {
    "qwen3": ("default",),
    "llama3": ("default", "llama3"),
    "deepseek_v3": ("default", "yarn"),
    "dots1": ("default",),
    "gpt_oss": ("default", "yarn"),
}
EXPERTS_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")
"""The names that families and versions of transformers give the number of experts."""
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
"""The numbers that the config of every family has."""
OTHER_SIZES = (
    *("num_key_value_heads", "head_dim", "intermediate_size", "moe_intermediate_size", "num_experts_per_tok"),
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "sliding_window"),
    *("first_k_dense_replace", "n_shared_experts", "n_group", "topk_group", *EXPERTS_KEYS),
)
SCALED_BY = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""The numbers that a scaling of RoPE needs."""


def read_config(folder: str | Path, where: str | None = None) -> dict[str, Any]:
    """The folder's `config.json`; `where` names it in errors."""
    path = Path(folder) / "config.json"
    where = where or str(folder)
    if not path.is_file():
        raise ConfigError([no_model(folder, where)])
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError([f"{where}: its config.json cannot be read: {error}"]) from None
    if not isinstance(config, dict):
        raise ConfigError([f"{where}: its config.json must be an object, it is of type {type(config).__name__}"])
    return config


def architecture(config: dict[str, Any], *, where: str = "config.json") -> Architecture:
    """Read a Hugging Face config; one ConfigError lists all sizes that are missing or wrong, or all properties that are
    not supported."""
    names = config.get("architectures") or ["none"]
    name = names[0] if isinstance(names, list) else names
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError([f"{where}: architectures={name}: must be one of {', '.join(FAMILIES)}"])
    if problems := list(_size_problems(config, where)):
        raise ConfigError(problems)
    try:
        return _architecture(config, name, where)
    except KeyError as error:
        raise ConfigError([f"{where}: has no {error.args[0]}, which {name} must have"]) from None
    except (TypeError, AttributeError) as error:
        raise ConfigError([f"{where}: is not a config of {name}: {error}"]) from None


def _size_problems(config: dict[str, Any], where: str) -> Iterator[str]:
    """One line for each size that is missing, is no whole number, or contradicts another one."""
    wrong = False
    for key in (*SIZES, *OTHER_SIZES):
        size, least = config.get(key), int(key in SIZES)
        if key in SIZES and key not in config:
            yield f"{where}: has no {key}, must have a whole number"
        elif (size is not None or key in SIZES) and (not isinstance(size, int) or size < least):
            yield f"{where}: {key}={size!r}: must be a whole number of at least {least}"
        else:
            continue
        wrong = True
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if not wrong and heads and kv_heads and heads % kv_heads:
        yield f"{where}: num_key_value_heads={kv_heads}: must divide num_attention_heads={heads}"


def _architecture(config: dict[str, Any], name: str, where: str) -> Architecture:
    family = FAMILIES[name]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    refused = {
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "use_sliding_window": bool(config.get("use_sliding_window")),
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "quantization_config": config.get("quantization_config") is not None,
        "decoder_sparse_step": config.get("decoder_sparse_step", 1) != 1,
        "mlp_only_layers": bool(config.get("mlp_only_layers")),
    }
    own = {"deepseek_v3": deepseek, "dots1": dots1, "gpt_oss": gpt_oss}.get(family)
    if own is not None:
        refused |= own.refused(config)
    if refused["quantization_config"] and family == "gpt_oss":
        raise ConfigError([f"{where}: quantization_config: {gpt_oss.DEQUANTIZE}"])
    problems = [f"{where}: {key}={config.get(key)}: is not supported" for key, bad in refused.items() if bad]
    if rope_type not in ROPE_SCALINGS[family]:
        problems.append(f"{where}: rope_type={rope_type}: must be one of {', '.join(ROPE_SCALINGS[family])} for {name}")
    if not problems and rope_type in SCALED_BY:
        lacking = [key for key in SCALED_BY[rope_type] if not isinstance(rope.get(key), int | float)]
        problems += [f"{where}: rope_type={rope_type}: must have a number {key} beside it" for key in lacking]
    if problems:
        raise ConfigError(problems)
    heads = config["num_attention_heads"]
    experts = (
        next((config[key] for key in EXPERTS_KEYS if config.get(key)), 0) if "moe_intermediate_size" in config else 0
    )
    sizes: dict[str, Any] = {
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "hidden_dim": config["moe_intermediate_size" if experts else "intermediate_size"],
        "experts": experts,
        "experts_per_token": config["num_experts_per_tok"] if experts else 0,
        "normalizes_routing": bool(config.get("norm_topk_prob", False)),
    }
    if own is not None:
        sizes |= own.sizes(config)
    return Architecture(
        **sizes,
        family=family,
        vocab_size=config["vocab_size"],
        dim=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        max_context=config["max_position_embeddings"],
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
        rope_scaling=rope if rope_type != "default" else {},
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_norm=family in ("qwen3", "dots1"),
    )
