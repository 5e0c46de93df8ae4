"""A batch: the groups of one training step as packed rows for each data-parallel rank. Pure.

Consumes groups in delivery order, adds advantages and metrics. The controller gets the handle; the rows stay in the hub
until their rank pulls them. Advantages that need a column of a later stage (the reference's log-probs, a critic's
values) are added once all rows have it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from goaly.backlog.events import Annotated
from goaly.backlog.lessons import Lessons, Taught, check_contexts, packed_lessons, taught_mask
from goaly.backlog.packing import assign, divide
from goaly.backlog.settings import BacklogSettings
from goaly.base.errors import SchemaError
from goaly.prompts.curriculum import Passes
from goaly.prompts.prompt import PASS_REWARD
from goaly.reward.estimate import estimate
from goaly.reward.settings import AdvantageSettings
from goaly.trajectory import (
    LATER,
    LATER_TOP,
    TAUGHT,
    TRUNCATED,
    Group,
    Minibatch,
    Outcome,
    PackedRows,
    Row,
    Trajectory,
    check_tokens,
    pack_rows,
    spans,
)

TEACHERS = ("teacher_logprobs", *LATER_TOP)
"""The columns that a teacher adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchHandle:
    """A batch as the controller sees it: number, sizes and metrics, without tokens."""

    id: int
    """Batches are numbered from 0; policy version k trains batch k."""
    sequences: int
    trained_tokens: int
    tokens: int
    metrics: dict[str, float]
    passes: Mapping[str, Passes] = field(default_factory=dict)
    """By prompt source, the passes of all groups that finished since the previous batch, trained or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch with its rows: one `PackedRows` for each data-parallel rank."""

    handle: BatchHandle
    groups: tuple[Group, ...]
    weights: tuple[float, ...]
    """The factor of each group's advantages."""
    placement: tuple[tuple[Row, ...], ...]
    """The rows of each rank, as the sequences in them."""
    ranks: tuple[PackedRows, ...]
    lessons: Lessons | None = None
    """The rows that a teacher reads, if the run has one."""
    annotated: list[Annotated] = field(default_factory=list)
    """The columns that later stages have added to it."""
    unfinished: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    """The values `[T]` by sequence of each column that some ranks still lack."""

    @property
    def tickets(self) -> tuple[int, ...]:
        """The tickets of its groups."""
        return tuple(group.ticket for group in self.groups)

    def lesson_rows(self, dp_rank: int) -> PackedRows:
        """The rows that a teacher reads, for one data-parallel rank."""
        assert self.lessons is not None, "the queue of a run with a teacher knows which tokens are taught"
        return self.lessons.ranks[dp_rank]

    def state_dict(self) -> dict[str, Any]:
        """Its facts that neither its groups nor its added columns determine, as plain values."""
        return {
            "id": self.handle.id,
            "tickets": self.tickets,
            "weights": self.weights,
            "passes": {source: asdict(passes) for source, passes in self.handle.passes.items()},
            "metrics": self.handle.metrics,
        }


def check_group(
    group: Group, settings: BacklogSettings, min_version: int, same_weights: Mapping[int, int] | None = None
) -> None:
    """Raise a SchemaError unless a batch can have the group and its trained tokens are of this version or newer. Those
    of a key of `same_weights` count as those of its value."""
    episodes = {sample.sample_index for sample in group.samples}
    if len(episodes) + group.left != settings.group_size:
        left = f" and {group.left} that left it" if group.left else ""
        raise SchemaError(
            f"prompt {group.prompt_id}: a group of {len(episodes)} samples{left}, "
            f"must be backlog.group_size={settings.group_size}"
        )
    if len(episodes) != len(group.episodes):
        raise SchemaError(f"prompt {group.prompt_id}: the trajectories of an episode do not follow each other")
    for sample in group.samples:
        where = f"trajectory {sample.prompt_id}/{sample.sample_index}"
        check_tokens(sample.tokens, where=where)
        versions = _versions(sample)
        same = same_weights or {}
        old = [version for version in set(versions.tolist()) if same.get(version, version) < min_version]
        if old:
            raise SchemaError(
                f"{where}: a token of policy version {min(old)}, ticket {group.ticket} allows {min_version} and newer"
            )
        if len(sample) > settings.row_length:
            raise SchemaError(f"{where}: {len(sample)} tokens don't fit into backlog.row_length={settings.row_length}")
        check_contexts(sample, settings.row_length, where)


