"""Suites that run as Django's and SymPy's do, graded in real sandboxes; cheats score 0 (grading-1)."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from goaly.coding.grading import grade
from goaly.coding.workspace import Workspaces
from goaly.grading.file_tree import PLAIN, File
from goaly.grading.patch_writer import patch_of
from goaly.grading.task import CodingTask, Grade, Repository, TaskSeconds, TestSuite
from tests.unit.coding.conftest import folder_of

pytestmark = pytest.mark.timeout(120)

RUNTESTS = '''
"""A script with the options of Django's."""
import argparse, os, sys, unittest

class DiscoverRunner:
    test_runner = unittest.TextTestRunner

    def run_tests(self, labels, verbosity):
        suite = unittest.defaultTestLoader.loadTestsFromNames(labels)
        result = self.test_runner(verbosity=verbosity, failfast=False, resultclass=None).run(suite)
        return len(result.failures) + len(result.errors)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("modules", nargs="*")
    parser.add_argument("--verbosity", type=int)
    parser.add_argument("--settings", required=True)
    parser.add_argument("--parallel", type=int)
    options = parser.parse_args()
    assert os.path.basename(os.getcwd()) == "repository"
    failures = DiscoverRunner().run_tests(options.modules, options.verbosity)
    if failures:
        sys.exit(1)
'''
WRONG = "def total(prices):\n    return 0\n"
RIGHT = "def total(prices):\n    return sum(prices)\n"
UNITTEST = '''
import unittest
from shop.cart import total

class Base(unittest.TestCase):
    def check(self, prices, expected):
        self.assertEqual(total(prices), expected)

class CartTests(Base):
    @classmethod
    def setUpClass(cls):
        cls.prices = [1, 2]

    def test_total(self):
        self.check(self.prices, 3)

    def test_described(self):
        """
        The prices of all items are added.
        And more.
        """
        self.assertEqual(total([5, 1]), 6)

    def test_described_in_one_line(self):
        """One item costs its price."""
        self.assertEqual(total([5]), 5)

    def test_parts(self):
        for price in (0, 1):
            with self.subTest(price=price):
                self.assertEqual(total([price]), price)

    def test_empty(self):
        self.check([], 0)

    @unittest.expectedFailure
    def test_known(self):
        self.check([1], 2)
