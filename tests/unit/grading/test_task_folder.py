"""Our own format of tasks: what a folder becomes, and one clear error for what is wrong in it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from goaly.grading.task import TaskProblem, TestSuite
from goaly.grading.task_folder import read_task
from goaly.sandboxes.contract import Limits

TOML = """
[task]
problem = "add() subtracts."
fail_to_pass = ["tests/test_add.py::test_adds"]
pass_to_pass = ["tests/test_old.py::test_zero"]
setup = ["true"]
safe_to_repeat = true
[seconds]
agent = 60
[limits]
memory_mib = 256
[environment]
LEVEL = "2"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "add"
    for name, text in {
        "task.toml": TOML,
        "repository/calc.py": "def add(a, b): return a - b\n",
        "repository/tests/test_old.py": "def test_zero(): pass\n",
        "hidden_tests/tests/test_add.py": "def test_adds(): pass\n",
        "hidden_tests/tests/__pycache__/test_add.pyc": "",
        "solution.patch": "--- a/calc.py\r\n",
    }.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes(text.encode())
    return made


def test_a_folder_becomes_a_task_with_its_tests_limits_and_solution(folder: Path):
    task = read_task(folder)
    assert (task.id, task.problem, task.setup, task.safe_to_repeat) == ("add", "add() subtracts.", ("true",), True)
    assert isinstance(task.tests, TestSuite)
    assert dict(task.tests.files) == {"tests/test_add.py": b"def test_adds(): pass\n"}
    assert task.tests.fail_to_pass == ("tests/test_add.py::test_adds",)
    assert task.repository.path == folder / "repository"
    assert task.limits == Limits(memory_mib=256)
    assert (task.seconds.agent, task.environment, task.solution) == (60, {"LEVEL": "2"}, "--- a/calc.py\r\n")


WRONG: dict[str, Callable[[str], str]] = {
    "not a TOML file": lambda text: text + "[",
    "task.fail_to_pass=[]: must be the ids of at least one test": lambda text: text.replace(
        '["tests/test_add.py::test_adds"]', "[]"
    ),
    "task.problems: no such key": lambda text: text.replace("problem =", "problems ="),
    "give the problem once": lambda text: text.replace('problem = "add() subtracts."', ""),
    "tests/test_gone.py is neither in hidden_tests/ nor in repository/": lambda text: text.replace(
        "test_old.py", "test_gone.py"
    ),
    "task.pass_to_pass='test_zero': must be ids such as": lambda text: text.replace(
        "tests/test_old.py::test_zero", "test_zero"
    ),
    "is in fail_to_pass and in pass_to_pass": lambda text: text.replace(
        "tests/test_old.py::test_zero", "tests/test_add.py::test_adds"
    ),
    "task.setup='true': must be a list of texts": lambda text: text.replace('["true"]', '"true"'),
    "task.safe_to_repeat=1: must be true or false": lambda text: text.replace(
        "safe_to_repeat = true", "safe_to_repeat = 1"
    ),
    "seconds.agent=0: must be a number above 0": lambda text: text.replace("agent = 60", "agent = 0"),
    "limits.memory_mib=2.5: must be an integer": lambda text: text.replace("256", "2.5"),
    "limits.memory": lambda text: text.replace("memory_mib", "memory"),
    "environment.LEVEL=2: must be a text": lambda text: text.replace('"2"', "2"),
    "task='x': must be a section": lambda text: 'task = "x"',
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_file_gives_one_clear_error(folder: Path, message: str):
    file = folder / "task.toml"
    file.write_text(WRONG[message](TOML))
    with pytest.raises(TaskProblem) as caught:
        read_task(folder)
    assert message in str(caught.value)
    assert str(file) in str(caught.value)


def test_missing_parts_are_named(folder: Path, tmp_path: Path):
    (folder / "repository").rename(folder / "repo")
    with pytest.raises(TaskProblem, match="repository: there is no such folder"):
        read_task(folder)
    with pytest.raises(TaskProblem, match=r"task\.toml: there is no such file"):
        read_task(tmp_path)


def test_the_problem_may_be_a_file_and_hidden_tests_are_no_links(folder: Path):
    (folder / "task.toml").write_text(TOML.replace('problem = "add() subtracts."', ""))
    (folder / "problem.md").write_text("# Bug\n")
    assert read_task(folder).problem == "# Bug"
    (folder / "hidden_tests/tests/link.py").symlink_to("test_add.py")
    with pytest.raises(TaskProblem, match="a link; must be a file"):
        read_task(folder)
