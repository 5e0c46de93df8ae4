"""Tests that must fail: they fail, they look like their neighbours, and the file works as before."""

import ast
import inspect
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import pytest

from goaly.coding.canaries import with_canary

SOURCE = '''
import pytest

VALUES = [1, 2]


@pytest.mark.parametrize("value", VALUES)
def test_small_values(value):
    text = """a
b"""
    assert value < 3 and text


def test_of_a_folder(tmp_path):
    assert tmp_path.exists()


@pytest.fixture
def made():
    return 1


def test_with_a_fixture(made): assert made == 1


class TestInside:
    def test_inside(self):
        assert VALUES
'''
TESTS = ["test_small_values", "test_of_a_folder", "test_with_a_fixture", "TestInside::test_inside"]


@pytest.mark.parametrize("seed", range(12))
def test_a_canary_fails_among_tests_that_pass(tmp_path: Path, seed: int):
    source, name = with_canary(SOURCE, TESTS, Random(seed))
    assert name not in SOURCE
    module: dict[str, Any] = {}
    exec(compile(source, "test_x.py", "exec"), module)
    given = {"value": 1, "tmp_path": tmp_path, "made": 1}
    functions = {one: value for one, value in module.items() if one.startswith("test_")}
    assert len(functions) == 4
    for one, function in functions.items():
        asked = {key: given[key] for key in inspect.signature(function).parameters}
        with pytest.raises((AssertionError, ValueError, KeyError)) if one == name else nullcontext():
            function(**asked)
    module["TestInside"]().test_inside()


def test_a_canary_is_a_copy_of_a_real_test_where_one_may_run_twice():
    names = {"test_small_values": 0, "test_of_a_folder": 0}
    for seed in range(30):
        source, name = with_canary(SOURCE, TESTS, Random(seed))
        canary = next(one for one in ast.parse(source).body if isinstance(one, ast.FunctionDef) and one.name == name)
        names["test_small_values" if canary.decorator_list else "test_of_a_folder"] += 1
    assert min(names.values()) > 5
    skipping = "def test_x():\n    import pytest\n    pytest.skip('no')\n"
    assert with_canary(skipping, ["test_x"], Random(1))[0].count("skip") == 1


def test_what_python_cannot_read_here_gets_a_canary_at_its_end():
    source, name = with_canary("print 'old'\n\ndef check_it(): pass\n", ["check_it"], Random(1))
    assert source.startswith("print 'old'\n")
    assert name.startswith("check_")
    assert f"def {name}():" in source
