"""The architectures of published models, known without their folders, for plans and for tiny models."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from goaly.base.errors import ConfigError
from goaly.models.architecture import Architecture
from goaly.models.families import architecture, read_config

if TYPE_CHECKING:
    from goaly.models.settings import ModelSettings


def _qwen3(
    layers: int,
    dim: int,
    hidden_dim: int,
    heads: int,
    kv_heads: int,
    *,
    expert_dim: int = 0,
    tied: bool = False,
    long: bool = False,
) -> dict[str, Any]:
    """Qwen3's `config.json`; with `expert_dim` it has 128 experts, 8 for each token. `long` ones have the context and
    the angles of later releases."""
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": expert_dim,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    }
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": dim,
        "intermediate_size": hidden_dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "max_position_embeddings": 262144 if long else 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e7 if long else 1e6,
        "tie_word_embeddings": tied,
        **(experts if expert_dim else {}),
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, 8, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, 8),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64, 8),
    "qwen3-30b-a3b": _qwen3(48, 2048, 6144, 32, 4, expert_dim=768),
    "qwen3-coder-30b-a3b": _qwen3(48, 2048, 6144, 32, 4, expert_dim=768, long=True),
    "qwen3-235b-a22b": _qwen3(94, 4096, 12288, 64, 4, expert_dim=1536),
    "llama3-70b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
}
"""Of each model's `config.json`, the part that goaly reads."""

MODELS = {name: architecture(config, where=name) for name, config in CONFIGS.items()}


def config_of(model: "ModelSettings", where: str | None = None) -> dict[str, Any]:
    """The `config.json` of the model: its folder's, or that of the published architecture if there is no folder.

    `where` names the folder in errors."""
    if model.architecture is None or (Path(model.path) / "config.json").is_file():
        return read_config(model.path, where)
    return CONFIGS[model.architecture]


def shape_of(model: "ModelSettings", where: str | None = None) -> Architecture:
    """The architecture of the model; ConfigError if its folder has another one than the settings name."""
    where = model.path if where is None else where
    shape = architecture(config_of(model, where), where=where)
    if model.architecture is not None:
        wanted = MODELS[model.architecture]
        sizes = ("family", "layers", "dim", "hidden_dim", "heads", "kv_heads", "head_dim", "vocab_size", "experts")
        other = [f"{name}={getattr(shape, name)}" for name in sizes if getattr(shape, name) != getattr(wanted, name)]
        if other:
            raise ConfigError([f"{where}: has {', '.join(other)}, must be {model.architecture} (model.architecture)"])
    return shape