def build_batch(
    batch_id: int,
    groups: Sequence[Group],
    *,
    settings: BacklogSettings,
    advantage_settings: AdvantageSettings,
    dp_ranks: int,
    pad_token: int,
    minibatches: int = 1,
    taught: Taught | None = None,
    weights: Sequence[float] | None = None,
    passes: Mapping[str, Passes] | None = None,
) -> Batch:
    """The batch of these groups; the same groups in the same order give the same rows.

    Each of the `minibatches` has its own rows. A teacher judges the `taught` tokens; None: the run has no teacher.
    `weights` has a factor for the advantages of each group; None is 1.
    """
    samples = [sample for group in groups for sample in group.samples]
    sequences = [sample.tokens for sample in samples]
    masks = None if taught is None else [taught_mask(sample, taught) for sample in samples]
    taught_S = [0] * len(samples) if masks is None else [int(mask_T.sum()) for mask_T in masks]
    rows_by_rank, counted = _placed(groups, minibatches, settings.row_length, dp_ranks, taught_S)
    trained_tokens = sum(sample.trained_tokens for sample in samples)
    ranks = tuple(
        PackedRows(
            rows=pack_rows(sequences, rows, settings.row_length, pad_token),
            batch_trained_tokens=trained_tokens,
            batch_sequences=len(samples),
            batch_taught_tokens=sum(taught_S),
            minibatches=counted,
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
            **({} if taught is None else {"distill/taught_share": sum(taught_S) / max(trained_tokens, 1)}),
        },
        passes=passes or {},
    )
    batch = Batch(
        handle=handle,
        groups=tuple(groups),
        weights=tuple(weights or [1.0] * len(groups)),
        placement=rows_by_rank,
        ranks=ranks,
        lessons=None if taught is None else _lessons(samples, rows_by_rank, taught, settings.row_length, pad_token),
    )
    if masks is not None:
        _into_rows(batch, TAUGHT, masks)
    _into_rows(batch, TRUNCATED, [torch.full((len(sample),), _truncated(sample)) for sample in samples])
    add_advantages(batch, advantage_settings)
    return batch


def _lessons(
    samples: Sequence[Trajectory],
    rows_by_rank: Sequence[Sequence[Row]],
    taught: Taught,
    row_length: int,
    pad_token: int,
) -> Lessons:
    places = [[place for row in rows for place in row] for rows in rows_by_rank]
    return packed_lessons(samples, places, taught, row_length=row_length, pad_token=pad_token)


def _placed(
    groups: Sequence[Group], minibatches: int, row_length: int, dp_ranks: int, taught_S: Sequence[int]
) -> tuple[tuple[tuple[Row, ...], ...], tuple[Minibatch, ...]]:
    """The rows of each rank, ordered by minibatch; and if there are several, the `Minibatch` of each."""
    samples = [sample for group in groups for sample in group.samples]
    if minibatches == 1:
        return assign(lengths(samples), row_length, dp_ranks), ()
    group_of = [number for number, group in enumerate(groups) for _ in group.samples]
    rows_by_rank: list[list[Row]] = [[] for _ in range(dp_ranks)]
    counted = []
    for members in divide([sum(lengths(group.samples)) for group in groups], minibatches):
        places = [place for place, number in enumerate(group_of) if number in members]
        by_rank = assign([len(samples[place]) for place in places], row_length, dp_ranks)
        for rank, rows in enumerate(by_rank):
            rows_by_rank[rank] += [tuple(places[at] for at in row) for row in rows]
        trained_tokens = sum(samples[place].trained_tokens for place in places)
        counted.append(
            Minibatch(
                rows=len(by_rank[0]),
                trained_tokens=trained_tokens,
                sequences=len(places),
                taught_tokens=sum(taught_S[place] for place in places),
            )
        )
    return tuple(tuple(rows) for rows in rows_by_rank), tuple(counted)


def annotation(batch: Batch, dp_rank: int, key: str, column_RL: Tensor) -> Annotated:
    """A later stage's column for the rows of one rank, by sequence; SchemaError if these rows can't have it. That of a
    teacher is for the rows of the lessons."""
    at, known = f"batch {batch.handle.id}", LATER | LATER_TOP
    if key not in known:
        raise SchemaError(f"{at}: can't add the column `{key}`; later stages may add {', '.join(known)}")
    lessons = batch.lessons if key in TEACHERS else None
    rows = (batch.ranks if lessons is None else lessons.ranks)[dp_rank].rows
    if (
        column_RL.dtype != known[key]
        or column_RL.shape[:2] != rows.batch_size
        or (column_RL.dim() > 2) != (key in LATER_TOP)
    ):
        raise SchemaError(
            f"{at}, dp_rank {dp_rank}: `{key}` is {column_RL.dtype} {tuple(column_RL.shape)}, "
            f"must be {known[key]} {tuple(rows.batch_size)}"
        )
    if lessons is None:
        found = {place: column_RL[row, span] for rank, row, span, place in _spans(batch) if rank == dp_rank}
    else:
        sizes = lengths([sample for group in batch.groups for sample in group.samples])
        mine = {place: sizes[place] for row in batch.placement[dp_rank] for place in row}
        found = lessons.values(dp_rank, column_RL, mine)
    values_T = torch.cat([column_RL.flatten(0, 1)[:0], *found.values()])  # a rank may have no sequence
    return Annotated(batch=batch.handle.id, key=key, places=tuple(found), values_T=values_T)


