"""The model families, each one file with what differs from `Architecture`, and the way from a Hugging Face
`config.json` to the right one.

Models are of any size, with tied or untied embeddings. Features that torchtitan's definition of a family lacks
(biases, sliding windows, other RoPE scalings) are refused by name, so no model is silently changed. A new family is a
file here and a line in `FAMILIES`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from goaly.base.errors import ConfigError
from goaly.models.architecture import EXPERTS_KEYS, Architecture
from goaly.models.families.deepseek_v3 import DeepSeekV3
from goaly.models.families.dots1 import Dots1
from goaly.models.families.gpt_oss import GptOss
from goaly.models.families.llama3 import Llama3
from goaly.models.families.qwen3 import Qwen3
from goaly.models.settings import no_model

FAMILIES: dict[str, type[Architecture]] = {
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3,
    "LlamaForCausalLM": Llama3,
    "DeepseekV3ForCausalLM": DeepSeekV3,
    "Dots1ForCausalLM": Dots1,
    "GptOssForCausalLM": GptOss,
}
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
    """The architecture that a Hugging Face config describes; one ConfigError lists all sizes that are missing or wrong,
    or all properties that are not supported."""
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
    refused = family.refused(config)
    if refused["quantization_config"] and family.dequantize:
        raise ConfigError([f"{where}: quantization_config: {family.dequantize}"])
    problems = [f"{where}: {key}={config.get(key)}: is not supported" for key, bad in refused.items() if bad]
    if rope_type not in family.rope_types:
        problems.append(f"{where}: rope_type={rope_type}: must be one of {', '.join(family.rope_types)} for {name}")
    if not problems and rope_type in SCALED_BY:
        lacking = [key for key in SCALED_BY[rope_type] if not isinstance(rope.get(key), int | float)]
        problems += [f"{where}: rope_type={rope_type}: must have a number {key} beside it" for key in lacking]
    if problems:
        raise ConfigError(problems)
    return family(
        **family.sizes(config),
        vocab_size=config["vocab_size"],
        dim=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        max_context=config["max_position_embeddings"],
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
        rope_scaling=rope if rope_type != "default" else {},
        tied=bool(config.get("tie_word_embeddings", False)),
    )
