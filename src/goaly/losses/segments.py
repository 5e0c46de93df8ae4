"""Sums over the sequences of a microbatch, seen from each of their tokens. Pure.

Tokens of one sequence stand next to each other and carry the same number (`documents_P`, ascending). Sums go through
`segment_reduce`, which adds a sequence's tokens in their order: the same on any packing, and the same every time.
"""

import torch


def sequence_sum(values_P: torch.Tensor, documents_P: torch.Tensor) -> torch.Tensor:
    """For each token the sum over its whole sequence; differentiable."""
    if not len(values_P):
        return values_P
    lengths_D = torch.bincount(documents_P)
    sums_D = torch.segment_reduce(values_P, "sum", lengths=lengths_D, initial=0.0, unsafe=True)
    return sums_D[documents_P]


def sequence_lengths(documents_P: torch.Tensor) -> torch.Tensor:
    """For each token the number of trained tokens in its sequence."""
    return torch.bincount(documents_P)[documents_P]


def sequence_mean(values_P: torch.Tensor, documents_P: torch.Tensor) -> torch.Tensor:
    """For each token the mean over the trained tokens of its sequence; differentiable."""
    return sequence_sum(values_P, documents_P) / sequence_lengths(documents_P)


def sequence_count(documents_P: torch.Tensor) -> torch.Tensor:
    """How many sequences these tokens belong to."""
    return (torch.bincount(documents_P) > 0).sum()