def add_column(batch: Batch, annotated: Annotated, settings: AdvantageSettings) -> None:
    """Add a column's values for some sequences to the rows, once those of all sequences are there; then also the
    advantages that need the column."""
    batch.annotated.append(annotated)
    key, places = annotated.key, annotated.places
    if not places:
        return
    tokens = lengths([sample for group in batch.groups for sample in group.samples])
    found = batch.unfinished.setdefault(key, {})
    found.update(zip(places, annotated.values_T.split([tokens[place] for place in places]), strict=True))
    if len(found) == len(tokens):
        _into_rows(batch, key, [found[place] for place in range(len(tokens))])
        del batch.unfinished[key]
        if key in settings.needs:
            add_advantages(batch, settings)


def add_advantages(batch: Batch, settings: AdvantageSettings) -> None:
    """Add `advantages`, and `returns` if there is a critic, once all rows have the columns that these need."""
    if any(key not in packed.rows for packed in batch.ranks for key in settings.needs):
        return
    found = estimate(batch.groups, settings, {key: column_of_samples(batch, key) for key in settings.needs})
    weights = [weight for weight, group in zip(batch.weights, batch.groups, strict=True) for _ in group.samples]
    weighted = [weight * value_T for weight, value_T in zip(weights, found.advantages, strict=True)]
    _into_rows(batch, "advantages", weighted)
    if found.returns is not None:
        _into_rows(batch, "returns", found.returns)


def column_of_samples(batch: Batch, key: str) -> list[Tensor]:
    """A column of the rows as one tensor `[T]` for each sample."""
    found: dict[int, Tensor] = {}
    for rank, row, span, place in _spans(batch):
        found[place] = batch.ranks[rank].rows[key][row, span]
    return [found[place] for place in range(len(found))]


def _into_rows(batch: Batch, key: str, values: Sequence[Tensor]) -> None:
    """Write the samples' values `[T]` into a column of the rows."""
    of_token = values[0].shape[1:]
    columns = [torch.zeros(*packed.rows.batch_size, *of_token, dtype=values[0].dtype) for packed in batch.ranks]
    for rank, row, span, place in _spans(batch):
        columns[rank][row, span] = values[place]
    for packed, column_RL in zip(batch.ranks, columns, strict=True):
        packed.rows[key] = column_RL


def _spans(batch: Batch) -> Iterator[tuple[int, int, slice, int]]:
    samples = [sample for group in batch.groups for sample in group.samples]
    for rank, rows in enumerate(batch.placement):
        for place, row, span in spans(lengths(samples), rows):
            yield rank, row, span, place


def batch_metrics(policy_version: int, groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of the groups of a batch; ages are relative to the version that trains them."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = torch.tensor([reward for group in groups for reward in group.rewards], dtype=torch.float64)
    trained = torch.tensor([tokens for group in groups for tokens in group.trained_tokens], dtype=torch.float64)
    ages = policy_version - torch.cat([_versions(sample) for sample in samples]).double()
    flat = sum(not group.has_signal for group in groups)
    return {
        "reward/mean": rewards.mean().item(),
        "reward/std": rewards.std(correction=0).item(),
        "reward/pass_rate": (rewards >= PASS_REWARD).double().mean().item(),
        "length/mean": trained.mean().item(),
        "length/max": trained.max().item(),
        "length/truncated_share": sum(map(_truncated, samples)) / len(samples),
        "age/mean": ages.mean().item() if len(ages) else 0.0,
        "age/max": ages.max().item() if len(ages) else 0.0,
        "groups/without_signal": float(flat),
    }


def _truncated(sample: Trajectory) -> bool:
    """Whether a limit ended it."""
    return sample.outcome is Outcome.TRUNCATED


def _versions(sample: Trajectory) -> torch.Tensor:
    return sample.tokens["sampler_versions"][sample.tokens["trained"]]


def lengths(samples: Sequence[Trajectory]) -> list[int]:
    """The token count of each trajectory."""
    return [len(sample) for sample in samples]
