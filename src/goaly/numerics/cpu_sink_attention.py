"""Attention with sinks, and over the last tokens only, for documents of one length on the CPU.

A sink is a learned score of a head that takes a share of each token's attention and adds nothing to the output. The
output without it and the log of the sum of exponentiated scores are enough to add it.

Scores are computed for a block of queries at a time, with the keys that these see, and again in the backward pass.

Shape suffixes: B rows, L tokens of a row, N query heads, M = documents * key heads, G query heads of a key head,
C the length, Q its last tokens that attend, H head dim, V that of values, q queries of a block, k keys that they see.

A token attends to itself and the `window - 1` tokens before it in its document; to all of them if `window` is 0.
Queries are the last tokens of a document, all of them or fewer.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

QUERIES = 256
"""Queries of a block: short documents are one."""


class SinkAttention(torch.autograd.Function):
    """The output `[M, G, Q, V]` of causal attention over a window, and the log of each token's sum `[M, G, Q]`."""

    @staticmethod
    def forward(
        ctx: Any, q_MGQH: Tensor, k_MCH: Tensor, v_MCV: Tensor, scale: float, window: int
    ) -> tuple[Tensor, Tensor]:
        out_MGQV = q_MGQH.new_empty(*q_MGQH.shape[:3], v_MCV.shape[-1])
        sums_MGQ = q_MGQH.new_empty(q_MGQH.shape[:3], dtype=torch.float32)
        for queries, keys in _blocks(q_MGQH.shape[2], k_MCH.shape[1], window):
            scores_MGqk = _scores(q_MGQH[:, :, queries], k_MCH[:, keys], scale, _mask(queries, keys, window))
            sums_MGq = scores_MGqk.logsumexp(-1)
            weights_MGqk = scores_MGqk.sub_(sums_MGq[..., None]).exp_().to(v_MCV.dtype)
            out_MGQV[:, :, queries] = _times(weights_MGqk, v_MCV[:, keys])
            sums_MGQ[:, :, queries] = sums_MGq
        ctx.save_for_backward(q_MGQH, k_MCH, v_MCV, out_MGQV, sums_MGQ)
        ctx.scale, ctx.window = scale, window
        return out_MGQV, sums_MGQ

    @staticmethod
    def backward(ctx: Any, grad_MGQV: Tensor, grad_sums_MGQ: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_MGQH, k_MCH, v_MCV, out_MGQV, sums_MGQ = ctx.saved_tensors
        found_q, found_k, found_v = torch.empty_like(q_MGQH), torch.zeros_like(k_MCH), torch.zeros_like(v_MCV)
        along_MGQ = (grad_MGQV * out_MGQV).sum(-1, dtype=torch.float32) - grad_sums_MGQ
        for queries, keys in _blocks(q_MGQH.shape[2], k_MCH.shape[1], ctx.window):
            q_MGqH, k_MkH, grad_MGqV = q_MGQH[:, :, queries], k_MCH[:, keys], grad_MGQV[:, :, queries]
            scores_MGqk = _scores(q_MGqH, k_MkH, ctx.scale, _mask(queries, keys, ctx.window))
            weights_MGqk = scores_MGqk.sub_(sums_MGQ[:, :, queries, None]).exp_()
            found_v[:, keys] += _transposed_times(weights_MGqk.to(v_MCV.dtype), grad_MGqV)
            grad_MGqk = _times(grad_MGqV, v_MCV[:, keys].transpose(1, 2)).float()
            grad_MGqk.sub_(along_MGQ[:, :, queries, None]).mul_(weights_MGqk).mul_(ctx.scale)
            of_scores_MGqk = grad_MGqk.to(k_MCH.dtype)
            found_q[:, :, queries] = _times(of_scores_MGqk, k_MkH)
            found_k[:, keys] += _transposed_times(of_scores_MGqk, q_MGqH)
        return found_q, found_k, found_v, None, None


def with_sinks(out_BLNV: Tensor, sums_BLN: Tensor, sinks_N: Tensor) -> Tensor:
    """The output with each head's sink, of the output without and the log of the sums."""
    return out_BLNV * torch.sigmoid(sums_BLN - sinks_N)[..., None].to(out_BLNV.dtype)


def _blocks(count: int, length: int, window: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, each with the keys that any of them sees."""
    earlier = length - count
    for begin in range(0, count, QUERIES):
        end = min(begin + QUERIES, count)
        yield slice(begin, end), slice(max(0, earlier + begin - window + 1) if window else 0, earlier + end)


def _mask(queries: slice, keys: slice, window: int) -> Tensor:
    """Which queries do not see which keys."""
    own = keys.stop - (queries.stop - queries.start)
    before_qk = torch.arange(own, keys.stop)[:, None] - torch.arange(keys.start, keys.stop)
    hidden_qk = before_qk < 0
    return hidden_qk | (before_qk >= window) if window else hidden_qk


def _scores(q_MGqH: Tensor, k_MkH: Tensor, scale: float, mask_qk: Tensor) -> Tensor:
    return _times(q_MGqH, k_MkH.transpose(1, 2)).float().mul_(scale).masked_fill_(mask_qk, float("-inf"))


def _times(left_MGqX: Tensor, right_MXY: Tensor) -> Tensor:
    """Matrix products in which all query heads of a key head are one matrix."""
    product = torch.bmm(left_MGqX.flatten(1, 2), right_MXY)
    return product.view(*left_MGqX.shape[:3], right_MXY.shape[-1])


def _transposed_times(left_MGqX: Tensor, right_MGqY: Tensor) -> Tensor:
    """The sum over queries and the query heads of a key head."""
    return torch.bmm(left_MGqX.flatten(1, 2).transpose(1, 2), right_MGqY.flatten(1, 2))
