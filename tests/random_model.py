"""Tiny models of random weights and their tokenizer, as Hugging Face writes them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torchtitan.protocols.model_spec import ModelSpec
    from transformers import PreTrainedModel

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = list("0123456789+-*=|,.:;?! abcdefgh")
VOCABULARY = [PAD, EOS, *CHARACTERS]


def write_tiny_tokenizer(folder: Path, characters: Sequence[str] = CHARACTERS) -> None:
    """Save a tokenizer of one token a character, 32 in all, in Hugging Face's files."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate((PAD, EOS, *characters))}, unk_token=PAD)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(folder)


SIZE: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "dtype": "float32",
}


def write_random_model(folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False, experts: int = 0) -> Path:
    """Save a random Qwen3 of dim 96, 3 layers, 4/2 heads with a character tokenizer; returns the folder. With `experts`
    each layer has so many, two for each token."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    size = {**SIZE, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": tie_word_embeddings}
    of_experts: dict[str, Any] = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    if experts:
        return _write_random(lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**size, **of_experts)), folder, seed)
    return _write_random(lambda: Qwen3ForCausalLM(Qwen3Config(**size)), folder, seed)


def write_random_llama(folder: Path, *, seed: int = 0, **changed: Any) -> Path:
    """Save a random Llama 3 of dim 96, 3 layers, 4/2 heads with a character tokenizer; returns the folder. Its rotary
    embedding is scaled as in Llama 3.1."""
    from transformers import LlamaConfig, LlamaForCausalLM

    own: dict[str, Any] = {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    }
    return _write_random(lambda: LlamaForCausalLM(LlamaConfig(**{**SIZE, **own, **changed})), folder, seed)


def write_random_deepseek(folder: Path, *, seed: int = 0, **changed: Any) -> Path:
    """Save a random DeepSeek-V3 of dim 96 with a character tokenizer; returns the folder. Its first layer is dense, the
    other two have 8 experts in 4 groups, two for each token, and a shared one."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    own: dict[str, Any] = {
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 2,
    }
    return _write_random(lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**{**SIZE, **own, **changed})), folder, seed)


def write_random_dots(folder: Path, *, seed: int = 0, **changed: Any) -> Path:
    """Save a random dots.llm1 of dim 96 with a character tokenizer; returns the folder. It is a Qwen3 whose first layer
    is dense; the other two have 8 experts, two for each token, chosen with a bias, and a shared one."""
    from transformers import Dots1Config, Dots1ForCausalLM

    own: dict[str, Any] = {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
    }
    return _write_random(lambda: Dots1ForCausalLM(Dots1Config(**{**SIZE, **own, **changed})), folder, seed)


def write_random_gpt_oss(folder: Path, *, seed: int = 0, **changed: Any) -> Path:
    """Save a random gpt-oss of dim 96 with a character tokenizer; returns the folder. The first and the last of its
    three layers attend to 16 tokens; each has 8 experts, two for each token."""
    from transformers import GptOssConfig, GptOssForCausalLM

    own: dict[str, Any] = {
        "intermediate_size": 64,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "swiglu_limit": 0.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    }
    return _write_random(lambda: GptOssForCausalLM(GptOssConfig(**{**SIZE, **own, **changed})), folder, seed)


def _write_random(build: "Callable[[], PreTrainedModel]", folder: Path, seed: int) -> Path:
    import torch

    torch.manual_seed(seed)
    model = build()
    with torch.no_grad():
        biases = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith("bias"))
        for name, tensor in (*model.named_parameters(), *biases):
            # Larger than the usual start: the logits differ enough for greedy choices to be clear.
            tensor.normal_(mean=1.0, std=0.1) if "norm" in name else tensor.normal_(std=0.12)
    model.save_pretrained(folder)
    write_tiny_tokenizer(folder)
    return folder


def native_tensors(spec: "ModelSpec", folder: str | Path) -> "dict[str, torch.Tensor]":
    """The folder's whole weights, with the names and layout of torchtitan's `named_parameters`."""
    import torch

    from goaly.models.definition import versioned_tensors
    from goaly.models.hf import load_hf

    with torch.device("cpu"):
        model = spec.model.build()
    load_hf(model, spec, folder)
    return {name: tensor.detach() for name, tensor in versioned_tensors(model).items()}


def angles(model: Any) -> int:
    """How many tables of the angles of positions the layers have."""
    buffers = (buffer for name, buffer in model.named_buffers() if name.endswith("rope.cache"))
    return len({getattr(buffer, "_local_tensor", buffer).data_ptr() for buffer in buffers})
