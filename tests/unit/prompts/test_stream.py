"""Prompt streams: exact resuming and refused states (prompts-3), disjoint splits (prompts-1)."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from goaly.base.config.check import check
from goaly.base.config.settings import Section
from goaly.prompts.mixture import distinct_prompts
from goaly.prompts.prompt import Message, Prompt, Split, split_of
from goaly.prompts.settings import ArithmeticSettings, PromptSettings, SourceSettings, absent_files
from goaly.prompts.stream import PromptStream
from goaly.prompts.tasks.arithmetic import addition

TASK = PromptSettings(arithmetic=ArithmeticSettings(min_digits=1, max_digits=3))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> PromptSettings:
    """37 prompts, in a JSONL and a Parquet file."""
    folder = tmp_path_factory.mktemp("prompts")
    records = [{"prompt": f"{number}+1=", "answer": number + 1, "level": "easy"} for number in range(37)]
    (folder / "a.jsonl").write_text("\n".join(json.dumps(record) for record in records[:20]) + "\n\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records[20:]), folder / "b.parquet")
    return PromptSettings(task=None, files=(str(folder / "a.jsonl"), str(folder / "b.parquet")), held_out_fraction=0.3)


@pytest.mark.parametrize("kind", ["task", "files"])
@given(before=st.integers(0, 60), after=st.integers(1, 30))
def test_a_resumed_stream_gives_the_prompts_that_would_have_come(
    kind: str, files: PromptSettings, before: int, after: int
) -> None:
    settings = TASK if kind == "task" else files
    stream, resumed = PromptStream(settings), PromptStream(settings)
    for _ in range(before):
        stream.next()
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert [stream.next() for _ in range(after)] == [resumed.next() for _ in range(after)]


@pytest.mark.parametrize("kind", ["task", "files"])
def test_the_splits_share_no_problem(kind: str, files: PromptSettings) -> None:
    settings = TASK if kind == "task" else files
    trained = PromptStream(settings)
    seen = {trained.next().split_key for _ in range(500)}
    assert seen.isdisjoint(prompt.split_key for prompt in distinct_prompts(settings, Split.HELD_OUT, 200))


@given(first=st.integers(0, 10**8), second=st.integers(0, 10**8))
def test_both_orders_of_a_sum_are_in_one_split(first: int, second: int) -> None:
    assert split_of(addition(first, second), 0.5) is split_of(addition(second, first), 0.5)


def test_the_held_out_share_is_as_large_as_asked() -> None:
    prompts = [Prompt(id=str(i), source="x", messages=(Message(role="user", content=str(i)),)) for i in range(5000)]
    share = sum(split_of(prompt, 0.2) is Split.HELD_OUT for prompt in prompts) / len(prompts)
    assert share == pytest.approx(0.2, abs=0.02)


def test_a_pass_over_files_gives_every_training_prompt_once_and_the_next_in_another_order(
    files: PromptSettings,
) -> None:
    stream = PromptStream(files)
    first: list[str] = [stream.next().id]
    while (prompt := stream.next()).id not in first:
        first.append(prompt.id)
    second = [prompt.id] + [stream.next().id for _ in range(len(first) - 1)]
    assert sorted(first) == sorted(second)
    assert first != second
    assert len(first) + len({prompt.id for prompt in distinct_prompts(files, Split.HELD_OUT, 200)}) == 37


def test_other_columns_become_metadata_and_answers_become_text(files: PromptSettings) -> None:
    prompt = PromptStream(files).next()
    assert prompt.metadata == {"level": "easy"}
    assert prompt.answer == str(int(prompt.messages[0].content.split("+")[0]) + 1)


@pytest.mark.parametrize(
    "other",
    [
        PromptSettings(arithmetic=TASK.arithmetic, seed=1),
        PromptSettings(arithmetic=ArithmeticSettings(max_digits=4)),
        PromptSettings(arithmetic=TASK.arithmetic, held_out_fraction=0.2),
    ],
)
def test_a_state_of_another_stream_is_refused(other: PromptSettings) -> None:
    with pytest.raises(ValueError, match="but the saved state has"):
        PromptStream(other).load_state_dict(PromptStream(TASK).state_dict())


@pytest.mark.parametrize(
    ("line", "said"),
    [("{", "not JSON"), ("[1]", "must be a JSON object"), ('{"text": "1"}', "needs `messages`")],
)
def test_a_bad_record_is_refused_with_its_place(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "1"}\n' + line + "\n")
    with pytest.raises(ValueError, match=f"line 2: {said}"):
        PromptStream(PromptSettings(task=None, files=(str(path),))).next()


def test_settings_tell_all_their_problems() -> None:
    given = {"task": "sums", "files": ["a.txt", "b.jsonl"], "held_out_fraction": 1.0}
    assert check(PromptSettings, given, "prompts")[1] == [
        "prompts.held_out_fraction=1.0: must be at least 0 and below 1",
        "prompts.task=sums: must be null where prompts.files are given",
        "prompts.task=sums: must be one of arithmetic, reasoning_gym",
        "prompts.files: a.txt must end in .jsonl or .parquet",
    ]
    sources = (SourceSettings(name="a", task="arithmetic"), SourceSettings(name="b", files=("a.txt", "b.jsonl")))
    settings = PromptSettings(task=None, sources=sources)
    assert [*absent_files(settings, Section(settings, "prompts."))] == [
        "prompts.sources.1.files: b.jsonl does not exist",
    ]
