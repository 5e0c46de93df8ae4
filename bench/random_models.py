"""Random models of families that `goaly.models.tiny` does not write, as Hugging Face writes them."""

from pathlib import Path
from typing import Any

SIZE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "dtype": "float32",
}


def write_random_llama(folder: Path) -> Path:
    """Save a Llama with the positions of Llama 3.1; returns the folder."""
    from transformers import LlamaConfig

    rope = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    return _write_random(LlamaConfig(**{**SIZE, "rope_parameters": rope}), folder)


def write_random_dots(folder: Path) -> Path:
    """Save a dots.llm1; returns the folder. Its first layer is dense. The other two have 8 experts in 4 groups, two for
    each token, chosen with a bias from two groups, and a shared one."""
    from transformers import Dots1Config

    own: dict[str, Any] = {
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
    }
    return _write_random(Dots1Config(**{**SIZE, **own}), folder)


def _write_random(config: Any, folder: Path) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        biases = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith("bias"))
        for name, tensor in (*model.named_parameters(), *biases):
            # Larger than the usual start, so that tokens choose many experts and biases change their choices.
            tensor.normal_(mean=1.0, std=0.1) if "norm" in name else tensor.normal_(std=0.12)
    model.save_pretrained(folder)
    return folder
