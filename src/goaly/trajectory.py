"""The schema of token data: a trajectory, a group of trajectories, and packed rows.

A trajectory is one sampled sequence as a `TensorDict` with batch size `[T]`. Position t of every per-token tensor is
about token t: `sampler_logprobs[t]` is the sampler's log-probability of `tokens[t]`.

    tokens            i64   every token the policy saw or wrote
    trained           bool  the policy wrote this token, and it is trained
    sampler_logprobs  f32   0 where the policy did not write the token, or the sampler gave it no finite one; without
                            the form that an answer had to have
    sampler_versions  i32   version of the weights that produced the token's logits; -1 where none did
    rewards           f32   credited to the token; an outcome reward sits on the last trained token
    expert_choices    u8    [T, layers, K]: the experts that the sampler chose for the token in each layer; only in runs
                            that replay them (`moe.routing`)
    form_weights      f32   the token's probability without its answer's form, divided by that with which it was drawn;
                            1 without a form; only if an answer has one
    (later stages)    f32   reference_logprobs, teacher_logprobs, values, advantages, returns; and [T, K] for the most
                            likely tokens of a teacher teacher_top_tokens (i32) and teacher_top_logprobs

The first token is never trained, because no token predicts it. Masks are stored, never inferred from pad or
end-of-sequence tokens. The rewards of a sequence add up to a finite number. The padding of a packed row is at its end,
is never trained, and has its own positions from 0. A group's trajectories of one episode follow each other, and have
its `sample_index`, which no other has.

    trajectory-1: A trained token has a version >= 0 and a finite log-probability <= 0. One without a finite
        log-probability is not trained, so it is in no loss, no ratio and no denominator.
    trajectory-2: If a sequence has choices of experts, so has each token before its last trained one. Those of later
        tokens are 0 and have no meaning: the sampler need not have computed these tokens, and no trained token depends
        on them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from goaly.base.errors import SchemaError
from goaly.base.process import without_the_compiler
from goaly.base.safetensors_file import Buffer, TensorFile, tensor_file

with without_the_compiler():  # goaly compiles no code that uses a TensorDict
    from tensordict import TensorDict

REQUIRED: dict[str, torch.dtype] = {
    "tokens": torch.int64,
    "trained": torch.bool,
    "sampler_logprobs": torch.float32,
    "sampler_versions": torch.int32,
    "rewards": torch.float32,
}
LATER: dict[str, torch.dtype] = {
    "reference_logprobs": torch.float32,
    "teacher_logprobs": torch.float32,
    "values": torch.float32,
    "advantages": torch.float32,
    "returns": torch.float32,
}
TOP_TOKENS, TOP_LOGPROBS = "teacher_top_tokens", "teacher_top_logprobs"
LATER_TOP: dict[str, torch.dtype] = {TOP_TOKENS: torch.int32, TOP_LOGPROBS: torch.float32}
"""Columns of K values for each token."""
EXPERT_CHOICES, FORM_WEIGHTS = "expert_choices", "form_weights"
SOMETIMES: dict[str, torch.dtype] = {EXPERT_CHOICES: torch.uint8, FORM_WEIGHTS: torch.float32}
NO_VERSION = -1
Row = tuple[int, ...]
"""The sequences of a packed row, by their index in the batch."""
TokenColumns = TensorDict | Mapping[str, torch.Tensor]
"""The per-token columns `[T, ...]` of one sequence."""
TRUNCATED = "truncated"
"""The column that marks tokens of answers which a limit ended (`Outcome.TRUNCATED`)."""
TAUGHT = "taught"
"""The column that marks the trained tokens that a teacher judges."""
PROMPT, POLICY, ENVIRONMENT = "prompt", "policy", "environment"
"""Authors of turns."""


class Outcome(StrEnum):
    """How an episode ended."""

    COMPLETE = "complete"
    """The policy ended its answer itself."""
    TRUNCATED = "truncated"
    """A limit ended it: of the answer's tokens, of its session, of the context, or of its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Consecutive tokens with one author: `[start, stop)` of the trajectory."""

    author: str
    start: int
    stop: int
    calls: tuple[str, ...] = ()
    """The tools that an answer in a chat calls, by name."""
    malformed: int = 0
    """Its malformed tool calls."""


