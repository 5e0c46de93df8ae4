"""torchtitan's parameters inside vLLM's own model: models-9, worked out by hand. What vLLM itself loads is in
`tests/characterization/test_vllm_loader.py`."""

import dataclasses

import pytest
import torch

from goaly.base.errors import ConfigError
from goaly.models.families.llama3 import Llama3
from goaly.models.families.qwen3 import Qwen3
from goaly.models.vllm_naming import vllm_naming, without_padding

SHAPE = Qwen3(vocab_size=100, dim=5, hidden_dim=8, layers=1, heads=4, kv_heads=2, head_dim=3, max_context=64)
QKV = "model.layers.0.self_attn.qkv_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


def rows(tp: int, rank: int, name: str) -> list[tuple[int, int, int]]:
    """Of each part: where its rows begin in the published tensor, how many, and where they begin here."""
    return [(part.offset[0], part.shape[0], part.start[0]) for part in vllm_naming(SHAPE, tp=tp, rank=rank)[name]]


def test_heads_of_a_rank_come_from_the_groups_that_torchtitan_has_them_in() -> None:
    """Published, 3 rows each: q0 q1 k0 v0 | q2 q3 k1 v1."""
    assert rows(1, 0, QKV) == [(0, 6, 0), (12, 6, 6), (6, 3, 12), (18, 3, 15), (9, 3, 18), (21, 3, 21)]
    assert rows(2, 1, QKV) == [(12, 6, 0), (18, 3, 6), (21, 3, 9)]
    assert rows(4, 0, QKV) == [(0, 3, 0), (6, 3, 3), (9, 3, 6)]
    assert rows(4, 1, QKV) == [(3, 3, 0), (6, 3, 3), (9, 3, 6)]  # the same key head as rank 0
    assert rows(4, 3, QKV) == [(15, 3, 0), (18, 3, 3), (21, 3, 6)]


def test_a_rank_has_its_rows_of_gate_and_then_of_up() -> None:
    gate_up = vllm_naming(SHAPE, tp=2, rank=1)["model.layers.0.mlp.gate_up_proj.weight"]
    assert [(part.name[-9:], part.offset, part.shape, part.start) for part in gate_up] == [
        ("w1.weight", (4, 0), (4, 5), (0, 0)),
        ("w3.weight", (4, 0), (4, 5), (4, 0)),
    ]


def test_what_pads_the_vocabulary_is_made_of_nothing() -> None:
    """100 rows in 128: 64 on rank 0, 36 on rank 1; or 32, 32, 32 and 4."""
    assert rows(2, 0, EMBEDDING) == [(0, 64, 0)]
    assert rows(2, 1, EMBEDDING) == [(64, 36, 0)]
    assert rows(4, 3, "lm_head.weight") == [(96, 4, 0)]
    assert rows(8, 7, EMBEDDING) == []
    held = {EMBEDDING: torch.zeros(64, 5), "model.norm.weight": torch.zeros(5)}
    filled = without_padding(held, vllm_naming(SHAPE, tp=2, rank=1))
    assert filled[EMBEDDING].shape == (36, 5)
    assert filled[EMBEDDING].data_ptr() == held[EMBEDDING].data_ptr()
    assert filled["model.norm.weight"] is held["model.norm.weight"]


def test_a_tied_head_is_made_of_the_embedding() -> None:
    (part,) = vllm_naming(dataclasses.replace(SHAPE, tied=True))["lm_head.weight"]
    assert part.name == "tok_embeddings.weight"


def test_a_model_whose_rows_vllm_has_in_another_order_is_refused() -> None:
    with pytest.raises(ConfigError, match='engine="native": must be "torchtitan" for a Llama model'):
        vllm_naming(Llama3(**dataclasses.asdict(SHAPE)))
