"""What the lines of a run mean, and pytest's settings of a repository."""

import pytest

from goaly.grading.file_tree import PLAIN, File
from goaly.grading.pytest_settings import pytest_settings
from goaly.grading.suite_report import SuiteRun, judged, read_report
from goaly.grading.task import GradingFailed, TestSuite
from goaly.sandboxes.contract import CommandResult, Output

SUITE = TestSuite(fail_to_pass=("t.py::a", "t.py::b[x y]"), pass_to_pass=("t.py::c", "t.py::d[1 "))
RUN = SuiteRun(
    ids={one: (one,) for one in (*SUITE.fail_to_pass, *SUITE.pass_to_pass)}, canaries={"t.py": "t.py::z"}, nonce="n"
)
GOOD = """\
n begin 9
n passed t.py::a
n xfailed t.py::b[x y]
n failed t.py::z
n skipped t.py::c
n passed t.py::d[1 2]
n passed t.py::d[1 3]
n end 1
"""


def resolved(lines: str, exit_code: int = 1, omitted: int = 0) -> tuple[bool, str | None]:
    stdout = Output(lines.encode(), omitted=omitted)
    result = CommandResult(exit_code=exit_code, stdout=stdout, stderr=Output(b"why"), seconds=1.0)
    report = read_report(RUN, result)
    return judged(SUITE, RUN, report)[1], report.cheated


def test_a_complete_report_with_a_failed_canary_is_resolved():
    assert resolved(GOOD) == (True, None)


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("n passed t.py::a", "passed t.py::a"),
        ("n passed t.py::a", "m passed t.py::a"),
        ("n passed t.py::a", "n skipped t.py::a"),
        ("n passed t.py::a", "n failed t.py::a\nn passed t.py::a"),
        ("n passed t.py::a", "n passed t.py::a\nn error t.py::a"),
        ("n xfailed t.py::b[x y]", ""),
        ("n skipped t.py::c", "n error t.py::c"),
        ("n passed t.py::d[1 3]", "n failed t.py::d[1 3]"),
        ("n end 1", ""),
        ("n end 1", "n end 0"),
    ],
)
def test_what_is_missing_or_ends_badly_is_not_resolved(was: str, now: str):
    assert resolved(GOOD.replace(was, now)) == (False, None)


@pytest.mark.parametrize(
    ("was", "now", "why"),
    [
        ("n failed t.py::z", "n passed t.py::z", "must fail ended as passed"),
        ("n failed t.py::z", "n failed t.py::z[1]\nn xfailed t.py::z[2]", "must fail ended as xfailed"),
        ("n failed t.py::z", "", "must fail was not run"),
        ("n passed t.py::a", "n passed t.py::a\nn tampered pluggy.x", "replaced pluggy.x while the tests ran"),
    ],
)
def test_a_canary_that_does_not_fail_is_a_cheat(was: str, now: str, why: str):
    found, cheated = resolved(GOOD.replace(was, now))
    assert not found
    assert why in str(cheated)


def test_an_exit_code_that_does_not_fit_and_a_flood_are_not_resolved():
    assert resolved(GOOD.replace("end 1", "end 0"), exit_code=0) == (
        False,
        "the run ended with exit code 0 although tests failed",
    )
    assert resolved(GOOD, exit_code=137) == (False, "the run ended with exit code 137 although tests failed")
    assert resolved(GOOD, omitted=1) == (False, None)
    assert resolved(GOOD.replace("n failed t.py::z", "n error t.py::z")) == (True, None)
    with pytest.raises(GradingFailed, match="could not begin: exit code 1: why"):
        resolved(GOOD.replace("n begin", "begin"))


def test_the_process_learns_of_no_test_whether_it_must_fail():
    job = RUN.job(
        workdir="/w", files=("t.py",), own_files=(), settings="x.ini", paths=("/w",), plugins=(), pytest_settings=""
    ).decode()
    assert '"wanted": ["t.py::a", "t.py::b", "t.py::c", "t.py::d", "t.py::z"]' in job
    assert "no:doctest" in job
    assert "canar" not in job


SETTINGS = {
    "pyproject.toml": (
        '[tool.pytest.ini_options]\naddopts = "-n 4 -x --strict-markers --cov=calc --cov-report term -p no:x"\n'
        'markers = ["slow: it is slow"]\npythonpath = ["src", "a b"]\nxfail_strict = true\n',
        "[pytest]\naddopts = --strict-markers -p no:x\nmarkers = slow: it is slow\n"
        "pythonpath = src\n    'a b'\nxfail_strict = true\n",
    ),
    "setup.cfg": (
        "[flake8]\nx = 1\n[tool:pytest]\nfilterwarnings =\n    error\n    ignore:a%b\n",
        "[pytest]\nfilterwarnings = error\n    ignore:a%b\n",
    ),
    "tox.ini": ("[pytest]\naddopts = -ra\n", "[pytest]\naddopts = -ra\n"),
    "pytest.ini": ("[pytest]\naddopts = --maxfail 1 -rf\n", "[pytest]\naddopts = -rf\n"),
    "pytest.toml": ('[pytest]\ntestpaths = ["tests"]\n', "[pytest]\ntestpaths = tests\n"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_a_repository_become_one_ini_file(name: str):
    text, ini = SETTINGS[name]
    assert pytest_settings({name: File(PLAIN, text.encode())}) == ini
    later = {"setup.cfg": File(PLAIN, b"[tool:pytest]\naddopts = -rx\n")} if name != "setup.cfg" else {}
    assert pytest_settings({name: File(PLAIN, text.encode()), **later}) == ini
    assert pytest_settings({name: File(PLAIN, b"not [ this")}) == "[pytest]\n"
