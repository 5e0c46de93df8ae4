"""Trajectories and groups for the tests of every stage."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from goaly.trajectory import Group, Outcome, Trajectory, Turn, token_data


def sampled(
    length: int,
    *,
    index: int = 0,
    reward: float = 0.0,
    version: int = 0,
    tokens: Sequence[int] | None = None,
    prompt_id: str = "p",
) -> Trajectory:
    """A trajectory of one prompt token and `length - 1` tokens of the policy, sampled by this version."""
    written = torch.arange(length) > 0
    columns = {
        "tokens": torch.arange(length) + 10 if tokens is None else torch.tensor(tokens),
        "trained": written,
        "sampler_logprobs": torch.where(written, -0.5, 0.0),
        "sampler_versions": torch.where(written, version, -1).int(),
        "rewards": torch.where(torch.arange(length) == length - 1, reward, 0.0),
    }
    return Trajectory(
        tokens=token_data(columns),
        prompt_id=prompt_id,
        sample_index=index,
        turns=(Turn(author="prompt", start=0, stop=1), Turn(author="policy", start=1, stop=length)),
        environment="",
        outcome=Outcome.COMPLETE,
    )


def grouped(ticket: int, samples: Sequence[Trajectory], *, source: str = "test") -> Group:
    """The group of this ticket."""
    numbered = tuple(replace(sample, sample_index=index) for index, sample in enumerate(samples))
    return Group(ticket=ticket, prompt_id=f"p{ticket}", source=source, samples=numbered)
