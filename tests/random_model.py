"""A tiny model of random weights and its tokenizer, as Hugging Face writes them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torchtitan.protocols.model_spec import ModelSpec

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = list("0123456789+-*=|,.:;?! abcdefgh")
VOCABULARY = [PAD, EOS, *CHARACTERS]


def write_tiny_tokenizer(folder: Path) -> None:
    """Save a tokenizer of one token a character, 32 in all, in Hugging Face's files."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(folder)


def write_random_model(folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False, experts: int = 0) -> Path:
    """Save a random Qwen3 of dim 96, 3 layers, 4/2 heads with a character tokenizer; returns the folder. With `experts`
    each layer has so many, two for each token."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    size: dict[str, Any] = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    of_experts: dict[str, Any] = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    torch.manual_seed(seed)
    model: Any = (
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**size, **of_experts)) if experts else Qwen3ForCausalLM(Qwen3Config(**size))
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Larger than the usual start: the logits differ enough for greedy choices to be clear.
            parameter.normal_(mean=1.0, std=0.1) if "norm" in name else parameter.normal_(std=0.12)
    model.save_pretrained(folder)
    write_tiny_tokenizer(folder)
    return folder


def native_tensors(spec: "ModelSpec", folder: str | Path) -> "dict[str, torch.Tensor]":
    """The folder's whole weights, with the names and layout of torchtitan's `named_parameters`."""
    import torch

    from goaly.models.hf import load_hf

    with torch.device("cpu"):
        model = spec.model.build()
    load_hf(model, spec, folder)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
