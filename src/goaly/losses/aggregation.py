"""From a value a token to one number a batch: a weight for each token, and one denominator. Pure.

    token_mean     sum over tokens / trained tokens
    sequence_mean  sum over sequences of (mean over its tokens) / sequences
    sequence_sum   sum over sequences of (sum over its tokens / a constant length) / sequences

The denominator counts the global batch and is known before the forward pass, so a microbatch adds its weighted sum and
nothing else: no mean is ever taken over a microbatch, a row or a rank.

Invariants
    AG-1  The aggregate is the same on any packing, any microbatches and any number of ranks.
"""

from typing import Literal

import torch

from goaly.losses.segments import sequence_count, sequence_sum

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]


def token_weights(
    aggregation: Aggregation, documents_P: torch.Tensor, counted_P: torch.Tensor, constant_length: int | None
) -> torch.Tensor:
    """What each token's value is multiplied by (f32); `counted_P` says which tokens make a sequence's length."""
    if aggregation == "sequence_mean":
        return 1 / sequence_sum(counted_P.float(), documents_P).clamp(min=1)
    if aggregation == "sequence_sum":
        assert constant_length is not None, "settings without it are refused"
        return torch.full_like(documents_P, 1 / constant_length, dtype=torch.float32)
    return torch.ones_like(documents_P, dtype=torch.float32)


def denominator(aggregation: Aggregation, trained_tokens: int, sequences: int) -> int:
    """What a whole batch's weighted sum is divided by."""
    return trained_tokens if aggregation == "token_mean" else sequences


def counted(aggregation: Aggregation, documents_P: torch.Tensor, counted_P: torch.Tensor) -> torch.Tensor:
    """What these tokens add to the denominator when only `counted_P` of them, and sequences with one, count."""
    return counted_P.sum() if aggregation == "token_mean" else sequence_count(documents_P[counted_P])
