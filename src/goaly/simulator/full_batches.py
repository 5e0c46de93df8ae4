"""Batches of random tokens for a trainer that is measured alone: rows full of documents, a quarter of a row each."""

import torch
from monarch.actor import Actor, concurrent_endpoint
from tensordict import TensorDict
from torch import Tensor

from goaly.trajectory import PackedRows


class FullBatches(Actor):
    """Stands in for the trajectory queue: batch i has i + 1 microbatches for each rank."""

    def __init__(self, microbatch_rows: int, row_length: int, ranks: int, vocabulary: int):
        self._microbatch_rows = microbatch_rows
        self._row_length = row_length
        self._ranks = ranks
        self._vocabulary = vocabulary

    @concurrent_endpoint
    async def rows(self, batch_id: int, dp_rank: int) -> PackedRows:
        """The rows of a rank."""
        count = (batch_id + 1) * self._microbatch_rows
        return full_rows(count, self._row_length, self._vocabulary, ranks=self._ranks, seed=dp_rank)


def full_rows(count: int, length: int, vocabulary: int, *, ranks: int = 1, seed: int = 0) -> PackedRows:
    """The rows of one of these ranks, which all have as many."""
    generator = torch.Generator().manual_seed(seed)
    document = max(2, length // 4)
    positions = (torch.arange(length) % document).expand(count, length).contiguous()
    return random_rows(positions, max(1, document // 8), vocabulary, generator, ranks=ranks)


def random_rows(
    positions_RL: Tensor,
    prompt: int,
    vocabulary: int,
    generator: torch.Generator,
    *,
    ranks: int = 1,
    sampler_logprob: float = -1.0,
) -> PackedRows:
    """Rows of documents at these positions, whose tokens and advantages are random. All but the first `prompt` tokens
    of a document are trained."""
    trained_RL = positions_RL >= prompt
    columns = {
        "tokens": torch.randint(0, vocabulary, positions_RL.shape, generator=generator),
        "positions": positions_RL,
        "trained": trained_RL,
        "sampler_logprobs": sampler_logprob * trained_RL,
        "sampler_versions": torch.where(trained_RL, 0, -1).int(),
        "rewards": torch.zeros(positions_RL.shape),
        "advantages": torch.randn(positions_RL.shape, generator=generator) * trained_RL,
    }
    return PackedRows(
        rows=TensorDict(columns, batch_size=positions_RL.shape),
        batch_trained_tokens=int(trained_RL.sum()) * ranks,
        batch_sequences=int((positions_RL == 0).sum()) * ranks,
    )
