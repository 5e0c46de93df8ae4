"""Tests that must fail stand among any tests of a file, under a name that pytest collects."""

import ast
from random import Random

import pytest

from goaly.grading.canaries import with_canary

CLASSES = """import unittest

class ContextTest(unittest.TestCase):
    def test_real_values(self):
        self.assertTrue(1)

    def runTest(self):
        pass
"""


@pytest.mark.parametrize(
    ("tests", "begins"),
    [
        (["ContextTest::test_real_values", "ContextTest::runTest"], "test_"),
        (["ContextTest::runTest"], "test_"),
        (["check_all", "ContextTest::test_real_values"], "check_"),
        (["ContextTest::testWriteBack"], "testWriteBack"),
    ],
)
def test_the_name_is_one_of_a_function_that_pytest_collects(tests: list[str], begins: str):
    for seed in range(20):
        source, name = with_canary(CLASSES, tests, Random(seed))
        made = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        assert made == [name]
        assert name.startswith(begins)


PARAMETERS = """import pytest

def test_first_values():
    assert True

CASES = [1, 2]

@pytest.mark.parametrize("case", CASES)
def test_other_cases(case):
    assert case

def test_last_values():
    assert True
"""


def test_a_copy_stands_where_the_names_of_its_decorators_are_defined():
    places = set()
    for seed in range(60):
        source, name = with_canary(PARAMETERS, ["test_other_cases"], Random(seed))
        namespace: dict[str, object] = {}
        exec(compile(source, "test_file", "exec"), namespace)
        assert name in namespace
        places.add(source.index(f"def {name}(") > source.index("def test_last_values("))
    assert places == {True, False}
