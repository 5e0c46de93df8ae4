"""Writes a tiny Qwen3, dense or with experts, as a Hugging Face folder with its own tokenizer of characters.

With shared experts its format is that of dots.llm1, which is Qwen3 with these and with a bias that chooses experts.

    config.json  generation_config.json  tokenizer.json  tokenizer_config.json  model.safetensors

Nothing is downloaded. The folder loads in plain transformers. Its weights are random, from the given seed.
"""

import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, MultipleOf

from goaly.base.config.settings import NonNegativeInt, PositiveInt, Section, Settings
from goaly.models.settings import EXPERT_MULTIPLE

if TYPE_CHECKING:
    import torch

SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|unknown|>")
PAD, END, SYSTEM, USER, ASSISTANT, UNKNOWN = SPECIAL
CHARACTERS = "0123456789+-*/=|,:.?()<> \n"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TOOL_SPECIAL = ("<|tool|>", "<tool_call>", "</tool_call>")
TOOL_CHARACTERS = '{}[]"_' + string.ascii_lowercase
TOOL_CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|system|>' }}"
    "{% for tool in tools %}{{ tool['function']['name'] + ('' if loop.last else ',') }}{% endfor %}"
    "{{ '<|end|>' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson }}{{ '}</tool_call>' }}"
    "{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Hermes's form of calls, in few tokens: of the tools it renders only the names."""


class TinyModel(Settings):
    """The size of a tiny Qwen3."""

    dim: PositiveInt = 96
    """Width of the residual stream."""
    layers: PositiveInt = 3
    """Transformer blocks."""
    heads: PositiveInt = 4
    """Attention heads."""
    kv_heads: PositiveInt = 2
    """Key-value heads, shared among the attention heads."""
    head_dim: Annotated[int, Ge(8), MultipleOf(8)] = 32
    """Width of a head."""
    hidden_dim: PositiveInt = 256
    """Width inside the feed-forward network, or inside an expert."""
    experts: NonNegativeInt = 0
    """Experts of each layer; 0 is a dense model."""
    experts_per_token: PositiveInt = 2
    """Experts that compute each token."""
    shared_experts: NonNegativeInt = 0
    """Further experts, as one, that compute every token. With them the others are chosen by a bias, too, which
    `trainer.expert_bias_rate` moves; without them `trainer.expert_balance` spreads the tokens."""
    max_context: PositiveInt = 512
    """Most tokens of a sequence."""
    rope_theta: float = 10_000.0
    """Base of the rotary position embedding."""
    tied: bool = False
    """Use the embedding as the output layer too."""
    characters: str = CHARACTERS
    """The characters that its tokenizer knows; all others are one unknown token."""
    tools: bool = False
    """Give it a chat template for tools, with Hermes's form of calls (`chat.tool_parser=hermes`), and what calls are
    written with: special tokens, small letters, quotes and brackets."""
    seed: int = 0
    """Seeds the random weights."""

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Its tokens, of which the special ones come first."""
        added = [one for one in TOOL_CHARACTERS if one not in self.characters] if self.tools else []
        return (*self.special, *self.characters, *added)

    @property
    def special(self) -> tuple[str, ...]:
        """Its special tokens."""
        return SPECIAL + (TOOL_SPECIAL if self.tools else ())

    def _problems(self, at: Section) -> Iterator[str]:
        if self.heads % self.kv_heads:
            yield f"{at.heads}: must be a multiple of {at.kv_heads}"
        if self.experts and (self.dim % EXPERT_MULTIPLE or self.hidden_dim % EXPERT_MULTIPLE):
            yield f"{at.dim}, {at.hidden_dim}: must be multiples of {EXPERT_MULTIPLE} in a model with experts"
        if self.experts and self.experts_per_token > self.experts:
            yield f"{at.experts_per_token}: must be at most {at.experts}"
        if not self.experts:
            yield from at.idle("the model has no experts", "experts_per_token", "shared_experts")


def write_tiny_model(folder: str | Path, size: TinyModel | None = None) -> Path:
    """Write the tiny model's folder, with random weights."""
    from safetensors.torch import save_file

    size = size or TinyModel()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_tiny_tokenizer(folder, size)
    _write_json(folder / "config.json", model_config(size))
    _write_json(
        folder / "generation_config.json", {"eos_token_id": SPECIAL.index(END), "pad_token_id": SPECIAL.index(PAD)}
    )
    save_file(_weights(size), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_tiny_tokenizer(folder: str | Path, size: TinyModel | None = None) -> None:
    """Write a tokenizer with one token for each character, and the chat's special tokens and template."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import BPE

    size = size or TinyModel()
    vocabulary = {text: index for index, text in enumerate(size.vocabulary)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in size.special])
    tokenizer.save(str(Path(folder) / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "chat_template": TOOL_CHAT_TEMPLATE if size.tools else CHAT_TEMPLATE,
    }
    _write_json(Path(folder) / "tokenizer_config.json", config)


def model_config(size: TinyModel) -> dict[str, Any]:
    """The content of its `config.json`."""
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": size.hidden_dim,
        "num_experts": size.experts,
        "num_experts_per_tok": size.experts_per_token,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    if size.shared_experts:
        experts = {
            "architectures": ["Dots1ForCausalLM"],
            "model_type": "dots1",
            "moe_intermediate_size": size.hidden_dim,
            "n_routed_experts": size.experts,
            "n_shared_experts": size.shared_experts,
            "num_experts_per_tok": size.experts_per_token,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "sliding_window": None,
        }
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(size.vocabulary),
        "hidden_size": size.dim,
        "intermediate_size": size.hidden_dim,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": size.max_context,
        "rms_norm_eps": 1e-6,
        "rope_theta": size.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": size.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": size.tied,
        "bos_token_id": None,
        "eos_token_id": SPECIAL.index(END),
        "pad_token_id": SPECIAL.index(PAD),
        "torch_dtype": "float32",
        "use_cache": True,
        **(experts if size.experts else {}),
    }


def _weights(size: TinyModel) -> "dict[str, torch.Tensor]":
    import torch

    from goaly.models.families import architecture

    generator = torch.Generator().manual_seed(size.seed)

    def drawn(name: str, shape: tuple[int, ...]) -> "torch.Tensor":
        if len(shape) > 1:
            return torch.randn(shape, generator=generator) * 0.02
        return torch.zeros(shape) if name.endswith("_bias") else torch.ones(shape)

    return {name: drawn(name, shape) for name, shape in architecture(model_config(size)).folder_shapes()}


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
