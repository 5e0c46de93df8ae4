"""DAPO-Math-17k and the AIME files are read as they were published: by the names of their columns."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from goaly.prompts.files import distinct_prompts_of, read_prompts
from goaly.prompts.mixture import unreadable
from goaly.prompts.prompt import Prompt
from goaly.prompts.settings import ColumnSettings, PromptSettings
from goaly.prompts.stream import PromptStream
from goaly.rollout.evaluation import ProblemSets
from goaly.rollout.evaluation_settings import EvaluationSet, EvaluationSettings

DAPO = ColumnSettings(answer="reward_model.ground_truth", id="extra_info.index", source="data_source")
BOXED = "{prompt}\n\nPut your final answer within \\boxed{}."
PROBLEMS = 5


def dapo_record(number: int) -> dict[str, Any]:
    asked = f"Find the sum of the first {number} odd numbers."
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": f"Solve the problem.\n\n{asked}\n\nEnd with a line Answer: $Answer", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(number**2), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"{number:08d}-4f0e-4d9c-8a3e-000000000000"},
    }


def written(path: Path, records: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=7)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture(params=["dapo.parquet", "dapo.jsonl"])
def dapo_file(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Every problem four times, in an order of their own."""
    return written(tmp_path / request.param, [dapo_record(number % PROBLEMS) for number in range(4 * PROBLEMS)])


def test_a_record_of_dapo_math_is_a_prompt_with_answer_id_and_source(dapo_file: str):
    first, *_ = read_prompts([dapo_file], DAPO)
    wanted = dapo_record(0)
    assert [message.as_dict() for message in first.messages] == wanted["prompt"]
    assert (first.answer, first.id, first.source) == ("0", wanted["extra_info"]["index"], "math_dapo")
    assert first.metadata == {"data_source": "math_dapo", "ability": "MATH"}  # the answer is in none


def test_a_file_that_repeats_its_problems_gives_each_once_a_pass(dapo_file: str):
    assert len(read_prompts([dapo_file], DAPO)) == 4 * PROBLEMS
    stream = PromptStream(settings(dapo_file))
    for _ in range(3):
        assert Counter(stream.next().answer for _ in range(PROBLEMS)) == Counter(str(n**2) for n in range(PROBLEMS))


def test_a_stream_without_repetitions_resumes_where_it_was(dapo_file: str):
    """prompts-3"""
    stream = PromptStream(settings(dapo_file))
    before = [stream.next() for _ in range(PROBLEMS + 2)]
    state = stream.state_dict()
    resumed = PromptStream(settings(dapo_file))
    resumed.load_state_dict(state)
    assert [resumed.next() for _ in range(8)] == [stream.next() for _ in range(8)] != before
    with pytest.raises(ValueError, match="but the saved state has"):
        PromptStream(settings(dapo_file, distinct=False)).load_state_dict(state)


def test_the_same_question_with_another_answer_is_another_problem(tmp_path: Path):
    other = {**dapo_record(1), "reward_model": {"ground_truth": "7", "style": ""}}
    for name in ("a.jsonl", "a.parquet"):
        file = written(tmp_path / name, [dapo_record(1), other, dapo_record(1)])
        assert [prompt.answer for prompt in distinct_prompts_of(file, DAPO)] == ["1", "7"]


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_all_chats_and_missing_values_are_told_apart_in_both_kinds_of_files(name: str, tmp_path: Path):
    user, system = {"role": "user", "content": "1"}, {"role": "system", "content": "be brief"}
    rows = [{"messages": chat, "answer": a} for chat in ([user], [system, user], [user, user]) for a in ("1", None)]
    file = written(tmp_path / name, [*rows, *reversed(rows)])
    assert [(len(prompt.messages), prompt.answer) for prompt in distinct_prompts_of(file)] == [
        (1, "1"), (1, None), (2, "1"), (2, None), (2, "1"), (2, None)
    ]  # fmt: skip