class TeacherContext(NamedTuple):
    """Tokens that a teacher sees instead of all before `start` when it judges a trajectory's `[start, stop)`."""

    start: int
    stop: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One sampled sequence: its tokens (a checked TensorDict `[T]`) and facts about the whole of it."""

    tokens: TensorDict
    prompt_id: str
    sample_index: int
    turns: tuple[Turn, ...]
    environment: str
    outcome: Outcome
    notes: Sequence[Mapping[str, Any]] = ()
    """JSON objects that the script noted, each `after` N answers. An episode's first trajectory has them."""
    teacher_contexts: tuple[TeacherContext, ...] = ()
    """Where a teacher sees other tokens than the policy did, in order; see `taught`."""

    def __post_init__(self) -> None:
        check_tokens(self.tokens, where=f"trajectory {self.prompt_id}/{self.sample_index}")

    def __len__(self) -> int:
        return self.tokens.batch_size[0]

    @property
    def reward(self) -> float:
        """The sum of its tokens' rewards."""
        return float(self.tokens["rewards"].sum())

    @property
    def trained_tokens(self) -> int:
        """The number of its trained tokens."""
        return int(self.tokens["trained"].sum())

    def taught(self, context: Sequence[int], turn: Turn | None = None) -> "Trajectory":
        """The trajectory, with these tokens as all that a teacher sees before this turn of the policy, or its last one.
        The contexts of other turns stay."""
        its = turn or [one for one in self.turns if one.author == POLICY][-1]
        others = [one for one in self.teacher_contexts if one.start != its.start]
        contexts = sorted([*others, TeacherContext(its.start, its.stop, tuple(context))])
        return replace(self, teacher_contexts=tuple(contexts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All samples of one prompt, with the prompt's ticket. An episode makes one trajectory or several."""

    ticket: int
    prompt_id: str
    source: str
    samples: tuple[Trajectory, ...]
    counts: Mapping[str, int] = field(default_factory=dict)
    """Counts of events in its episodes, by the name of the metric (`goaly.base.telemetry.metrics`)."""
    left: int = 0
    """Episodes that are not in it (`rollout.cut_off_reward=exclude`)."""
    _encoded: bytearray | None = field(default=None, init=False, repr=False, compare=False)
    """Its bytes, if it was made of some: the memory of its tensors."""

    @property
    def episodes(self) -> list[tuple[Trajectory, ...]]:
        """The trajectories of each episode."""
        return [tuple(those) for _, those in groupby(self.samples, attrgetter("sample_index"))]

    @property
    def rewards(self) -> list[float]:
        """The reward of each episode."""
        return [episode_reward(episode) for episode in self.episodes]

    @property
    def has_signal(self) -> bool:
        """Whether its trajectories differ in reward: those of different episodes, or those of one."""
        return len({one.reward for one in self.samples}) > 1

    @property
    def trained_tokens(self) -> list[int]:
        """The number of trained tokens of each episode."""
        return [sum(one.trained_tokens for one in episode) for episode in self.episodes]

    def encoded(self) -> Buffer:
        """The group as bytes, for pickles and for the run's log: a safetensors file of one tensor for each column."""
        if self._encoded is not None:
            return self._encoded
        samples = _completed([sample.tokens for sample in self.samples])
        keys = [str(key) for key in samples[0].keys()]  # noqa: SIM118 - a TensorDict iterates over its rows
        columns = {key: torch.cat([sample[key] for sample in samples]) for key in keys}
        columns["tokens"] = columns["tokens"].int()  # no vocabulary has 2^31 tokens
        content = {
            "facts": {name: getattr(self, name) for name in _GROUP_FACTS},
            "samples": [[len(sample), *(getattr(sample, name) for name in _FACTS)] for sample in self.samples],
        }
        metadata = {"kind": "Group", "content": json.dumps(content, default=_plain)}
        return b"".join(tensor_file(metadata, columns))

    @classmethod
    def decoded(cls, encoded: bytearray) -> "Group":
        """The group of these bytes, whose memory it shares. Its tokens are not checked again."""
        file = TensorFile.read(encoded)
        content, columns = json.loads(file.metadata["content"]), file.tensors()
        columns["tokens"] = columns["tokens"].long()
        lengths = [length for length, *_ in content["samples"]]
        split = {key: column.split(lengths) for key, column in columns.items()}
        samples = []
        for place, (length, prompt_id, index, turns, environment, outcome, *more) in enumerate(content["samples"]):
            tokens = TensorDict({key: parts[place] for key, parts in split.items()}, batch_size=[length])
            notes, contexts = (*more, *[()] * (2 - len(more)))  # older logs have fewer
            contexts = tuple(TeacherContext(start, stop, tuple(seen)) for start, stop, seen in contexts)
            known = (tokens, prompt_id, index, tuple(map(_turn, turns)), environment, Outcome(outcome), notes, contexts)
            sample = object.__new__(Trajectory)
            for name, value in zip(("tokens", *_FACTS), known, strict=True):
                object.__setattr__(sample, name, value)
            samples.append(sample)
        group = cls(samples=tuple(samples), **content["facts"])
        object.__setattr__(group, "_encoded", encoded)
        return group

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles one buffer; pickling each sample's tensors takes ten times as long."""
        return _decoded, (bytearray(self.encoded()),)


def _decoded(encoded: bytearray) -> Group:  # cloudpickle pickles the code of a class method, which takes milliseconds
    return Group.decoded(encoded)


_GROUP_FACTS = tuple(one.name for one in fields(Group) if one.init and one.name != "samples")
_FACTS = tuple(one.name for one in fields(Trajectory) if one.name != "tokens")


def _plain(turn: Turn) -> dict[str, Any]:
    """The turn for JSON, without the fields that most turns don't have."""
    known = {"author": turn.author, "start": turn.start, "stop": turn.stop}
    if turn.calls or turn.malformed:
        known |= {"calls": turn.calls, "malformed": turn.malformed}
    return known


def _turn(known: dict[str, Any]) -> Turn:
    return Turn(**known | {"calls": tuple(known["calls"])}) if "calls" in known else Turn(**known)


def episode_reward(trajectories: Sequence[Trajectory]) -> float:
    """The reward of the episode that made these trajectories: the mean of theirs."""
    return sum(one.reward for one in trajectories) / len(trajectories)


def token_data(columns: Mapping[str, torch.Tensor]) -> TensorDict:
    """A checked TensorDict `[T]` of these per-token columns."""
    length = len(columns["tokens"]) if "tokens" in columns else 0
    data = TensorDict(dict(columns), batch_size=[length])
    check_tokens(data, where="token data")
    return data


def check_tokens(data: TensorDict, *, where: str) -> None:
    """Raise a SchemaError that names the key unless `data` is a valid trajectory `[T]`."""
    keys: set[Any] = set(data.keys())
    for key in REQUIRED:
        if key not in keys:
            raise SchemaError(f"{where}: `{key}` is missing; a trajectory holds {', '.join(REQUIRED)}")
    for key in keys:
        dtype = SOMETIMES.get(key) or REQUIRED.get(key) or LATER.get(key)
        if dtype is None:
            known = ", ".join([*REQUIRED, *SOMETIMES, *LATER])
            raise SchemaError(f"{where}: `{key}` is unknown; known are {known}")
        column = data[key]
        if column.dtype != dtype:
            raise SchemaError(f"{where}: `{key}` is {column.dtype}, must be {dtype}")
        if column.dim() != (3 if key == EXPERT_CHOICES else 1):
            values = "[tokens, layers, experts of a token]" if key == EXPERT_CHOICES else "one value per token"
            raise SchemaError(f"{where}: `{key}` has shape {tuple(column.shape)}, must be {values}")
    if data.batch_size[0] == 0:
        raise SchemaError(f"{where}: `tokens` is empty")
    trained_T = data["trained"].numpy()  # numpy looks at short columns in a fraction of torch's time
    if trained_T[0]:
        raise SchemaError(f"{where}: `trained` is set on the first token, which no token predicts")
    logprobs = data["sampler_logprobs"].numpy()[trained_T]
    sound = (logprobs <= 0) & np.isfinite(logprobs)
    if not sound.all():
        first = float(logprobs[~sound][0])
        raise SchemaError(f"{where}: `sampler_logprobs` of a trained token is positive or not finite: {first}")
    if (data["sampler_versions"].numpy()[trained_T] < 0).any():
        raise SchemaError(f"{where}: `sampler_versions` of a trained token is negative")  # trajectory-1
    total = data["rewards"].sum()
    if not bool(torch.isfinite(total)):
        raise SchemaError(f"{where}: `rewards` add up to {total.item()}, must be a finite number")


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """The rows of a batch for one optimizer step: their number on each rank, and counts over all ranks."""

    rows: int
    trained_tokens: int
    sequences: int
    taught_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """The rows of one data-parallel rank: a TensorDict `[rows, L]`, and counts over the whole batch.

    The columns are those of a trajectory, and `positions` (i64), which restarts at 0 with each document. Padding
    is a document of its own.
    """

    rows: TensorDict
    batch_trained_tokens: int
    batch_sequences: int
    batch_taught_tokens: int = 0
    """The trained tokens that a teacher judges."""
    minibatches: tuple[Minibatch, ...] = ()
    """In the order of their rows; empty if all rows make one optimizer step."""

    def split(self) -> list["PackedRows"]:
        """The rows of each optimizer step, with their own counts; a minibatch without trained tokens makes no step."""
        if not self.minibatches:
            return [self]
        rows = self.rows.split([minibatch.rows for minibatch in self.minibatches])
        steps = [
            PackedRows(
                rows=its_rows,
                batch_trained_tokens=one.trained_tokens,
                batch_sequences=one.sequences,
                batch_taught_tokens=one.taught_tokens,
            )
            for its_rows, one in zip(rows, self.minibatches, strict=True)
            if one.trained_tokens
        ]
        return steps or [self]

    @property
    def row_length(self) -> int:
        """L: the number of tokens in a row."""
        return self.rows.batch_size[1]


def pack_rows(sequences: Sequence[TokenColumns], rows: Sequence[Row], row_length: int, pad_token: int) -> TensorDict:
    """These sequences as rows `[R, L]`, with `positions` added."""
    sequences = _completed(sequences)
    packed = {
        key: torch.zeros(len(rows), row_length, *shape, dtype=dtype)
        for key, (dtype, shape) in _common_columns(sequences).items()
    }
    packed["tokens"].fill_(pad_token)
    if "sampler_versions" in packed:
        packed["sampler_versions"].fill_(NO_VERSION)
    positions_RL = torch.zeros(len(rows), row_length, dtype=torch.int64)
    used = [0] * len(rows)
    for place, row, span in spans([len(sequence["tokens"]) for sequence in sequences], rows):
        for key, column in packed.items():
            column[row, span] = sequences[place][key]
        positions_RL[row, span] = torch.arange(span.stop - span.start)
        used[row] = span.stop
    for row, stop in enumerate(used):
        positions_RL[row, stop:] = torch.arange(row_length - stop)
    return TensorDict({**packed, "positions": positions_RL}, batch_size=[len(rows), row_length])


def _completed(sequences: Sequence[TokenColumns]) -> Sequence[TokenColumns]:
    """The sequences, with the columns that only some of them have: weights of 1, and choices of experts for those
    without a trained token (trajectory-2)."""
    known = {key: one[key] for key in SOMETIMES for one in sequences if key in one.keys()}  # noqa: SIM118
    if not known:
        return sequences
    filled: list[TokenColumns] = []
    for sequence in sequences:
        columns = dict(sequence.items())
        shapes = {key: (len(columns["tokens"]), *column.shape[1:]) for key, column in known.items()}
        if FORM_WEIGHTS in known:
            columns.setdefault(FORM_WEIGHTS, torch.ones(shapes[FORM_WEIGHTS]))
        if EXPERT_CHOICES in known and not columns["trained"].any():
            columns.setdefault(EXPERT_CHOICES, known[EXPERT_CHOICES].new_zeros(shapes[EXPERT_CHOICES]))
        filled.append(columns)
    return filled


def spans(lengths: Sequence[int], rows: Sequence[Row]) -> Iterator[tuple[int, int, slice]]:
    """`(index in the batch, row, columns)` of each sequence in these rows."""
    for row, places in enumerate(rows):
        start = 0
        for place in places:
            yield place, row, slice(start, start + lengths[place])
            start += lengths[place]


def _common_columns(sequences: Sequence[TokenColumns]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """The dtype of each column and the shape of a token's part; all sequences must have the same ones."""
    first = sequences[0]
    columns = {str(key): (first[key].dtype, first[key].shape[1:]) for key in sorted(first.keys())}
    for place, sequence in enumerate(sequences):
        if odd := set(columns) ^ set(sequence.keys()):
            raise SchemaError(f"sequence {place}: `{min(odd)}` is in some sequences of the batch and not in others")
    return columns
