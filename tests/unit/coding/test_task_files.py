"""Any path gives its tasks, and prompts that carry the place of a task but nothing hidden of it."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from goaly.coding.task_files import PLACE, TaskSettings, kept_lines, load, read_prompts, task_of
from goaly.grading.swe_format import SweSettings
from goaly.grading.task import TaskProblem
from goaly.prompts.mixture import distinct_prompts, empty_split, prompt_mixture, unreadable
from goaly.prompts.prompt import Split
from goaly.prompts.settings import PromptSettings
from tests.unit.grading.harbor_folders import write_harbor
from tests.unit.grading.own_folders import write_own
from tests.unit.grading.swe_rows import row, write_rows

SETTINGS = TaskSettings(swe=SweSettings(image="{id}"))
READER = "goaly.coding.task_files:read_prompts"


def many(tmp_path: Path, count: int = 40) -> Path:
    rows = [row(instance_id=f"acme__shop-{n}", problem_statement=f"Problem {n}") for n in range(count)]
    return write_rows(tmp_path / "swe_gym.jsonl", *rows)


def test_a_file_of_rows_gives_each_task_when_it_is_asked_for(tmp_path: Path) -> None:
    tasks = load(many(tmp_path), SETTINGS)
    assert len(tasks) == 40
    assert tasks.task("acme__shop-7").problem == tasks[7].problem == tasks[5:9][2].problem == "Problem 7"
    with pytest.raises(TaskProblem, match="acme__shop-40: there is no such task"):
        tasks.task("acme__shop-40")


def test_parquet_has_the_same_tasks_also_behind_the_first_row_group(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in many(tmp_path).read_text().splitlines()]
    table = pyarrow.Table.from_pylist([{**one, "FAIL_TO_PASS": json.loads(one["FAIL_TO_PASS"])} for one in rows])
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet", row_group_size=7)
    assert [task.id for task in load(tmp_path / "train.parquet", SETTINGS)] == [one["instance_id"] for one in rows]
    assert load(tmp_path / "train.parquet", SETTINGS)[23].tests == load(tmp_path / "swe_gym.jsonl", SETTINGS)[23].tests


def test_folders_of_both_forms_and_a_list_of_them_are_read(tmp_path: Path) -> None:
    write_harbor(tmp_path / "tasks/harbors")
    write_own(tmp_path / "tasks/own")
    (tmp_path / "tasks/notes").mkdir()
    listed = write_rows(tmp_path / "kept.jsonl", {"task": "tasks/own"}, {"task": "tasks/harbors"})
    assert [task.id for task in load(tmp_path / "tasks")] == ["acme/count-lines", "own"]
    assert [task.id for task in load(tmp_path / "tasks/own")] == ["own"]
    assert [task.id for task in load(listed)] == ["own", "acme/count-lines"]


def test_a_root_takes_the_place_of_all_images(tmp_path: Path) -> None:
    write_harbor(tmp_path / "harbors")
    write_own(tmp_path / "own")
    for task in load(tmp_path, TaskSettings(root="/")):
        assert (task.root, task.image) == (Path("/"), None)


def test_a_task_that_comes_twice_is_an_error_with_both_places(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", row(), row(instance_id="acme__other-1"), row())
    with pytest.raises(TaskProblem, match=r"rows\.jsonl#\d+: acme__Shop-12 is there already, at .*rows\.jsonl#0"):
        load(file)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no tasks"),
        ("{}\n", r"line 1: `instance_id`=null: must be a text, or the row one of \{task: FOLDER\}"),
        ("\n[1]\n", "line 2: must be a JSON object"),
        (f"{json.dumps(row())}\n{{\n", "line 2: not JSON"),
        ('{"task": "gone"}\n', "has no task.toml"),
    ],
)
def test_a_damaged_file_is_one_error_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(TaskProblem, match=says):
        load(tmp_path / "rows.jsonl")


def test_a_path_that_is_no_file_of_tasks_is_an_error(tmp_path: Path) -> None:
    for path, says in (("gone.jsonl", "no such file"), ("", "has no task.toml"), ("a.csv", "must be a folder, or end")):
        (tmp_path / "a.csv").touch()
        with pytest.raises(TaskProblem, match=says):
            load(tmp_path / path)


def test_prompts_lead_to_their_tasks_and_have_nothing_hidden(tmp_path: Path) -> None:
    write_harbor(tmp_path / "tasks/harbors")
    write_own(tmp_path / "tasks/own")
    prompts = [*read_prompts(str(many(tmp_path, 3))), *read_prompts(str(tmp_path / "tasks"))]
    for prompt in prompts:
        task = task_of(prompt, SETTINGS)
        assert (task.id, task.problem) == (prompt.id, prompt.messages[0].content)
        shown = repr(prompt)
        assert "::" not in shown
        assert "diff --git" not in shown
        assert prompt.answer is None
    assert {prompt.source for prompt in prompts} == {"swe_gym", "tasks"}


def test_a_file_that_has_changed_under_a_prompt_is_an_error(tmp_path: Path) -> None:
    _, prompt = read_prompts(str(many(tmp_path, 2)))
    many(tmp_path, 1)
    with pytest.raises(TaskProblem, match="not JSON"):
        task_of(prompt, SETTINGS)
    write_rows(tmp_path / "swe_gym.jsonl", row(instance_id="acme__none-1", problem_statement="Problem 0"), row())
    with pytest.raises(TaskProblem, match="is acme__Shop-12 now, was acme__shop-1"):
        task_of(prompt, SETTINGS)


def test_a_bad_row_stops_a_run_before_it_starts(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", row(), row(instance_id="acme__shop-2", PASS_TO_PASS="no list"))
    settings = PromptSettings(task=None, files=(str(file),), reader=READER)
    assert "rows.jsonl, line 2: acme__shop-2: `PASS_TO_PASS`=no list" in str(unreadable(settings))


def test_a_run_splits_and_resumes_prompts_of_tasks_like_any_others(tmp_path: Path) -> None:
    settings = PromptSettings(task=None, files=(str(many(tmp_path)),), reader=READER, held_out_fraction=0.3)
    assert settings.problems("prompts.") == []
    held_out = {prompt.id for prompt in distinct_prompts(settings, Split.HELD_OUT, None)}
    train = {prompt.id for prompt in distinct_prompts(settings, Split.TRAIN, None)}
    assert held_out.isdisjoint(train)
    assert len(held_out | train) == 40
    mixture = prompt_mixture(settings)
    given = [mixture.next() for _ in range(10)]
    assert all(PLACE in prompt.metadata for prompt in given)
    state = mixture.state_dict()
    after = [mixture.next().id for _ in range(50)]
    resumed = prompt_mixture(settings)
    resumed.load_state_dict(state)
    assert [resumed.next().id for _ in range(50)] == after
    many(tmp_path, 41)
    with pytest.raises(ValueError, match="saved state"):
        prompt_mixture(settings).load_state_dict(state)


def test_a_reader_that_is_not_there_or_keys_that_it_does_not_read_are_refused(tmp_path: Path) -> None:
    files = (str(many(tmp_path)),)
    for settings, says in (
        (
            PromptSettings(task=None, files=files, reader="goaly.none:read"),
            "prompts.reader=goaly.none:read: cannot",
        ),
        (
            PromptSettings(task=None, files=files, reader=READER, distinct=True),
            "prompts.distinct=true: has no effect",
        ),
        (PromptSettings(reader=READER), "has no effect, prompts.files is empty"),
    ):
        (problem,) = settings.problems("prompts.")
        assert says in problem
    assert empty_split(PromptSettings(task=None, files=files, reader=READER), Split.HELD_OUT) is None


def test_kept_tasks_are_a_file_of_tasks_again(tmp_path: Path) -> None:
    write_harbor(tmp_path / "tasks/harbors")
    write_own(tmp_path / "tasks/own")
    (tmp_path / "kept").mkdir()
    for tasks in (load(many(tmp_path), SETTINGS), load(tmp_path / "tasks")):
        ids = list(tasks.places)[::2]
        (tmp_path / "kept/good.jsonl").write_text(kept_lines(tasks, ids, tmp_path / "kept"))
        kept = load(tmp_path / "kept/good.jsonl", SETTINGS)
        assert list(kept.places) == ids
        assert [task.tests for task in kept] == [tasks.task(id).tests for id in ids]
