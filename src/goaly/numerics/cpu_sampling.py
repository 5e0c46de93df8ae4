"""Sampling by vLLM's model runner on a CPU, with two changes.

vLLM draws a token for each request of a step, and drops that of a prompt of which only a part is computed. On a GPU it
then sets the request's generator back by one draw, but a CPU's generator has no such operation. Here such a request
draws without its generator.

So a request with a seed gets the same draws, in however many steps its prompt is computed.
"""

from typing import Any

import numpy as np
import torch
from vllm.v1.sample import sampler


def adapt_sampling(runner: Any) -> None:
    """Change how this model runner of vLLM's samples."""
    sampler.batched_count_greater_than = _rank_of_sample  # vLLM would spend seconds on compiling its own
    sample = runner.sample_tokens

    def sample_tokens(grammars: Any) -> Any:
        batch = runner.input_batch
        dropped = np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs]).tolist()
        unused = {row: batch.generators.pop(row) for row in dropped if row in batch.generators}
        try:
            return sample(grammars)
        finally:
            batch.generators.update(unused)

    runner.sample_tokens = sample_tokens


def _rank_of_sample(logprobs_TV: torch.Tensor, sampled_T1: torch.Tensor) -> torch.Tensor:
    return (logprobs_TV >= sampled_T1).sum(-1)
