"""Test ids as sets of tasks publish them, and the ids of the same tests in a report: `FILE::CLASS::TEST`.

    pytest   tests/test_x.py::TestA::test_y          the same
    django   test_y (app.tests.TestA)                tests/app/tests.py::TestA::test_y
             test_y (app.tests.TestA.test_y)         of Python 3.11 and newer: the same
             Any text                                the tests whose description begins with this line
    sympy    test_y                                  sympy/core/tests/test_x.py::test_y, in each file that is run

Django's published ids are lines of the runner's output. It prints a test that has a docstring by the first line of it.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Final

from goaly.grading.task import Runner, TestSuite

METHOD: Final = re.compile(r"(?P<test>\w+) \((?P<place>[\w.]+)\)")
DJANGO_TESTS: Final = "tests"


def report_ids(suite: TestSuite, files: Container[str]) -> dict[str, tuple[str, ...]]:
    """The ids in the report of each expected test. `files` are the paths of the repository, with the suite's tests."""
    expected = (*suite.fail_to_pass, *suite.pass_to_pass)
    if suite.runner == "sympy":
        return {one: tuple(f"{path}::{one}" for path in suite.test_files) for one in expected}
    if suite.runner == "django":
        return {one: (_of_method(one, files) or one,) for one in expected}
    return {one: (one,) for one in expected}


def problem_of(id: str, runner: Runner) -> str | None:
    """Why an id cannot be one of this runner; None if it can."""
    if runner == "pytest" and not re.fullmatch(r"[^\s:]+\.pyi?::\S.*", id, re.DOTALL):
        return "must be pytest's, as tests/test_x.py::test_y"
    if runner == "sympy" and not id.isidentifier():
        return "must be the name of a function, as test_y"
    return None


def _of_method(id: str, files: Container[str]) -> str | None:
    """The report's id of a method; None if the id is not the name of one, or if no file has its class."""
    if (found := METHOD.fullmatch(id)) is None:
        return None
    parts = found["place"].split(".")
    if parts[-1] == found["test"] and len(parts) > 2:
        parts.pop()
    for length in range(len(parts) - 1, 0, -1):  # a class may stand in another one
        module, classes = "/".join(parts[:length]), ".".join(parts[length:])
        for path in (f"{top}{module}{end}" for top in (f"{DJANGO_TESTS}/", "") for end in (".py", "/__init__.py")):
            if path in files:
                return f"{path}::{classes}::{found['test']}"
    return None
