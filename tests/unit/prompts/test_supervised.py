"""Packed supervised batches: nothing split or lost, exact resuming and refused states (prompts-3)."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchdata.nodes import BaseNode

from goaly.base.errors import ConfigError
from goaly.prompts.mixture import distinct_prompts
from goaly.prompts.prompt import Split, split_of_key
from goaly.prompts.settings import ArithmeticSettings, PromptSettings, SupervisedSettings
from goaly.prompts.stream import PromptStream
from goaly.prompts.supervised import Document, RowStream, is_held_out, row_stream
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.trajectory import PackedRows

PAD = 0
ROW = 24


class Numbered(BaseNode[Document]):
    """Document i is the token i + 1, so many times as the lengths say; the second half is trained."""

    def __init__(self, lengths: list[int]):
        super().__init__()
        self._lengths = lengths

    def reset(self, initial_state: dict | None = None) -> None:
        super().reset(initial_state)
        self._position = initial_state["position"] if initial_state else 0

    def next(self) -> Document:
        self._position += 1
        return self.at(self._position - 1)

    def get_state(self) -> dict:
        return {"position": self._position}

    def at(self, position: int) -> Document:
        """The document at this position."""
        length = self._lengths[position % len(self._lengths)]
        trained = tuple(place >= length / 2 and place > 0 for place in range(length))
        return Document(location=str(position), tokens=(position + 1,) * length, trained=trained)


def stream_of(lengths: list[int], rows: int = 3) -> RowStream:
    """A stream over numbered documents."""
    return RowStream(Numbered(lengths), "numbered", rows=rows, row_length=ROW, pad_token=PAD)


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


QUESTIONS = [f"{number}+1=" for number in range(60)]


def split_of_rl(tmp_path: Path, split: Split, **column: str) -> set[str]:
    """What an RL run on these questions holds out, or trains on."""
    path = tmp_path / "rl.jsonl"
    path.write_text("".join(json.dumps({"prompt": question, **column}) + "\n" for question in QUESTIONS))
    prompts = distinct_prompts(PromptSettings(task=None, files=(str(path),), held_out_fraction=0.3), split, None)
    return {prompt.messages[-1].content for prompt in prompts}


@pytest.mark.parametrize("form", ["completion", "plain", "chat", "chat with a system message"])
def test_supervised_files_hold_out_what_an_rl_run_on_the_same_problems_holds_out(
    tmp_path: Path, tokenizer: ChatTokenizer, form: str, caplog
) -> None:
    system = [{"role": "system", "content": "sums"}] if "system" in form else []

    def record(question: str) -> dict:
        if not form.startswith("chat"):
            return {"prompt": question, "completion": "|"}
        asked = [*system, {"role": "user", "content": question}]
        return {"messages": [*asked, {"role": "assistant", "content": "|"}]}

    path = tmp_path / "sft.jsonl"
    path.write_text("".join(json.dumps(record(question)) + "\n" for question in QUESTIONS))
    settings = SupervisedSettings(
        files=(str(path),),
        held_out_fraction=0.3,
        rows_per_step=1,
        row_length=2000,
        template="plain" if form == "plain" else "chat",
    )
    text = tokenizer.decode(row_stream(settings, tokenizer).next().rows["tokens"].flatten().tolist())
    trained, held_out = split_of_rl(tmp_path, Split.TRAIN), split_of_rl(tmp_path, Split.HELD_OUT)
    shown = {question for question in QUESTIONS if re.search(rf"(?<!\d){re.escape(question)}", text)}
    assert shown == trained
    assert held_out == set(QUESTIONS) - trained
    assert f"data.held_out_fraction=0.3: {len(held_out)} of the first 60 documents are held out" in caplog.text


def test_a_chat_is_held_out_for_any_of_its_answers_and_by_the_column_that_decides_elsewhere() -> None:
    held_out = next(q for q in QUESTIONS if split_of_key(f"user\x1f{q}", 0.3) is Split.HELD_OUT)
    trained = next(q for q in QUESTIONS if split_of_key(f"user\x1f{q}", 0.3) is Split.TRAIN)

    def chat(*turns: str) -> dict:
        roles = itertools.cycle(["user", "assistant"])
        return {"messages": [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]}

    assert is_held_out("x", chat(held_out, "1", trained, "2"), 0.3)
    assert not is_held_out("x", chat(trained, "1"), 0.3)
    assert is_held_out("x", chat(trained, "1") | {"split_key": f"user\x1f{held_out}"}, 0.3)
    assert not is_held_out("x", chat(held_out, "1"), 0.0)


def test_files_whose_every_document_is_held_out_are_refused(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "1+1=", "completion": "2"}\n')
    with pytest.raises(ConfigError, match="no document to train on; 1 of 1 are held out"):
        row_stream(SupervisedSettings(files=(str(path),), held_out_fraction=0.999999), tokenizer)


def test_supervised_settings_without_effect_are_told() -> None:
    digits = ArithmeticSettings(max_digits=3)
    of_files = SupervisedSettings(files=("gone.jsonl",), arithmetic=digits, forgotten_carry_rate=0.5)
    assert of_files.problems("data.") == [
        "data.arithmetic.max_digits=3: has no effect, data.task is null",
        "data.files: gone.jsonl does not exist",
        "data.forgotten_carry_rate=0.5: has no effect, data.task is null",
    ]
    assert SupervisedSettings(task="arithmetic", arithmetic=digits, template="plain").problems("data.") == [
        "data.template=plain: has no effect, documents come from data.task"
    ]


def test_a_task_demonstrates_no_held_out_problem(tokenizer: ChatTokenizer) -> None:  # prompts-1
    settings = SupervisedSettings(task="arithmetic", held_out_fraction=0.5)
    demonstrated = row_stream(settings, tokenizer)
    prompts = PromptStream(PromptSettings(held_out_fraction=0.5))
    batch = demonstrated.next()
    text = tokenizer.decode(batch.rows["tokens"].flatten().tolist(), skip_special_tokens=False)
    questions = [prompts.next().messages[0].content for _ in range(batch.batch_sequences)]
    assert all(f"<|user|>{question}<|end|>" in text for question in questions)