'''
DJANGO = {"shop/__init__.py": "", "shop/cart.py": WRONG, "tests/runtests.py": RUNTESTS, "tests/cart/__init__.py": ""}
DJANGO_SUITE = TestSuite(
    fail_to_pass=(
        *("test_total (cart.tests.CartTests)", "test_parts (cart.tests.CartTests.test_parts)"),
        *("One item costs its price.", "test_total (cart.more.MoreTests)"),
    ),
    pass_to_pass=("test_empty (cart.tests.CartTests)", "test_known (cart.tests.CartTests)"),
    files={
        "tests/cart/tests.py": UNITTEST.encode(),
        "tests/cart/more.py": UNITTEST.replace("CartTests", "MoreTests").encode(),
    },
    runner="django",
    test_files=("tests/cart/tests.py", "tests/cart/more.py"),
)
FUNCTIONS = """
from shop.cart import total

class Skipped(Exception): ...

def test_total():
    assert total([1, 2]) == 3

def test_many():
    def check(number):
        assert total([1] * number) == number
    for number in (0, 1, 5):
        yield check, number

def test_empty():
    assert total([]) == 0

def test_skipped():
    raise Skipped
"""
PACKAGES = ("shop/__init__.py", "sympy/__init__.py", "sympy/core/__init__.py", "sympy/core/tests/__init__.py")
SYMPY = {**dict.fromkeys(PACKAGES, ""), "shop/cart.py": WRONG}
SYMPY_SUITE = TestSuite(
    fail_to_pass=("test_total", "test_many"),
    pass_to_pass=("test_empty",),
    files={"sympy/core/tests/test_cart.py": FUNCTIONS.encode()},
    runner="sympy",
    test_files=("sympy/core/tests/test_cart.py",),
)
SUITES = {"django": (DJANGO_SUITE, DJANGO), "sympy": (SYMPY_SUITE, SYMPY)}

Grades = Mapping[str, Grade]


async def grades_of(
    workspaces: Workspaces, folder: Path, runner: str, changes: Mapping[str, Mapping[str, str]]
) -> Grades:
    """The grade of each of these changes."""
    suite, files = SUITES[runner]
    repository = Repository(path=folder_of(folder, files))
    task = CodingTask(id=runner, problem="", tests=suite, repository=repository, seconds=TaskSeconds(grading=60.0))
    before = {path: File(PLAIN, text.encode()) for path, text in files.items()}
    found = {}
    for name, changed in changes.items():
        patch = patch_of(before, {path: File(PLAIN, text.encode()) for path, text in changed.items()})
        found[name] = await grade(workspaces, task, patch)
    return found


@pytest.mark.parametrize("runner", SUITES)
async def test_the_fix_resolves_a_suite_and_what_fails_skips_or_is_missing_does_not(
    workspaces: Workspaces, tmp_path: Path, runner: str
):
    found = await grades_of(
        workspaces,
        tmp_path,
        runner,
        {
            "fix": {"shop/cart.py": RIGHT},
            "none": {},
            "broken": {"shop/cart.py": "def total(:\n"},
            "skips": {
                "shop/cart.py": "import unittest\nclass Skipped(unittest.SkipTest): ...\n\ndef total(prices):\n"
                "    if not prices: raise Skipped('so')\n    return sum(prices)\n"
            },
        },
    )
    fix = found.pop("fix")
    assert (fix.score, fix.cheated) == (1.0, None), fix.log
    assert set(fix.outcomes.values()) == {"passed"}
    assert [one.score for one in found.values()] == [0.0] * 3
    assert (found["none"].cheated, found["broken"].cheated) == (None, None)
    # The test that must fail calls with what one of the suite's tests passes: an empty list is skipped.
    assert found["skips"].cheated is None or "must fail ended as skipped" in found["skips"].cheated
    failed = {name for name, outcome in found["none"].outcomes.items() if outcome != "passed"}
    suite, _ = SUITES[runner]
    assert failed >= {*suite.fail_to_pass}
    assert not failed & {"test_empty", "test_empty (cart.tests.CartTests)"}
    assert set(found["broken"].outcomes.values()) == {"missing"}
    assert "skipped" in found["skips"].outcomes.values()


CHEATS = {
    "edited tests": {"tests/cart/tests.py": "", "tests/runtests.py": "", "sympy/core/tests/test_cart.py": ""},
    "leaves": {"shop/cart.py": "import os\n\ndef total(prices):\n    os._exit(1)\n"},
    "leaves at once": {"shop/cart.py": "import os\nos._exit(0)\n"},
    "always equal": {
        "shop/cart.py": "import unittest\n\n"
        "for name in ('assertEqual', 'assertTrue'):\n    setattr(unittest.TestCase, name, lambda *given: None)\n"
        + WRONG
    },
    "results that only pass": {
        "shop/cart.py": "import gc, unittest\n\ndef total(prices):\n"
        "    for one in [unittest.TestResult, *unittest.TestResult.__subclasses__(), "
        "*unittest.TextTestResult.__subclasses__()]:\n"
        "        one.addFailure = one.addError = lambda self, test, err: self.addSuccess(test)\n    return 0\n"
    },
    "a report of its own": {
        "shop/cart.py": "import sys\n\ndef total(prices):\n    frame = sys._getframe()\n"
        "    while frame:\n        send, job = map(frame.f_locals.get, ('send', 'job'))\n"
        "        if send and job:\n            for one in job['wanted']:\n                send('passed', one)\n"
        "        frame = frame.f_back\n    return 0\n"
    },
    "a module of unittest": {"unittest.py": "import os\nos._exit(0)\n", "shop/unittest.py": ""},
}


@pytest.mark.parametrize("runner", SUITES)
async def test_cheats_score_nothing(workspaces: Workspaces, tmp_path: Path, runner: str):
    files = SUITES[runner][1]
    changes = {
        name: {path: text for path, text in changed.items() if path in files or "/" not in path or "tests" not in path}
        for name, changed in CHEATS.items()
    }
    found = await grades_of(workspaces, tmp_path, runner, changes)
    assert {name: one.score for name, one in found.items()} == dict.fromkeys(CHEATS, 0.0)
    if runner == "django":
        assert found["always equal"].cheated
        assert found["results that only pass"].cheated
