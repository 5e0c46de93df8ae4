"""Batches of random tokens for a trainer that is measured alone: rows full of documents, a quarter of a row each."""

import torch
from monarch.actor import Actor, concurrent_endpoint
from tensordict import TensorDict

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
    trained = positions >= max(1, document // 8)
    columns = {
        "tokens": torch.randint(0, vocabulary, positions.shape, generator=generator),
        "positions": positions,
        "trained": trained,
        "sampler_logprobs": -1.0 * trained,
        "sampler_versions": torch.where(trained, 0, -1).int(),
        "rewards": torch.zeros(positions.shape),
        "advantages": torch.randn(positions.shape, generator=generator) * trained,
    }
    return PackedRows(
        rows=TensorDict(columns, batch_size=positions.shape),
        batch_trained_tokens=int(trained.sum()) * ranks,
        batch_sequences=int((positions == 0).sum()) * ranks,
    )
