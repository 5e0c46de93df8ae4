"""The ids of Django's, SymPy's and pytest's tests, as they are published and as a report has them."""

import pytest

from goaly.grading.published_ids import report_ids
from goaly.grading.task import TestSuite

FILES = {"tests/app/tests.py", "tests/app/nested/__init__.py", "plain/checks.py", "tests/test_utils/tests.py"}


@pytest.mark.parametrize(
    ("published", "reported"),
    [
        ("test_y (app.tests.TestA)", "tests/app/tests.py::TestA::test_y"),
        ("test_y (app.tests.TestA.test_y)", "tests/app/tests.py::TestA::test_y"),
        ("test_y (app.tests.Outer.Inner)", "tests/app/tests.py::Outer.Inner::test_y"),
        ("test_y (app.nested.TestB)", "tests/app/nested/__init__.py::TestB::test_y"),
        ("test_y (plain.checks.TestC)", "plain/checks.py::TestC::test_y"),
        ("tests (test_utils.tests)", "tests (test_utils.tests)"),
        ("test_y (nowhere.tests.TestA)", "test_y (nowhere.tests.TestA)"),
        ("Named URLs should be reversible: a (b).", "Named URLs should be reversible: a (b)."),
    ],
)
def test_an_id_of_django_is_a_method_of_a_file_or_the_first_line_of_a_description(published: str, reported: str):
    suite = TestSuite(fail_to_pass=(published,), runner="django", test_files=("tests/app/tests.py",))
    assert report_ids(suite, FILES) == {published: (reported,)}


def test_an_id_of_sympy_is_a_function_of_each_file_and_one_of_pytest_itself():
    files = ("sympy/core/tests/test_a.py", "sympy/core/tests/test_b.py")
    suite = TestSuite(fail_to_pass=("test_x",), runner="sympy", test_files=files)
    assert report_ids(suite, FILES) == {"test_x": tuple(f"{file}::test_x" for file in files)}
    suite = TestSuite(fail_to_pass=("t.py::a[1",), pass_to_pass=("t.py::T::b",))
    assert report_ids(suite, FILES) == {"t.py::a[1": ("t.py::a[1",), "t.py::T::b": ("t.py::T::b",)}
