"""Endless, seeded, resumable batches of packed supervised documents.

The position in the endless order of documents is the whole state. Each batch takes the next documents; the first one
that does not fit opens the next batch.

Invariants
    SU-1  Resuming at a saved position gives exactly the batches that would have come.
    SU-2  A document is in one row, not split; every document of the order is in exactly one batch.
    SU-3  A state of other data is refused.
    SU-4  No document shows the answer to a problem that a run with the same held-out share holds out (SL-1).
"""

import logging
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate, pairwise
from random import Random
from typing import Any, Protocol

import torch

from goaly.errors import ConfigError
from goaly.prompts.documents import ASSISTANT, Document, chat_document, plain_document
from goaly.prompts.files import read_messages, read_records, read_tools
from goaly.prompts.prompt import SPLIT_KEY, Message, Split, split_key_of, split_of_key
from goaly.prompts.settings import SupervisedSettings
from goaly.prompts.stream import ShuffledOrder, TaskSource
from goaly.prompts.tasks import build_task
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.trajectory import PackedRows, pack_rows

logger = logging.getLogger(__name__)


class DocumentSource(Protocol):
    """A document for every position of an endless order."""

    @property
    def fingerprint(self) -> str:
        """Identifies this source."""
        ...

    def at(self, position: int) -> Document:
        """The document at this position."""
        ...


class Demonstrations:
    """The training problems of a task, with demonstrations as answers."""

    def __init__(self, settings: SupervisedSettings, tokenizer: ChatTokenizer):
        assert settings.task is not None
        self._task = build_task(settings.task, settings.arithmetic, forgotten_carry_rate=settings.forgotten_carry_rate)
        self._prompts = TaskSource(self._task, settings.held_out_fraction)
        self._seed = settings.seed
        self._tokenizer = tokenizer

    @property
    def fingerprint(self) -> str:
        """Identifies this source."""
        return f"{self._prompts.fingerprint} seed={self._seed}"

    def at(self, position: int) -> Document:
        """The document at this position."""
        prompt = self._prompts.at(position, self._seed, Split.TRAIN)
        answer = self._task.demonstration(prompt, Random(f"{self._seed}/demonstration/{position}"))
        messages = (*prompt.messages, Message(role="assistant", content=answer))
        return chat_document(self._tokenizer, messages, place=prompt.id)


class FileDocuments:
    """The documents of files, in a new random order for every pass."""

    def __init__(self, settings: SupervisedSettings, tokenizer: ChatTokenizer):
        records = [(place, record) for file in settings.files for place, record in read_records(file)]
        shown = [entry for entry in records if not is_held_out(*entry, settings.held_out_fraction)]
        held_out = len(records) - len(shown)
        if held_out:
            logger.warning(
                "data.held_out_fraction=%g: %d of %d documents are held out",
                settings.held_out_fraction,
                held_out,
                len(records),
            )
        self._documents = [_document(record, place, settings, tokenizer) for place, record in shown]
        if settings.too_long == "skip":
            self._documents = [entry for entry in self._documents if len(entry) <= settings.row_length]
        if not self._documents:
            raise ConfigError([f"data.files: has no document to train on; {held_out} of {len(records)} are held out"])
        self._order = ShuffledOrder(len(self._documents), "documents")
        self._seed = settings.seed
        digest = blake2b(digest_size=8)
        for document in self._documents:
            digest.update(repr(document).encode())
        self._fingerprint = f"{len(self._documents)} documents {digest.hexdigest()} seed={settings.seed}"

    @property
    def fingerprint(self) -> str:
        """Identifies this source."""
        return self._fingerprint

    def at(self, position: int) -> Document:
        """The document at this position."""
        return self._documents[self._order.at(position, self._seed)]


class RowStream:
    """Batches of packed rows, without end."""

    def __init__(self, source: DocumentSource, *, rows: int, row_length: int, pad_token: int):
        self._source = source
        self._rows = rows
        self._row_length = row_length
        self._pad_token = pad_token
        self._position = 0

    @property
    def position(self) -> int:
        """The number of documents given so far."""
        return self._position

    def next(self) -> PackedRows:
        """The next batch."""
        packed: list[list[Document]] = [[] for _ in range(self._rows)]
        room = [self._row_length] * self._rows
        while True:
            document = self._source.at(self._position)
            if len(document) > self._row_length:
                raise ValueError(
                    f"{document.place}: has {len(document)} tokens, more than data.row_length={self._row_length}; "
                    "make rows longer or set data.too_long=skip"
                )
            row = next((place for place, free in enumerate(room) if free >= len(document)), None)
            if row is None:
                return pack(packed, self._row_length, self._pad_token)
            packed[row].append(document)
            room[row] -= len(document)
            self._position += 1

    def state_dict(self) -> dict[str, Any]:
        """The position of the stream, and its identity."""
        return {"position": self._position, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state of the same stream."""
        for key, value in self._identity().items():
            if state[key] != value:  # SU-3
                raise ValueError(f"supervised data: {key} is {value!r}, but the saved state has {state[key]!r}")
        self._position = int(state["position"])

    def _identity(self) -> dict[str, Any]:
        return {"source": self._source.fingerprint, "rows": self._rows, "row_length": self._row_length}


def row_stream(settings: SupervisedSettings, tokenizer: ChatTokenizer) -> RowStream:
    """The stream that the settings describe."""
    kind = FileDocuments if settings.task is None else Demonstrations
    return RowStream(
        kind(settings, tokenizer),
        rows=settings.rows_per_step,
        row_length=settings.row_length,
        pad_token=tokenizer.pad_token,
    )


def pack(rows: Sequence[Sequence[Document]], row_length: int, pad_token: int) -> PackedRows:
    """These documents as packed rows."""
    documents = [document for row in rows for document in row]
    starts = [0, *accumulate(len(row) for row in rows)]
    return PackedRows(
        rows=pack_rows(
            [{"tokens": torch.tensor(one.tokens), "trained": torch.tensor(one.trained)} for one in documents],
            [tuple(range(start, stop)) for start, stop in pairwise(starts)],
            row_length,
            pad_token,
        ),
        batch_trained_tokens=sum(sum(document.trained) for document in documents),
        batch_sequences=len(documents),
    )


def is_held_out(place: str, record: Mapping[str, Any], held_out_fraction: float) -> bool:
    """Whether a document shows the answer to a held-out problem (SU-4): the messages before any answer are a
    problem."""
    if record.get(SPLIT_KEY) is not None:
        keys = [str(record[SPLIT_KEY])]
    else:
        messages = read_messages(record, place)
        answers = [index for index, message in enumerate(messages) if message.role == ASSISTANT]
        keys = [split_key_of(messages[:index]) for index in answers or [len(messages)]]
    return any(split_of_key(key, held_out_fraction) is Split.HELD_OUT for key in keys)


def _document(
    record: Mapping[str, Any], place: str, settings: SupervisedSettings, tokenizer: ChatTokenizer
) -> Document:
    completion = record.get("completion")
    if completion is None:
        return chat_document(tokenizer, read_messages(record, place), place, read_tools(record, place))
    if not isinstance(completion, str) or not isinstance(record.get("prompt"), str):
        raise ValueError(f"{place}: `prompt` and `completion` must both be texts")
    if settings.template == "plain":
        return plain_document(tokenizer, record["prompt"], completion, place)
    messages = (*read_messages(record, place), Message(role="assistant", content=completion))
    return chat_document(tokenizer, messages, place, read_tools(record, place))
