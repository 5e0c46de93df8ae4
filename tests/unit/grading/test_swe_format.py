"""Rows of SWE-bench's form become tasks, or are refused in one sentence."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goaly.grading.swe_format import KNOWN, SweSettings, read_row
from goaly.grading.task import CodingTask, TaskProblem
from goaly.grading.task import TestSuite as Suite
from tests.unit.grading.swe_rows import PATCH, TEST_PATCH, row

IMAGES = SweSettings(image="Swebench/sweb.eval.x86_64.{owner}_1776_{name}")


def task(settings: SweSettings = IMAGES, **changes: Any) -> CodingTask:
    return read_row(row(**changes), "rows.jsonl, line 3").task(settings)


def suite(**changes: Any) -> Suite:
    tests = task(**changes).tests
    assert isinstance(tests, Suite)
    return tests


def test_a_row_becomes_a_task_in_the_image_of_its_instance() -> None:
    made = task()
    assert (made.id, made.problem) == ("acme__Shop-12", "The tax is missing.")
    assert made.image == "swebench/sweb.eval.x86_64.acme_1776_shop-12"
    assert (made.workdir, made.repository.path, made.repository.base_commit) == ("/testbed", None, row()["base_commit"])
    assert made.environment["PATH"].startswith("/opt/miniconda3/envs/testbed/bin:")
    assert (made.solution, made.setup) == (PATCH, ())
    assert made.metadata.keys() == {"repo", "version", "created_at", "environment_setup_commit"}


def test_tests_are_those_of_the_patch_and_the_ids_as_published() -> None:
    tests = suite()
    assert tests.fail_to_pass == ("tests/test_price.py::test_tax",)
    assert tests.pass_to_pass == ("tests/test_cart.py::TestCart::test_add[two items",)
    assert tests.patch == TEST_PATCH
    assert tests.protected == ("tests/test_cart.py",)  # the patch brings the other one


def test_ids_may_be_a_list_or_the_json_text_of_one() -> None:
    ids = ["tests/test_price.py::test_tax", "tests/test_price.py::test_tax"]
    assert suite(FAIL_TO_PASS=ids) == suite(FAIL_TO_PASS=json.dumps(ids)) == suite()


@pytest.mark.parametrize("column", ["docker_image", "image_name"])
def test_the_image_of_a_row_wins_over_the_settings(column: str) -> None:
    assert task(**{column: "mine/shop:1"}).image == "mine/shop:1"
    assert task(SweSettings(), **{column: "mine/shop:1"}).image == "mine/shop:1"


def test_a_repository_is_laid_into_the_workdir_and_a_root_takes_the_place_of_images(tmp_path: Path) -> None:
    (tmp_path / "acme/shop").mkdir(parents=True)
    settings = SweSettings(repository=f"{tmp_path}/{{repo}}", workdir="/work")
    assert read_row(row(), "here").task(replace(settings, python="/p")).environment["PATH"].startswith("/p:")
    made = read_row(row(image_name="mine/shop"), "here").task(settings, tmp_path)
    assert (made.image, made.root, made.workdir) == (None, tmp_path, "/work")
    assert made.repository.path == tmp_path / "acme/shop"
    assert made.environment == {}


def test_neither_image_nor_repository_is_an_error_that_names_both_settings() -> None:
    with pytest.raises(TaskProblem, match=r"line 3: acme__Shop-12: .*swe\.image or .*swe\.repository"):
        task(SweSettings())


def test_a_repository_that_is_not_there_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(TaskProblem, match=r"acme__Shop-12: .*there is no .*/gone/acme__Shop-12.tar"):
        task(SweSettings(repository=f"{tmp_path}/gone/{{id}}.tar"))


@pytest.mark.parametrize("key", ["image", "repository"])
@pytest.mark.parametrize("template", ["x/{number}", "x/{id"])
def test_a_template_with_an_unknown_word_is_refused(key: str, template: str) -> None:
    (problem,) = SweSettings(**{key: template}).problems("coding.tasks.swe.")
    assert problem.startswith(f"coding.tasks.swe.{key}={template}: ")


@pytest.mark.parametrize(
    "id", ["test_x (forms.tests.FormTests)", "A docstring.", "test_solve", "[100%]", "src/x.test.ts::adds"]
)
def test_ids_of_other_runners_are_refused_by_the_instance_and_the_id(id: str) -> None:
    with pytest.raises(TaskProblem) as caught:
        task(PASS_TO_PASS=[id])
    assert str(caught.value).startswith(f"rows.jsonl, line 3: acme__Shop-12: the test id {id!r} of acme/shop: must be")


def patch_of_tests(*paths: str) -> str:
    return "".join(
        f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+x = 1\n"
        for path in paths
    )


def test_rows_of_django_and_sympy_run_the_files_of_their_test_patch_by_runners_of_their_own() -> None:
    made = suite(
        repo="django/django",
        test_patch=patch_of_tests("tests/forms/tests.py", "tests/forms/models.py", "tests/forms/a.html", "docs/x.py"),
        FAIL_TO_PASS=["test_x (forms.tests.FormTests)"],
        PASS_TO_PASS=["test_y (forms.tests.FormTests.test_y)", "A form has fields."],
    )
    assert (made.runner, made.test_files) == ("django", ("tests/forms/models.py", "tests/forms/tests.py"))
    made = suite(
        repo="sympy/sympy",
        test_patch=patch_of_tests("sympy/core/tests/test_a.py", "sympy/core/tests/helper.py", "bin/test_import.py"),
        FAIL_TO_PASS=["test_x"],
        PASS_TO_PASS=["test_y"],
    )
    assert (made.runner, made.test_files) == ("sympy", ("sympy/core/tests/test_a.py",))


def test_a_row_of_sympy_with_ids_of_pytest_runs_by_pytest_and_one_without_test_files_is_refused() -> None:
    assert suite(repo="sympy/sympy").runner == "pytest"
    with pytest.raises(TaskProblem, match="the test id 'x y' of sympy/sympy: must be the name of a function"):
        task(repo="sympy/sympy", FAIL_TO_PASS=["test_x"], PASS_TO_PASS=["x y"])
    with pytest.raises(TaskProblem, match="`test_patch` changes no file of tests"):
        task(repo="django/django", test_patch=patch_of_tests("docs/x.py"), PASS_TO_PASS=["A form has fields."])


def test_a_command_that_is_not_pytest_is_refused_by_its_name() -> None:
    assert task(install_config={"test_cmd": "pytest -rA --tb=no", "python": "3.9"}).id
    with pytest.raises(TaskProblem, match="'tox -e py'"):
        task(install_config={"test_cmd": "tox -e py"})


def test_a_bug_of_swe_smith_is_put_in_before_the_agent_starts_and_its_reverse_is_the_solution() -> None:
    made = task(
        SweSettings(),
        repo="swesmith/acme__shop.0123abcd",
        image_name="jyangballin/swesmith.x86_64.acme_1776_shop.0123abcd",
        **dict.fromkeys(("test_patch", "base_commit", "hints_text", "environment_setup_commit"), ...),
    )
    (command,) = made.setup
    assert "TAX = 7" in command
    assert made.solution is not None
    assert "-TAX = 7\n+TAX = 0\n" in made.solution
    assert made.repository.base_commit is None
    assert isinstance(made.tests, Suite)
    assert "tests/test_price.py" in made.tests.protected


def test_an_unknown_column_is_an_error_until_settings_name_it() -> None:
    with pytest.raises(TaskProblem, match=r"`weight`.*other_columns"):
        read_row(row(weight=3), "here")
    assert read_row(row(weight=3), "here", ("weight",)).metadata["weight"] == "3"


@pytest.mark.parametrize("column", ["expected_output_json", "image_assets", "before_repo_set_cmd", "fix_patch"])
def test_rows_of_other_forms_are_refused_by_their_form(column: str) -> None:
    with pytest.raises(TaskProblem, match=f"`{column}`: .* cannot be run here"):
        task(**{column: "x"})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"base_commit": None}, "`base_commit` is missing"),
        ({"problem_statement": " "}, "`problem_statement`= : must be a text that is not empty"),
        ({"patch": 7}, "`patch`=7: must be a text"),
        ({"patch": "no patch"}, "`patch`: the patch has no change that could be read"),
        ({"test_patch": "--- a/x\n+++ b/x\n@@ -1,5 +1 @@\n-1\n"}, "`test_patch`: line "),
        ({"FAIL_TO_PASS": "[]"}, "must name a test"),
        ({"FAIL_TO_PASS": "tests/test_price.py::test_tax"}, "must be a list of test ids"),
        ({"PASS_TO_PASS": ["tests/test_price.py::test_tax"]}, "which is in `FAIL_TO_PASS`, too"),
        ({"PASS_TO_PASS": ...}, "`PASS_TO_PASS` is missing"),
    ],
)
def test_a_bad_row_is_one_error_with_its_line_its_column_and_the_value(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(TaskProblem) as caught:
        task(**changes)
    assert str(caught.value).startswith("rows.jsonl, line 3: acme__Shop-12: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda one: st.lists(one, max_size=2)
)


@given(changes=st.dictionaries(st.sampled_from(sorted(KNOWN)), JSON, max_size=3))
def test_any_row_is_a_task_or_one_error(changes: dict[str, Any]) -> None:
    with suppress(TaskProblem):
        assert task(**changes).id