AIME = {  # the published columns, and the settings for them
    "2024": (
        [{"ID": f"2024-I-{n}", "Problem": f"Find {n} + 1.", "Solution": "Add.", "Answer": n + 1} for n in range(3)],
        ColumnSettings(prompt="Problem", answer="Answer", id="ID", wording=BOXED),
    ),
    "2024-hf": (
        [
            {"id": n, "problem": f"Find {n} + 1.", "solution": "", "answer": f"{n + 1:03d}", "url": "", "year": "2024"}
            for n in range(60, 63)
        ],
        ColumnSettings(prompt="problem", wording=BOXED),
    ),
    "2025": (
        [{"question": f"Find {n} + 1.", "answer": answer} for n, answer in enumerate(("1", "2", "336^\\circ"))],
        ColumnSettings(prompt="question", wording=BOXED),
    ),
    "2024-dapo": ([dapo_record(n % 3) for n in range(96)], DAPO),  # as published beside DAPO-Math-17k: 32 times
}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", AIME)
def test_an_aime_file_is_an_evaluation_set_by_the_names_of_its_columns(name: str, suffix: str, tmp_path: Path):
    records, columns = AIME[name]
    file = written(tmp_path / f"aime.{suffix}", records)
    aime = EvaluationSet(files=(file,), columns=columns, verifier="goaly.reward.maths:verify")
    (found,) = ProblemSets(EvaluationSettings(sets={"aime": aime}), PromptSettings()).chosen()
    assert len(found.prompts) == 3
    assert all(isinstance(prompt.answer, str) and prompt.verifier for prompt in found.prompts)
    if columns.prompt is not None:
        assert found.prompts[0].messages[0].content.endswith("1.\n\nPut your final answer within \\boxed{}.")


def settings(file: str, columns: ColumnSettings = DAPO, *, distinct: bool = True) -> PromptSettings:
    return PromptSettings(task=None, files=(file,), columns=columns, distinct=distinct, held_out_fraction=0.0)


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        (ColumnSettings(prompt="question"), "has no value in columns.prompt=question; its columns are data_source, "),
        (ColumnSettings(answer="reward_model.truth"), "has no value in columns.answer=reward_model.truth; its columns"),
        (ColumnSettings(prompt="ability.x"), "has no value in columns.prompt=ability.x"),
        (ColumnSettings(wording="{prompt}?"), "`prompt` must be a text where columns.wording is set"),
        (ColumnSettings(prompt="reward_model"), "`reward_model` must be a list of {role, content}"),
    ],
)
@pytest.mark.parametrize("distinct", [True, False])
def test_a_column_that_is_not_there_is_told_with_the_columns_that_are(
    columns: ColumnSettings, why: str, distinct: bool, dapo_file: str
):
    problem = unreadable(settings(dapo_file, columns, distinct=distinct))
    assert problem is not None
    assert dapo_file in problem
    assert why in problem


def test_columns_without_files_have_no_effect_and_a_wording_has_a_place_for_the_problem():
    alone = PromptSettings(columns=DAPO, distinct=True)
    assert [line.partition(":")[0] for line in alone.problems("prompts.")] == [
        "prompts.distinct=true",
        "prompts.columns.answer=reward_model.ground_truth",
        "prompts.columns.id=extra_info.index",
        "prompts.columns.source=data_source",
    ]
    assert "has no effect" in EvaluationSet(columns=ColumnSettings(prompt="x")).problems("")[0]
    assert ColumnSettings(wording="Answer briefly.").problems("prompts.columns.") == [
        "prompts.columns.wording=Answer briefly.: must contain {prompt}, which becomes the text of the problem"
    ]


def test_files_of_millions_of_rows_in_one_group_are_read_in_small_batches(tmp_path: Path):
    path = tmp_path / "long.parquet"
    table = pyarrow.Table.from_pylist([{"prompt": f"{number}+1="} for number in range(5000)])
    pyarrow.parquet.write_table(table, path)
    prompts: tuple[Prompt, ...] = read_prompts([path])
    assert [prompt.messages[0].content for prompt in islice(prompts, 4998, None)] == ["4998+1=", "4999+1="]
