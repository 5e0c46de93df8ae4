"""Packed supervised batches: nothing split or lost (SU-2), exact resuming (SU-1), refused states (SU-3)."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from goaly.prompts.documents import Document
from goaly.prompts.settings import PromptSettings, SupervisedSettings
from goaly.prompts.stream import prompt_stream
from goaly.prompts.supervised import RowStream, row_stream
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.trajectory import PackedRows

PAD = 0
ROW = 24


class Numbered:
    """Document i is the token i + 1, so many times as the lengths say; the second half is trained."""

    fingerprint = "numbered"

    def __init__(self, lengths: list[int]):
        self._lengths = lengths

    def at(self, position: int) -> Document:
        """The document at this position."""
        length = self._lengths[position % len(self._lengths)]
        trained = tuple(place >= length / 2 and place > 0 for place in range(length))
        return Document(place=str(position), tokens=(position + 1,) * length, trained=trained)


def stream_of(lengths: list[int], rows: int = 3) -> RowStream:
    """A stream over numbered documents."""
    return RowStream(Numbered(lengths), rows=rows, row_length=ROW, pad_token=PAD)


def found(batch: PackedRows) -> list[tuple[int, int, list[bool]]]:
    """The documents of a batch, read off its rows: number, length, what is trained."""
    documents = []
    for tokens, positions, trained in zip(
        *(batch.rows[key] for key in ("tokens", "positions", "trained")), strict=True
    ):
        starts = [*(positions == 0).nonzero().flatten().tolist(), ROW]
        for start, stop in itertools.pairwise(starts):
            assert len(set(tokens[start:stop].tolist())) == 1, "a document's positions run on into another"
            if int(tokens[start]) != PAD:
                documents.append((int(tokens[start]) - 1, stop - start, trained[start:stop].tolist()))
            else:
                assert not trained[start:stop].any()
    return documents


lengths = st.lists(st.integers(1, ROW), min_size=1, max_size=12)


@given(lengths=lengths, rows=st.integers(1, 4), batches=st.integers(1, 4))
def test_every_document_is_in_one_row_whole_and_in_order_of_batches(
    lengths: list[int], rows: int, batches: int
) -> None:
    stream, source = stream_of(lengths, rows), Numbered(lengths)
    seen: list[int] = []
    for _ in range(batches):
        batch = stream.next()
        documents = sorted(found(batch))
        assert documents == [(n, len(source.at(n)), list(source.at(n).trained)) for n, _, _ in documents]
        assert batch.batch_sequences == len(documents)
        assert batch.batch_trained_tokens == sum(sum(trained) for _, _, trained in documents)
        seen += [number for number, _, _ in documents]
    assert seen == list(range(stream.position))


@given(lengths=lengths, before=st.integers(0, 5))
def test_a_resumed_stream_gives_the_batches_that_would_have_come(lengths: list[int], before: int) -> None:
    stream, resumed = stream_of(lengths), stream_of(lengths)
    for _ in range(before):
        stream.next()
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    for _ in range(3):
        assert torch.equal(stream.next().rows["tokens"], resumed.next().rows["tokens"])


def test_a_state_of_other_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="rows is 2, but the saved state has 3"):
        stream_of([3], rows=2).load_state_dict(stream_of([3]).state_dict())


def test_a_document_longer_than_a_row_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"0: has 25 tokens, more than data\.row_length=24"):
        stream_of([ROW + 1]).next()


def test_files_of_chats_and_completions_are_read_with_their_answers_trained(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    lines = [{"messages": chat}, {"prompt": "2+2=", "completion": "4"}, {"prompt": "1", "completion": "1" * 30}]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = SupervisedSettings(files=(str(path),), row_length=18, rows_per_step=1, too_long="skip")
    batch = row_stream(settings, tokenizer).next()
    assert batch.batch_sequences == 2
    trained = batch.rows["tokens"][batch.rows["trained"]].tolist()
    texts = tokenizer.decode(trained, skip_special_tokens=False)
    assert sorted(texts.removesuffix("<|end|>").split("<|end|>")) == ["2", "4"]


def test_a_task_demonstrates_no_held_out_problem(tokenizer: ChatTokenizer) -> None:
    settings = SupervisedSettings(task="arithmetic", held_out_fraction=0.5)
    demonstrated = row_stream(settings, tokenizer)
    prompts = prompt_stream(PromptSettings(held_out_fraction=0.5))
    batch = demonstrated.next()
    text = tokenizer.decode(batch.rows["tokens"].flatten().tolist(), skip_special_tokens=False)
    questions = [prompts.next().messages[0].content for _ in range(batch.batch_sequences)]
    assert all(f"<|user|>{question}<|end|>" in text for question in questions)
