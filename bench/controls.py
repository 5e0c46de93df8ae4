"""Advantages that must not teach: the negative controls of `bench.recipes`.

A benchmark in which everything passes cannot tell a sound recipe from a broken one. Each control is GRPO with one thing
broken; a run under it has to end without having learned.
"""

import torch
from torch import Tensor

from goaly.reward import advantages
from goaly.reward.advantages import Scored


@advantages.compares_groups
def shuffled(batch: Scored) -> Tensor:
    """Each sample's advantage goes to a random sample of its group: as much signal, on the wrong answers."""
    random = torch.Generator().manual_seed(sum(int(sample.tokens["tokens"].sum()) for sample in batch.samples))
    order_S = torch.rand(len(batch.samples), generator=random, dtype=torch.float64) + batch.groups_S.double()
    return _group(batch)[order_S.argsort()]


@advantages.compares_groups
def flipped(batch: Scored) -> Tensor:
    """The advantage with its sign changed: wrong answers are reinforced."""
    return -_group(batch)


@advantages.compares_groups
def other_group(batch: Scored) -> Tensor:
    """Each sample gets the advantage of the sample in its place of the next group."""
    return _group(batch).roll(-int(batch.group_size_S[0]))


def _group(batch: Scored) -> Tensor:
    return advantages.group(batch)
