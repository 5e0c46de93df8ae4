"""Packed attention with sinks and windows, against a plain softmax over each document."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torchtitan.models.gpt_oss.model import apply_attention_sink_rescale

from goaly.models.attention import PackedAttention, PackedDocuments

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


@pytest.mark.parametrize("window", [0, 1, 16, 280])
def test_outputs_and_gradients_are_those_of_a_plain_softmax_over_the_window_and_the_sink(window: int):  # SA-1
    generator = torch.Generator().manual_seed(window)
    tokens = sum(LENGTHS)
    shapes = [(tokens, HEADS, WIDTH), (tokens, KEY_HEADS, WIDTH), (tokens, KEY_HEADS, WIDTH), (HEADS,)]
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    weights = torch.randn(shapes[0], generator=generator)
    q, k, v, sinks = leaves
    expected = plain(q, k, v, sinks, window)
    wanted = torch.autograd.grad((expected * weights).sum(), leaves)

    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    attention = PackedAttention.Config(window_size=(window - 1, 0)).build()
    found = attention(
        q[None],
        k[None],
        v[None],
        attention_masks=PackedDocuments.of(positions),
        scale=SCALE,
        out_transform=lambda out, sums: apply_attention_sink_rescale(out, sums, sinks),
    )[0]
    assert_close(found, expected, atol=2e-6, rtol=1e-5)
    for one, other in zip(torch.autograd.grad((found * weights).sum(), leaves), wanted, strict=True):
        assert_close(one, other, atol=1e-5 * other.abs().max().item(), rtol=1e-4)
