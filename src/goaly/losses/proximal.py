"""The proximal policy: the one from which a step may not go far. Pure.

A ratio that is clipped is current / proximal; the rest of the way to the policy that drew the tokens, proximal /
sampler, is an importance weight (`corrections.py`). Their product is current / sampler whatever is chosen here.

    sampler       proximal = sampler. The weight is 1: PPO, GRPO.
    trainer       proximal = the trainer's weights before the batch. At a batch's first optimizer step these are the
                  current weights, and their log-probs are at hand without another forward pass: the ratio is 1, and
                  only its gradient counts. For the steps that follow they have to be computed before the first.
    interpolated  between the two on the logarithmic scale, by the token's age a (A-3PO, arXiv:2512.06547):
                  log proximal = log sampler + a / (a + 1) * (log current - log sampler)
                  A token of age 0 has the sampler, an old one nearly the trainer.
"""

from typing import Literal

import torch

Proximal = Literal["sampler", "trainer", "interpolated"]


def proximal_logprobs(
    kind: Proximal,
    current_P: torch.Tensor,
    sampler_P: torch.Tensor,
    ages_P: torch.Tensor,
    before_P: torch.Tensor | None = None,
) -> torch.Tensor:
    """The proximal policy's log-probs, without gradient; `before_P` are the trainer's before the batch, None where
    these are the current ones."""
    current_P = current_P.detach()
    if kind == "sampler":
        return sampler_P
    if kind == "trainer":
        return current_P if before_P is None else before_P
    ages_P = ages_P.to(current_P.dtype)
    return sampler_P + ages_P / (ages_P + 1) * (current_P - sampler_P)
