"""The ids of a task's tests are found by running them, and written into its `task.toml`."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.coding.tasks.observed_tests import observed_tests, with_ids
from goaly.coding.workspace import Workspaces
from goaly.grading.task import TaskProblem
from goaly.grading.task_folder import read_task
from tests.unit.grading.own_folders import FAIL_TO_PASS, PASS_TO_PASS, write_own


async def test_tests_that_the_solution_mends_and_keeps_are_found(workspaces: Workspaces, tmp_path: Path) -> None:
    task = read_task(write_own(tmp_path / "own"), without_ids=True)
    assert await observed_tests(task, workspaces, 1) == ((FAIL_TO_PASS,), (PASS_TO_PASS,))


async def test_a_solution_that_mends_nothing_and_tests_that_do_not_begin_are_errors(
    workspaces: Workspaces, tmp_path: Path
) -> None:
    folder = write_own(tmp_path / "idle")
    (folder / "solution.patch").write_text("--- a/tax.py\n+++ b/tax.py\n@@ -2 +2 @@\n-    return 0\n+    return 0.0\n")
    with pytest.raises(TaskProblem, match="task idle: no test fails without its solution and passes with it"):
        await observed_tests(read_task(folder, without_ids=True), workspaces, 1)
    folder = write_own(tmp_path / "broken")
    (folder / "repository/conftest.py").write_text("raise SystemExit('stop')\n")
    with pytest.raises(TaskProblem, match=r"task broken: its tests did not run to their end: .*stop"):
        await observed_tests(read_task(folder, without_ids=True), workspaces, 1)


IDS = st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=8), max_size=3)


@given(old=IDS, fail=IDS, keep=IDS)
def test_written_ids_are_read_and_the_rest_stays(old: list[str], fail: list[str], keep: list[str]) -> None:
    around = "# fail_to_pass = [\n[task]\nproblem = 'a [task]'  # ]\n{}safe_to_repeat = true\n\n[seconds]\nagent = 3\n"
    once = with_ids(around.format(""), old, old)
    commented = once.replace("fail_to_pass = [\n", "fail_to_pass = [  # why ]\n")
    for text in (once, commented):
        found = tomllib.loads(with_ids(text, fail, keep))
        assert found == {
            "task": {"problem": "a [task]", "fail_to_pass": fail, "pass_to_pass": keep, "safe_to_repeat": True},
            "seconds": {"agent": 3},
        }
