"""Stand-ins on a CPU for torch's operations of variable-length attention on GPUs.

Shape suffixes: Q queries of all documents, S their keys, N query heads, K key heads, H head dim.
"""

from typing import Any

import torch


def kernel(
    q_QNH: torch.Tensor,
    k_SKH: torch.Tensor,
    v_SKH: torch.Tensor,
    ends_q: torch.Tensor,
    ends_k: torch.Tensor,
    most_q: int,
    most_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
    num_splits: int | None = None,
) -> torch.Tensor:
    """The output of `varlen_attn`, over all tokens of a document."""
    assert window_size == (-1, 0)
    assert enable_gqa == (q_QNH.shape[1] != k_SKH.shape[1])
    ends = (ends_q, ends_k, most_q, most_k)
    return kernel_with_sums(q_QNH, k_SKH, v_SKH, *ends, True, scale, [*window_size])[0].to(q_QNH.dtype)


def kernel_with_sums(
    q_QNH: torch.Tensor,
    k_SKH: torch.Tensor,
    v_SKH: torch.Tensor,
    ends_q: torch.Tensor,
    ends_k: torch.Tensor,
    most_q: int,
    most_k: int,
    causal: bool,
    scale: float,
    window: list[int],
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output of `torch_attn::_varlen_attn`, the logs of its sums, and a state."""
    assert (ends_q.dtype, ends_k.dtype, causal) == (torch.int32, torch.int32, window == [-1, 0])
    assert (int(ends_q.diff().max()), int(ends_k.diff().max())) == (most_q, most_k)
    scores_NQS = _scores(q_QNH, k_SKH, ends_q, ends_k, scale, window)
    out_QNH = torch.einsum("nqs,snh->qnh", scores_NQS.softmax(-1), _for_queries(v_SKH, q_QNH))
    return out_QNH, scores_NQS.logsumexp(-1), torch.zeros(2)


def kernel_gradients(
    grad_QNH: torch.Tensor,
    q_QNH: torch.Tensor,
    k_SKH: torch.Tensor,
    v_SKH: torch.Tensor,
    out_QNH: torch.Tensor,
    sums_NQ: torch.Tensor,
    ends_q: torch.Tensor,
    ends_k: torch.Tensor,
    *options: Any,
) -> list[torch.Tensor]:
    """The results of `torch_attn::_varlen_attn_backward`: weights are those of the sums, and their mean is taken from
    the output."""
    scale, window = options[-2:]
    grad_QNH = grad_QNH.float()
    weights_NQS = (_scores(q_QNH, k_SKH, ends_q, ends_k, scale, window) - sums_NQ[..., None]).exp()
    of_weights_NQS = torch.einsum("qnh,snh->nqs", grad_QNH, _for_queries(v_SKH, q_QNH))
    along_NQ1 = (grad_QNH * out_QNH.float()).sum(-1).T[..., None]
    of_scores_NQS = weights_NQS * (of_weights_NQS - along_NQ1) * scale
    found_q = torch.einsum("nqs,snh->qnh", of_scores_NQS, _for_queries(k_SKH, q_QNH))
    of_heads = (
        torch.einsum("nqs,qnh->snh", of_scores_NQS, q_QNH.float()),
        torch.einsum("nqs,qnh->snh", weights_NQS, grad_QNH),
    )
    found_k, found_v = (one.unflatten(1, (k_SKH.shape[1], -1)).sum(2) for one in of_heads)
    return [one.to(q_QNH.dtype) for one in (found_q, found_k, found_v)]


def _scores(
    q_QNH: torch.Tensor, k_SKH: torch.Tensor, ends_q: torch.Tensor, ends_k: torch.Tensor, scale: float, window: Any
) -> torch.Tensor:
    """-inf where a query does not look: a document's last query is of its last key."""
    of_documents = []
    for queries, keys in zip(ends_q.diff().tolist(), ends_k.diff().tolist(), strict=True):
        before = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        of_documents.append((before >= 0) & ((before <= window[0]) | (window[0] < 0)))
    seen_QS = torch.block_diag(*of_documents).bool()
    scores_NQS = torch.einsum("qnh,snh->nqs", q_QNH.float(), _for_queries(k_SKH, q_QNH)) * scale
    return scores_NQS.masked_fill(~seen_QS, float("-inf"))


def _for_queries(k_SKH: torch.Tensor, q_QNH: torch.Tensor) -> torch.Tensor:
    """Each query head's own."""
    return k_SKH.float().repeat_interleave(q_QNH.shape[1] // k_SKH.shape[1], 1)
