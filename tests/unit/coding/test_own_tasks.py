"""The coding tasks of our own are complete, and each solution resolves its task."""

import ast
import re
import sys
from pathlib import Path

import pytest

from goaly.coding.grading import grade
from goaly.coding.task_files import load
from goaly.coding.workspace import Workspaces
from goaly.grading.file_tree import FileTree
from goaly.grading.patch_apply import apply_patch
from goaly.grading.patch_reader import read_patch
from goaly.grading.repository_files import repository_files
from goaly.grading.task import CodingTask, TestSuite

FOLDER = Path(__file__).parents[3] / "apps/coding/tasks"
TASKS = list(load(FOLDER))
MOST_BYTES = 1 << 20
FILES = range(6, 12)
"""How many files the agent finds: of the package, its tests, README.md and pyproject.toml."""


@pytest.fixture(params=TASKS, ids=[task.id for task in TASKS])
def task(request: pytest.FixtureRequest) -> CodingTask:
    return request.param


def tree(task: CodingTask) -> FileTree:
    """What the agent finds."""
    assert task.repository.path is not None
    return FileTree(repository_files(task.repository.path, most_bytes=MOST_BYTES))


def suite(task: CodingTask) -> TestSuite:
    assert isinstance(task.tests, TestSuite)
    return task.tests


def sources(task: CodingTask) -> dict[str, str]:
    """The Python files by path, hidden tests over visible ones."""
    files = {path: file.contents for path, file in tree(task).items()} | dict(suite(task).files)
    return {path: contents.decode() for path, contents in files.items() if path.endswith(".py")}


def test_the_readme_lists_every_task_once_and_has_eight_easy_ten_medium_and_six_hard_ones():
    rows = re.findall(r"^\| (\w+) \| .* \| (easy|medium|hard) \|", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(name for name, _ in rows) == [task.id for task in TASKS]
    levels = [level for _, level in rows]
    assert [levels.count(level) for level in ("easy", "medium", "hard")] == [8, 10, 6]


def test_a_repository_is_small_and_whole(task: CodingTask):
    files = tree(task)
    assert len(files) in FILES
    assert {"README.md", "pyproject.toml"} < set(files)
    assert any(path.startswith("tests/test_") for path in files)


def test_the_solution_applies_and_leaves_tests_alone(task: CodingTask):
    changed = apply_patch(tree(task), read_patch(task.solution or "", most_bytes=MOST_BYTES))
    assert changed
    assert [path for path in changed if path.startswith("tests/") or not path.endswith(".py")] == []


def test_ids_name_tests_that_are_there_and_every_test_has_one(task: CodingTask):
    ids = {one.partition("[")[0] for one in (*suite(task).fail_to_pass, *suite(task).pass_to_pass)}
    found = {
        f"{path}::{node.name}"
        for path, source in sources(task).items()
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert ids == found


def test_only_the_standard_library_and_pytest_are_imported(task: CodingTask):
    packages = {path.partition("/")[0] for path in sources(task)}
    known = sys.stdlib_module_names | packages | {"pytest"}
    modules = set()
    for source in sources(task).values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                modules |= {name.name for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules.add(node.module)
    assert {module for module in modules if module.partition(".")[0] not in known} == set()


@pytest.mark.slow
async def test_the_solution_resolves_the_task_and_no_change_does_not(workspaces: Workspaces, task: CodingTask):
    solved = await grade(workspaces, task, task.solution or "")
    assert (solved.score, solved.cheated) == (1.0, None), solved.log
    untouched = await grade(workspaces, task, "")
    passed = {one for one, outcome in untouched.outcomes.items() if outcome == "passed"}
    assert (untouched.score, passed) == (0.0, set(suite(task).pass_to_pass))
