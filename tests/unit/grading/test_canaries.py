"""Tests that must fail stand among any tests of a file, under a name that pytest collects."""

import ast
import unittest
from random import Random
from typing import Any

import pytest

from goaly.grading.canaries import with_canary, with_canary_method

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


METHODS = """import unittest

class Base(unittest.TestCase):
    def test_of_all(self):
        self.assertTrue(1)

class CartTests(Base):
    value = 3

    @unittest.skip("later")
    def test_later(self):
        pass

    def test_real_values(self):
        for value in (1, 2):
            self.assertTrue(value)

    def helper(self):
        return 1
"""


@pytest.mark.parametrize(
    ("tests", "classes"),
    [
        (["CartTests::test_real_values", "CartTests::test_later"], {"CartTests"}),
        (["CartTests::test_later"], None),
        ([], None),
    ],
)
def test_a_canary_of_unittest_is_a_failing_method_of_an_expected_class_or_of_its_own(tests: list[str], classes):
    for seed in range(40):
        source, canary = with_canary_method(METHODS, tests, Random(seed))
        kind, _, name = canary.partition("::")
        assert classes is None or kind in classes
        namespace: dict[str, Any] = {"__name__": "tests_of_cart"}
        exec(compile(source, "tests.py", "exec"), namespace)
        assert name in unittest.defaultTestLoader.getTestCaseNames(namespace[kind])
        result = unittest.TestResult()
        namespace[kind](name).run(result)
        assert not result.wasSuccessful()
        assert result.testsRun == 1
        for other in tests:
            kind, _, name = other.partition("::")
            ended = unittest.TestResult()
            namespace[kind](name).run(ended)
            assert ended.wasSuccessful()
