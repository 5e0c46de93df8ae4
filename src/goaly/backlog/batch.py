"""A batch: the groups of one training step as packed rows of every data-parallel rank. Pure.

Consumes groups in delivery order, adds each sample's advantages, and says what the batch is like. The handle is what
travels through the controller; the rows stay here until their rank pulls them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from goaly.backlog.outcomes import PASS_REWARD
from goaly.backlog.packing import assign, pack
from goaly.backlog.settings import BacklogSettings
from goaly.prompts.curriculum import Passes
from goaly.reward.advantages import advantages, has_signal, spread
from goaly.reward.settings import AdvantageSettings
from goaly.trajectory import Group, PackedRows, Trajectory, lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchHandle:
    """A batch as the controller sees it: its number and what it holds, no tokens."""

    id: int
    """Batches count from 0; batch k is trained by policy version k."""
    sequences: int
    trained_tokens: int
    tokens: int
    metrics: dict[str, float]
    passes: Mapping[str, Passes] = field(default_factory=dict)
    """By prompt source, how the groups did that finished since the batch before, trained or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch with its rows, one `PackedRows` a data-parallel rank."""

    handle: BatchHandle
    tickets: tuple[int, ...]
    ranks: tuple[PackedRows, ...]


def build_batch(
    batch_id: int,
    groups: Sequence[Group],
    *,
    settings: BacklogSettings,
    advantage_settings: AdvantageSettings,
    dp_ranks: int,
    pad_token: int,
    weights: Sequence[float] | None = None,
    passes: Mapping[str, Passes] | None = None,
) -> Batch:
    """The batch of these groups; the same groups in the same order give the same rows.

    A group's weight multiplies the advantages of all its samples; None weighs all alike.
    """
    samples = [sample for group in groups for sample in group.samples]
    sequences = []
    for group, weight in zip(groups, weights or [1.0] * len(groups), strict=True):
        rewards = [sample.reward for sample in group.samples]
        for sample, advantage in zip(group.samples, advantages(rewards, advantage_settings), strict=True):
            columns = sample.tokens.copy()
            columns["advantages"] = spread(sample.tokens["trained"], weight * advantage)
            sequences.append(columns)
    rows_by_rank = assign(lengths(samples), settings.row_length, dp_ranks)
    trained_tokens = sum(sample.trained_tokens for sample in samples)
    ranks = tuple(
        PackedRows(
            rows=pack(sequences, rows, settings.row_length, pad_token),
            batch_trained_tokens=trained_tokens,
            batch_sequences=len(samples),
        )
        for rows in rows_by_rank
    )
    tokens = sum(lengths(samples))
    capacity = dp_ranks * len(rows_by_rank[0]) * settings.row_length
    handle = BatchHandle(
        id=batch_id,
        sequences=len(samples),
        trained_tokens=trained_tokens,
        tokens=tokens,
        metrics={
            **batch_metrics(batch_id, groups),
            **{f"reward/pass_rate/{source}": found.rate for source, found in (passes or {}).items()},
            "batch/fill": tokens / capacity,
        },
        passes=passes or {},
    )
    return Batch(handle=handle, tickets=tuple(group.ticket for group in groups), ranks=ranks)


def batch_metrics(policy_version: int, groups: Sequence[Group]) -> dict[str, float]:
    """What the groups of a batch are like, as seen by the version that will train them."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    trained = torch.tensor([sample.trained_tokens for sample in samples], dtype=torch.float64)
    ages = policy_version - torch.cat([_versions(sample) for sample in samples]).double()
    flat = sum(not has_signal([sample.reward for sample in group.samples]) for group in groups)
    return {
        "reward/mean": rewards.mean().item(),
        "reward/std": rewards.std(correction=0).item(),
        "reward/pass_rate": (rewards >= PASS_REWARD).double().mean().item(),
        "length/mean": trained.mean().item(),
        "length/max": trained.max().item(),
        "age/mean": ages.mean().item() if len(ages) else 0.0,
        "age/max": ages.max().item() if len(ages) else 0.0,
        "groups/without_signal": float(flat),
    }


def _versions(sample: Trajectory) -> torch.Tensor:
    return sample.tokens["sampler_versions"][sample.tokens["trained"]]
