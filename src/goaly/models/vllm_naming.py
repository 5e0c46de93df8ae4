"""The mapping from torchtitan's parameters to those of vLLM's own model, which fuses and shards them differently.

vLLM's `qkv_proj` has a rank's query heads, then its key heads, then its value heads. torchtitan's `wqkv` is ordered by
key head: the query heads that share it, the key head, the value head. `gate_up_proj` has the rank's rows of both. With
more ranks than key heads, several ranks hold the same one. The padding of the vocabulary is not filled.

Invariants
    models-9: Every parameter of vLLM's model is in the mapping, with the content that vLLM's own loader would read from
    the same weights in Hugging Face's format. Padding of the vocabulary has no source.
"""

from collections.abc import Iterator, Mapping
from itertools import accumulate

import torch

from goaly.base.errors import ConfigError
from goaly.models.architecture import Architecture
from goaly.weights.layout import Extent, Part
from goaly.weights.naming import Naming, Parts, same

VOCABULARY_MULTIPLE = 64
"""vLLM pads the embedding to a multiple of this many rows before sharding."""

Rows = tuple[int, int]
"""The first row in the published tensor, and the number of rows."""


def vllm_naming(shape: Architecture, *, tp: int = 1, rank: int = 0) -> Naming:
    """The sources of each parameter of vLLM's own model, on this rank of `tp`; for Qwen3 only."""
    if shape.experts or not shape.has_vllm_naming:
        what, how = ("model with experts", "stacks") if shape.experts else ("Llama model", "orders its rows")
        why = f"because vLLM {how} differently"
        raise ConfigError([f'generator.engine="native": must be "torchtitan" for a {what}, {why}'])
    naming = {"model.norm.weight": same("norm.weight", (shape.dim,))}
    padded = -(-shape.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    begin = min(rank * padded // tp, shape.vocab_size)
    rows = (begin, min(padded // tp, shape.vocab_size - begin))
    head = "tok_embeddings" if shape.tied else "lm_head"  # vLLM has a separate head if the folder does
    for name, published in (("model.embed_tokens", "tok_embeddings"), ("lm_head", head)):
        naming[f"{name}.weight"] = _rows(f"{published}.weight", (shape.vocab_size, shape.dim), [rows])
    for layer in range(shape.layers):
        for name, parts in _layer(shape, f"layers.{layer}.", tp, rank):
            naming[f"model.layers.{layer}.{name}.weight"] = parts
    return naming


def without_padding(parameters: Mapping[str, torch.Tensor], naming: Naming) -> dict[str, torch.Tensor]:
    """The parameters of vLLM's model, without padding rows."""
    rows = {name: max((part.start[0] + part.shape[0] for part in parts), default=0) for name, parts in naming.items()}
    return {
        name: parameter if rows[name] == len(parameter) else parameter.detach()[: rows[name]]
        for name, parameter in parameters.items()
    }


def _layer(shape: Architecture, ours: str, tp: int, rank: int) -> Iterator[tuple[str, Parts]]:
    dim, hidden, head = shape.dim, shape.hidden_dim, shape.head_dim
    mine = (rank * hidden // tp, hidden // tp)
    wqkv = (shape.heads + 2 * shape.kv_heads) * head
    yield "self_attn.qkv_proj", _rows(f"{ours}attention.qkv_linear.wqkv.weight", (wqkv, dim), _heads(shape, tp, rank))
    heads = (rank * shape.heads // tp * head, shape.heads // tp * head)
    yield "self_attn.o_proj", _columns(f"{ours}attention.wo.weight", (dim, shape.heads * head), heads)
    yield "self_attn.q_norm", same(f"{ours}attention.q_norm.weight", (head,))
    yield "self_attn.k_norm", same(f"{ours}attention.k_norm.weight", (head,))
    yield (
        "mlp.gate_up_proj",
        _rows(f"{ours}feed_forward.w1.weight", (hidden, dim), [mine])
        + _rows(f"{ours}feed_forward.w3.weight", (hidden, dim), [mine], start=mine[1]),
    )
    yield "mlp.down_proj", _columns(f"{ours}feed_forward.w2.weight", (dim, hidden), mine)
    yield "input_layernorm", same(f"{ours}attention_norm.weight", (dim,))
    yield "post_attention_layernorm", same(f"{ours}ffn_norm.weight", (dim,))


def _heads(shape: Architecture, tp: int, rank: int) -> list[Rows]:
    """The rows of `wqkv` in the order of the rank's `qkv_proj`."""
    sharing = shape.heads // shape.kv_heads
    group = (sharing + 2) * shape.head_dim
    first, count = rank * shape.heads // tp, shape.heads // tp
    first_kv, kv_count = rank * shape.kv_heads // tp, max(1, shape.kv_heads // tp)
    queries = [
        (kv * group + (begin - kv * sharing) * shape.head_dim, (end - begin) * shape.head_dim)
        for kv in range(first_kv, first_kv + kv_count)
        for begin, end in [(max(first, kv * sharing), min(first + count, (kv + 1) * sharing))]
    ]
    keys_and_values = [
        (kv * group + (sharing + which) * shape.head_dim, shape.head_dim)
        for which in (0, 1)
        for kv in range(first_kv, first_kv + kv_count)
    ]
    return queries + keys_and_values


def _rows(name: str, global_shape: Extent, stretches: list[Rows], *, start: int = 0) -> Parts:
    """These row ranges of the tensor, one after another from row `start` on."""
    starts = accumulate((length for _, length in stretches), initial=start)
    return tuple(
        Part(name=name, global_shape=global_shape, offset=(begin, 0), shape=(length, global_shape[1]), start=(at, 0))
        for (begin, length), at in zip(stretches, starts, strict=False)
        if length
    )


def _columns(name: str, global_shape: Extent, columns: Rows) -> Parts:
    begin, length = columns
    shape = (global_shape[0], length)
    return (Part(name=name, global_shape=global_shape, offset=(0, begin), shape=shape, start=(0, 0)),)
