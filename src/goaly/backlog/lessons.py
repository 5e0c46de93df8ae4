"""The rows that a teacher reads: the lessons of a batch, packed as the batch itself is. Pure.

A lesson is a sequence of tokens, some of which the teacher judges: a trajectory as the policy saw it, or a context of
the teacher's own and after it the tokens of one turn (`Trajectory.taught`). The teacher's values go back to the places
of these tokens in the trajectory. The teacher sends tokens to experts by its own routers.

Shape suffixes: T tokens of a trajectory, L of a row, R rows.

    backlog-10: A trained token is in one lesson at most, at the place that follows the tokens that the teacher shall
        have seen before it. All lessons of a trajectory go to the rank that has its row, and all ranks get equally many
        rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from goaly.backlog.packing import assign
from goaly.base.errors import SchemaError
from goaly.trajectory import REQUIRED, PackedRows, Row, Trajectory, pack_rows, spans

Taught = Literal["all", "context"]
"""The trained tokens that a teacher judges: all, or those for which it has a context of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A sequence that the teacher reads."""

    place: int
    """The trajectory's place in the batch."""
    offset: int
    """The place in the trajectory of the lesson's first token, below 0 if a longer context comes before it."""
    columns: dict[str, Tensor]
    """Tokens, and the mask of those that it judges as `trained`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    """The lessons of a batch, as rows of each data-parallel rank."""

    lessons: tuple[Lesson, ...]
    placement: tuple[tuple[Row, ...], ...]
    ranks: tuple[PackedRows, ...]

    def values(self, dp_rank: int, column_RL: Tensor, lengths: dict[int, int]) -> dict[int, Tensor]:
        """A column of one rank's rows as values `[T]` of the trajectories with these lengths, by place; 0 where the
        teacher judges nothing."""
        found = {place: column_RL.new_zeros(length, *column_RL.shape[2:]) for place, length in lengths.items()}
        sizes = [len(one.columns["tokens"]) for one in self.lessons]
        for number, row, span in spans(sizes, self.placement[dp_rank]):
            lesson = self.lessons[number]
            judged = lesson.columns["trained"].nonzero().flatten()
            found[lesson.place][judged + lesson.offset] = column_RL[row, span][judged]
        return found


def check_contexts(sample: Trajectory, row_length: int, where: str) -> None:
    """Raise a SchemaError unless the teacher's contexts can be lessons."""
    after = 0
    for start, stop, tokens in sample.teacher_contexts:
        if not tokens or not after <= start < stop <= len(sample) or start == 0:
            raise SchemaError(
                f"{where}: a teacher's context of {len(tokens)} tokens for tokens {start} to {stop} of {len(sample)}; "
                "each must have a token, and be for a turn of its own"
            )
        if (length := len(tokens) + stop - start) > row_length:
            raise SchemaError(
                f"{where}: a teacher's context and its turn have {length} tokens, which don't fit into "
                f"backlog.row_length={row_length}"
            )
        after = stop


def taught_mask(sample: Trajectory, taught: Taught) -> Tensor:
    """The mask `[T]` of the trained tokens that a teacher judges."""
    trained_T = sample.tokens["trained"]
    return trained_T if taught == "all" else trained_T & _covered(sample)


def lessons_of(place: int, sample: Trajectory, taught: Taught) -> Iterator[Lesson]:
    """The lessons of one trajectory (backlog-10)."""
    tokens_T, trained_T = sample.tokens["tokens"], sample.tokens["trained"]
    for start, stop, context in sample.teacher_contexts:
        judged_T = trained_T[start:stop]
        if judged_T.any():
            columns = {
                "tokens": torch.cat([torch.tensor(context), tokens_T[start:stop]]),
                "trained": torch.cat([torch.zeros(len(context), dtype=torch.bool), judged_T]),
            }
            yield Lesson(place=place, offset=start - len(context), columns=columns)
    rest_T = trained_T & ~_covered(sample)
    if taught == "all" and rest_T.any():
        yield Lesson(place=place, offset=0, columns={"tokens": tokens_T, "trained": rest_T})


def packed_lessons(
    samples: Sequence[Trajectory],
    places_of_ranks: Sequence[Sequence[int]],
    taught: Taught,
    *,
    row_length: int,
    pad_token: int,
) -> Lessons:
    """The lessons of a batch whose data-parallel ranks have these samples, by place."""
    lessons, numbers = [], []
    for places in places_of_ranks:
        first = len(lessons)
        lessons += [lesson for place in places for lesson in lessons_of(place, samples[place], taught)]
        numbers.append(range(first, len(lessons)))
    sizes = [len(lesson.columns["tokens"]) for lesson in lessons]
    packed = [assign([sizes[number] for number in own], row_length, 1)[0] for own in numbers]
    most = max(map(len, packed))
    placement = tuple(
        tuple(tuple(own[at] for at in row) for row in rows) + ((),) * (most - len(rows))
        for own, rows in zip(numbers, packed, strict=True)
    )
    judged = sum(int(lesson.columns["trained"].sum()) for lesson in lessons)
    sequences = [lesson.columns for lesson in lessons] or [{key: torch.zeros(0, dtype=REQUIRED[key]) for key in _KEYS}]
    ranks = tuple(
        PackedRows(
            rows=pack_rows(sequences, rows, row_length, pad_token),
            batch_trained_tokens=judged,
            batch_sequences=len(lessons),
        )
        for rows in placement
    )
    return Lessons(lessons=tuple(lessons), placement=placement, ranks=ranks)


_KEYS = ("tokens", "trained")


def _covered(sample: Trajectory) -> Tensor:
    """The mask `[T]` of the tokens for which the teacher has a context of its own."""
    covered_T = torch.zeros(len(sample), dtype=torch.bool)
    for start, stop, _ in sample.teacher_contexts:
        covered_T[start:stop] = True
    return covered_T
