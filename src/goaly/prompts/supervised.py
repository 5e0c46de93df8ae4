"""Supervised documents (tokens, and a mask of the trained ones), and endless, resumable batches of them as packed rows.

Exactly the assistant's text with its stop token is trained. The tokens before it are those of a prompt that asks the
policy for it. Each batch takes the next documents; the first one that does not fit opens the next batch.
A document is in one row, not split, and every document of the order is in exactly one batch. No document shows the
answer to a problem that a run with the same held-out share holds out (prompts-1).
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import torch
from torchdata.nodes import BaseNode

from goaly.base.errors import ConfigError
from goaly.prompts.blocks import Block, Location, ShuffledFiles, blocks_of, fingerprint_of, read_block
from goaly.prompts.files import read_messages, read_tools
from goaly.prompts.prompt import ASSISTANT, SPLIT_KEY, Message, Split, split_key_of, split_of_key
from goaly.prompts.settings import SupervisedSettings
from goaly.prompts.stream import TaskPrompts, refuse_other
from goaly.prompts.tasks.arithmetic import Arithmetic, hinted
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.trajectory import PackedRows, pack_rows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One example to imitate; `location` names its origin in errors."""

    location: Location | str
    tokens: tuple[int, ...]
    trained: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.tokens)


def chat_document(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    location: Location | str,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Document:
    """A chat whose assistant messages are trained."""
    text, tokens, trained = "", [], []
    for index, message in enumerate(messages):
        if message.role != ASSISTANT:
            continue
        question = tokenizer.render_text(messages[:index], add_generation_prompt=True, tools=tools)
        answered = tokenizer.render_text(messages[: index + 1], add_generation_prompt=False, tools=tools)
        if not question.startswith(text) or not answered.startswith(question):
            raise ValueError(
                f"{location}: with message {index} the chat template renders the messages before it differently; "
                "split the chat so that each document has one assistant message"
            )
        context = tokenizer.encode(question[len(text) :])
        answer = tokenizer.encode(answered[len(question) :])
        tokens += context + answer
        trained += [False] * len(context) + _until_stop(answer, tokenizer.stop_token_ids)
        text = answered
    if not any(trained):
        raise ValueError(f"{location}: has no assistant message to train on")
    return _untrained_first(location, tokens, trained)


def plain_document(tokenizer: ChatTokenizer, prompt: str, completion: str, location: Location | str) -> Document:
    """A text and its completion, without chat template; the completion and a stop token are trained."""
    context = tokenizer.encode(prompt)
    answer = tokenizer.encode(completion) + list(tokenizer.stop_token_ids[:1])
    if not answer:
        raise ValueError(f"{location}: the completion is empty")
    return _untrained_first(location, context + answer, [False] * len(context) + [True] * len(answer))


def _until_stop(answer: Sequence[int], stop_token_ids: Sequence[int]) -> list[bool]:
    """True up to the last stop token; templates may write line breaks after it, which the policy never writes."""
    last = max((place for place, token in enumerate(answer) if token in stop_token_ids), default=len(answer) - 1)
    return [place <= last for place in range(len(answer))]


def _untrained_first(location: Location | str, tokens: Sequence[int], trained: Sequence[bool]) -> Document:
    """The document, of which the first token is not trained: nothing predicts it."""
    return Document(location=location, tokens=tuple(tokens), trained=(False, *trained[1:]))


class Demonstrations(BaseNode[Document]):
    """The training problems of a task, with demonstrations as answers, without end."""

    def __init__(self, settings: SupervisedSettings, tokenizer: ChatTokenizer):
        super().__init__()
        self._task = Arithmetic(settings.arithmetic, forgotten_carry_rate=settings.forgotten_carry_rate)
        self._prompts = TaskPrompts(self._task, settings.held_out_fraction, settings.seed, Split.TRAIN)
        self._settings = settings
        self._tokenizer = tokenizer

    @property
    def fingerprint(self) -> str:
        """Identifies this source."""
        share = self._settings.hinted_share
        hints = f" hinted={share}" if share else ""
        held_out, seed = self._settings.held_out_fraction, self._settings.seed
        return f"{self._task.fingerprint} held_out={held_out} seed={seed}{hints}"

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin, or continue from a saved state."""
        super().reset(initial_state)
        self._prompts.reset(initial_state)

    def next(self) -> Document:
        """The next demonstration."""
        position = self._prompts.state_dict()["position"]
        prompt = next(self._prompts)
        task, seed = self._task, self._settings.seed
        if Random(f"{seed}/hint/{position}").random() < self._settings.hinted_share:
            task, prompt = Arithmetic(), hinted(prompt)
        answer = task.demonstration(prompt, Random(f"{seed}/demonstration/{position}"))
        messages = (*prompt.messages, Message(role="assistant", content=answer))
        return chat_document(self._tokenizer, messages, location=prompt.id)

    def get_state(self) -> dict[str, Any]:
        """The position among the task's problems."""
        return self._prompts.state_dict()


class FileDocuments(ShuffledFiles[Document]):
    """The documents of files, in a new random order for every pass, without end."""

    def __init__(self, settings: SupervisedSettings, tokenizer: ChatTokenizer):
        self._settings = settings
        self._tokenizer = tokenizer
        self._seen = self._held_out = 0
        self._warned = False
        super().__init__(blocks_of(settings.files), self._shown, order=f"{settings.seed}/documents")

    @property
    def fingerprint(self) -> str:
        """Identifies this source."""
        settings = self._settings
        kind = f"template={settings.template} too_long={settings.too_long} held_out={settings.held_out_fraction}"
        return f"{fingerprint_of(settings.files)} {kind} seed={settings.seed}"

    def next(self) -> Document:
        """The next document; ConfigError if there is none to train on."""
        try:
            document = super().next()
        except StopIteration:
            raise ConfigError(
                [f"data.files: has no document to train on; {self._held_out} of {self._seen} are held out"]
            ) from None
        if self._held_out and not self._warned:
            self._warned = True
            logger.warning(
                "data.held_out_fraction=%g: %d of the first %d documents are held out",
                self._settings.held_out_fraction,
                self._held_out,
                self._seen,
            )
        return document

    def _shown(self, block: Block) -> Iterator[Document]:
        for location, record in read_block(block):
            self._seen += 1
            if is_held_out(location, record, self._settings.held_out_fraction):
                self._held_out += 1
                continue
            document = _document(record, location, self._settings, self._tokenizer)
            if self._settings.too_long == "refuse" or len(document) <= self._settings.row_length:
                yield document


class RowStream:
    """Batches of packed rows, without end."""

    def __init__(self, documents: BaseNode[Document], source: str, *, rows: int, row_length: int, pad_token: int):
        """`source` identifies the documents."""
        self._documents = documents
        self._source = source
        self._rows = rows
        self._row_length = row_length
        self._pad_token = pad_token
        self._position = 0
        self._left: Document | None = None
        """A document that is read but in no batch yet."""
        self._state: dict[str, Any] | None = None
        """The documents' state before `_left`."""

    @property
    def position(self) -> int:
        """The number of documents given so far."""
        return self._position

    def peek(self) -> Document:
        """The document that the next batch begins with."""
        if self._left is None:
            self._state = self._documents.state_dict()
            self._left = next(self._documents)
        return self._left

    def next(self) -> PackedRows:
        """The next batch."""
        packed: list[list[Document]] = [[] for _ in range(self._rows)]
        room = [self._row_length] * self._rows
        while True:
            document = self.peek()
            if len(document) > self._row_length:
                raise ValueError(
                    f"{document.location}: has {len(document)} tokens, more than data.row_length={self._row_length}; "
                    "make rows longer or set data.too_long=skip"
                )
            row = next((place for place, free in enumerate(room) if free >= len(document)), None)
            if row is None:
                return pack(packed, self._row_length, self._pad_token)
            packed[row].append(document)
            room[row] -= len(document)
            self._left = None
            self._position += 1

    def state_dict(self) -> dict[str, Any]:
        """The position of the stream, and its identity."""
        documents = self._documents.state_dict() if self._left is None else self._state
        return {"position": self._position, "documents": documents, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state of the same stream."""
        refuse_other("supervised data", self._identity(), state)  # prompts-3
        self._documents.reset(state["documents"])
        self._left = None
        self._position = int(state["position"])

    def _identity(self) -> dict[str, Any]:
        return {"source": self._source, "rows": self._rows, "row_length": self._row_length}


def row_stream(settings: SupervisedSettings, tokenizer: ChatTokenizer) -> RowStream:
    """The stream that the settings describe; ConfigError if there is nothing to train on."""
    kind = FileDocuments if settings.task is None else Demonstrations
    documents = kind(settings, tokenizer)
    stream = RowStream(
        documents,
        documents.fingerprint,
        rows=settings.rows_per_step,
        row_length=settings.row_length,
        pad_token=tokenizer.pad_token,
    )
    stream.peek()
    return stream


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


def is_held_out(location: Location | str, record: Mapping[str, Any], held_out_fraction: float) -> bool:
    """Whether a document shows the answer to a held-out problem (prompts-1): the messages before any answer are a
    problem."""
    if record.get(SPLIT_KEY) is not None:
        keys = [str(record[SPLIT_KEY])]
    else:
        messages = read_messages(record, location)
        answers = [index for index, message in enumerate(messages) if message.role == ASSISTANT]
        keys = [split_key_of(messages[:index]) for index in answers or [len(messages)]]
    return any(split_of_key(key, held_out_fraction) is Split.HELD_OUT for key in keys)


def _document(
    record: Mapping[str, Any], location: Location | str, settings: SupervisedSettings, tokenizer: ChatTokenizer
) -> Document:
    completion = record.get("completion")
    if completion is None:
        return chat_document(tokenizer, read_messages(record, location), location, read_tools(record, location))
    if not isinstance(completion, str) or not isinstance(record.get("prompt"), str):
        raise ValueError(f"{location}: `prompt` and `completion` must both be texts")
    if settings.template == "plain":
        return plain_document(tokenizer, record["prompt"], completion, location)
    messages = (*read_messages(record, location), Message(role="assistant", content=completion))
    return chat_document(tokenizer, messages, location, read_tools(record, location))
