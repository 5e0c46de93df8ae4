"""Packed attention with sinks and windows, against a plain softmax over each document."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torchtitan.models.common.attention import create_varlen_metadata_for_document

from goaly.models import attention as gpu_attention
from goaly.numerics.cpu_attention import PackedAttention, PackedDocuments
from tests.unit.models.varlen_kernel import kernel_gradients, kernel_with_sums

LENGTHS = [5, 600, 1, 256, 47, 300]
HEADS, KEY_HEADS, WIDTH, SCALE = 4, 2, 8, 0.4


def plain(q_LNH: torch.Tensor, k_LKH: torch.Tensor, v_LKH: torch.Tensor, sinks_N: torch.Tensor, window: int) -> Any:
    """Each document's attention by the definition: a softmax over the scores that are seen, and the sink."""
    outs = []
    for q, k, v in zip(*(one.split(LENGTHS) for one in (q_LNH, k_LKH, v_LKH)), strict=True):
        k, v = (one.repeat_interleave(HEADS // KEY_HEADS, 1) for one in (k, v))
        scores_NLL = torch.einsum("qnh,knh->nqk", q, k) * SCALE
        places = torch.arange(len(q))
        before = places[:, None] - places
        seen = (before >= 0) & (before < (window or len(q)))
        scores_NLL = scores_NLL.masked_fill(~seen, float("-inf"))
        sink_NL1 = sinks_N[:, None, None].expand(-1, len(q), 1)
        weights = torch.cat([scores_NLL, sink_NL1], -1).softmax(-1)[..., :-1]
        outs.append(torch.einsum("nqk,knh->qnh", weights, v))
    return torch.cat(outs)


def drawn(seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Queries, keys, values and sinks; and the gradient of the output."""
    generator, tokens = torch.Generator().manual_seed(seed), sum(LENGTHS)
    shapes = [(tokens, HEADS, WIDTH), (tokens, KEY_HEADS, WIDTH), (tokens, KEY_HEADS, WIDTH), (HEADS,)]
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    return leaves, torch.randn(shapes[0], generator=generator)


@pytest.mark.parametrize("window", [0, 1, 16, 280])
def test_outputs_and_gradients_are_those_of_a_plain_softmax_over_the_window_and_the_sink(window: int):
    leaves, grad = drawn(window)
    q, k, v, sinks = leaves
    expected = plain(q, k, v, sinks, window)
    wanted = torch.autograd.grad(expected, leaves, grad)
    documents = PackedDocuments.of(torch.cat([torch.arange(length) for length in LENGTHS])[None])
    attention = PackedAttention.Config(window_size=(window - 1, 0)).build()
    found = attention(q[None], k[None], v[None], attention_masks=documents, scale=SCALE, sinks_N=sinks)[0]
    assert_close(found, expected, atol=2e-6, rtol=1e-5)
    for one, other in zip(torch.autograd.grad(found, leaves, grad), wanted, strict=True):
        assert_close(one, other, atol=1e-5 * other.abs().max().item(), rtol=1e-4)


@pytest.mark.parametrize("window", [0, 16])
def test_the_attention_of_gpus_has_the_gradients_of_its_sinks(window: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_attention, "_kernel", kernel_with_sums)
    monkeypatch.setattr(gpu_attention, "_kernel_gradients", kernel_gradients)
    leaves, grad = drawn(window)
    q, k, v, sinks = leaves
    expected = plain(q, k, v, sinks, window)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    documents = create_varlen_metadata_for_document(positions)
    found = gpu_attention.VarlenWithSinks.apply(q, k, v, sinks, documents, SCALE, (window - 1, 0))
    assert_close(found, expected, atol=2e-6, rtol=1e-5)
    wanted = torch.autograd.grad(expected, leaves, grad)
    for one, other in zip(torch.autograd.grad(found, leaves, grad), wanted, strict=True):
        assert_close(one, other, atol=1e-5 * other.abs().max().item(), rtol=1e-4)
    attention = gpu_attention.SinkVarlenAttention.Config(window_size=(window - 1, 0)).build()
    rounded = attention(q[None], k[None], v[None], attention_masks=documents, scale=SCALE, sinks_N=sinks)[0]
    assert_close(rounded, expected, atol=0.05, rtol=0.05)  # in bfloat16
