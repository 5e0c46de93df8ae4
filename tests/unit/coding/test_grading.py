"""Grades of honest patches, in real sandboxes (grading-1), and failures that are no grades (grading-2)."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from goaly.coding.grading import grade
from goaly.coding.workspace import Workspaces
from goaly.grading.file_tree import EXECUTABLE, PLAIN, File
from goaly.grading.patch_writer import patch_of
from goaly.grading.task import CodingTask, Grade, GradingFailed, Repository, TaskSeconds, TestScript, TestSuite
from goaly.sandboxes.contract import Entry, Limits, SandboxUnavailable
from goaly.sandboxes.sandbox import Sandbox
from tests.unit.coding.conftest import folder_of

FILES = {
    "calc/__init__.py": "",
    "calc/core.py": "def add(a, b):\n    return a - b\n",
    "calc/old.py": "LIMIT = 3\n",
    "conftest.py": "import pytest\n\n@pytest.fixture\ndef two():\n    return 2\n",
    "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["quick: a mark"]\naddopts = "-x --strict-markers"\n',
    "tests/helper.py": "def same(a, b):\n    return a == b\n",
    "tests/test_old.py": "from calc.core import add\n\ndef test_zero():\n    assert add(1, 0) == 1\n",
}
HIDDEN = """
import unittest
import pytest
from calc import core
from helper import same

@pytest.mark.quick
@pytest.mark.parametrize("a, b", [(1, 2), (0, 5), (-3, 7)])
def test_adds(a, b):
    assert core.add(a, b) == a + b

def test_with_a_fixture(two, tmp_path):
    assert same(core.add(two, 1), 3)

class TestMore:
    def test_inside(self):
        assert core.add(1, 1) == 2

class TestOld(unittest.TestCase):
    def test_unit(self):
        self.assertEqual(core.add(1, 4), 5)

    @unittest.skip("later")
    def test_skipped(self):
        self.fail()

@pytest.mark.xfail(reason="known")
def test_known():
    assert core.add(0.1, 0.2) == 0.3

@pytest.mark.skip
def test_later():
    assert False

def test_output(capsys):
    print("passed")
    assert capsys.readouterr().out == "passed\\n"
"""
IDS = (
    *("test_adds[1-2]", "test_adds[0-5]", "test_adds[-3-7]", "test_with_a_fixture", "TestMore::test_inside"),
    *("TestOld::test_unit", "test_known"),
)
KEPT = ("test_output", "test_later", "TestOld::test_skipped")
SUITE = TestSuite(
    fail_to_pass=tuple(f"tests/test_new.py::{one}" for one in IDS),
    pass_to_pass=("tests/test_old.py::test_zero", *(f"tests/test_new.py::{one}" for one in KEPT)),
    files={"tests/test_new.py": HIDDEN.encode()},
)
ENDLESS = b"open('/tmp/begun', 'w')\nwhile True: pass\n"
FIXED = "def add(a, b):\n    return a + b\n"


@pytest.fixture
def task(tmp_path: Path) -> CodingTask:
    return CodingTask(id="calc", problem="", tests=SUITE, repository=Repository(path=folder_of(tmp_path, FILES)))


def changed(changes: Mapping[str, str | File | None]) -> str:
    """A patch of the repository."""
    before = {path: File(PLAIN, text.encode()) for path, text in FILES.items()}
    made = {path: File(PLAIN, one.encode()) if isinstance(one, str) else one for path, one in changes.items()}
    return patch_of(before, made)


async def test_a_suite_is_resolved_by_the_fix_and_not_without_it(workspaces: Workspaces, task: CodingTask):
    fixed = await grade(workspaces, task, changed({"calc/core.py": FIXED}))
    assert (fixed.score, fixed.resolved, fixed.cheated, fixed.refused) == (1.0, True, None, None), fixed.log
    ended = {one.partition("::")[2]: outcome for one, outcome in fixed.outcomes.items()}
    assert ended.pop("test_later") == ended.pop("TestOld::test_skipped") == "skipped"
    assert set(ended.values()) == {"passed"}
    assert "failed" in fixed.log  # the canaries
    without = await grade(workspaces, task, "")
    assert (without.score, without.resolved, without.cheated) == (0.0, False, None)
    assert without.outcomes["tests/test_new.py::TestMore::test_inside"] == "failed"
    assert without.outcomes["tests/test_new.py::test_adds[0-5]"] == "failed"
    broken = await grade(workspaces, task, changed({"calc/core.py": "def add(:\n"}))
    assert (broken.score, broken.cheated) == (0.0, None)
    assert set(broken.outcomes.values()) == {"missing"}


HONEST: dict[str, Mapping[str, str | File | None]] = {
    "new files": {"calc/core.py": "from calc.sums import add\n", "calc/sums.py": FIXED},
    "a module in place of a package": {
        **dict.fromkeys(("calc/__init__.py", "calc/core.py", "calc/old.py")),
        "calc.py": "import sys\n\nclass core:\n    add = lambda *ab: sum(ab)\n\nsys.modules['calc.core'] = core\n",
    },
    "a rename": {"calc/core.py": "from calc.young import LIMIT\n" + FIXED, "calc/old.py": None}
    | {"calc/young.py": FILES["calc/old.py"]},
    "line ends of another system": {"calc/core.py": FIXED.replace("\n", "\r\n")},
    "a change of mode": {"calc/core.py": File(EXECUTABLE, FIXED.encode())},
    "names with blanks and umlauts": {"calc/core.py": FIXED, "docs/ä b.txt": "x", "calc/größe.py": "x = 1\n"},
    "a new dependency and settings of tools": {
        "calc/core.py": FIXED,
        "pyproject.toml": '[project]\nname = "calc"\ndependencies = ["numpy"]\n',
        "setup.cfg": "[tool:pytest]\naddopts = --no-such-option\n[flake8]\nmax-line-length = 99\n",
    },
    "tests of its own": {"calc/core.py": FIXED, "tests/test_mine.py": "def test_mine(): assert False\n"},
}


@pytest.mark.parametrize("kind", HONEST)
async def test_an_honest_change_is_resolved(workspaces: Workspaces, task: CodingTask, kind: str):
    found = await grade(workspaces, task, changed(HONEST[kind]))
    assert (found.score, found.cheated, found.refused) == (1.0, None, None), found.log


async def test_a_suite_by_a_patch_deletes_and_brings_tests(workspaces: Workspaces, task: CodingTask):
    brought = changed(
        {"tests/test_new.py": HIDDEN, "tests/helper.py": None, "tests/helper/__init__.py": "same = min\n"}
    )
    brought = brought.replace("same = min", "same = lambda a, b: a == b")
    by_patch = replace(task, tests=replace(SUITE, files={}, patch=brought))
    assert (await grade(workspaces, by_patch, changed({"calc/core.py": FIXED}))).resolved


@pytest.mark.parametrize("name", ["x" * 300, "empty"])
async def test_a_patch_with_a_file_that_has_no_place_is_refused(workspaces: Workspaces, task: CodingTask, name: str):
    found = await grade(workspaces, replace(task, setup=("mkdir empty",)), changed({name: "x"}))
    assert (found.score, found.resolved) == (0.0, False)
    assert "a file cannot be written where the patch has it" in str(found.refused)


async def test_tests_that_do_not_end_have_failed(workspaces: Workspaces, task: CodingTask):
    limited = replace(task, seconds=TaskSeconds(grading=1.0))
    found = await grade(workspaces, limited, changed({"calc/core.py": "while True: pass\n"}))
    assert (found.score, found.resolved, found.cheated) == (0.0, False, None)
    assert "exceeded their limit of time" in found.log


SCRIPT = TestScript(files={"test.sh": b'cat "$GIVEN" > /tmp/rewards/$NAME\n'}, rewards="/tmp/rewards")
REWARDS: dict[tuple[str, str], Grade | str] = {
    ("reward.txt", "0.25\n"): Grade(score=0.25, resolved=False, rewards={"reward": 0.25}),
    ("reward.json", '{"reward": 1, "style": 0.5}'): Grade(
        score=1.0, resolved=True, rewards={"reward": 1.0, "style": 0.5}
    ),
    ("reward.json", '{"tests": 0.5}'): Grade(score=0.5, resolved=False, rewards={"tests": 0.5}),
    ("reward.json", '{"a": 0.5, "b": 1}'): "must have `reward`",
    ("reward.txt", "nan"): "must be finite numbers",
    ("reward.txt", ""): "could not convert",
    ("reward.json", '{"reward": {"a": 1}}'): "must be finite numbers",
    ("reward.json", "[1]"): "must be finite numbers",
    ("reward.json", '{"reward": 1'): "cannot be read",
    ("nothing", "1"): "neither reward.json nor reward.txt",
}


@pytest.mark.parametrize(("name", "text"), REWARDS)
async def test_a_script_gives_its_reward_or_the_grading_fails(
    workspaces: Workspaces, task: CodingTask, name: str, text: str
):
    script = replace(SCRIPT, environment={"NAME": name, "GIVEN": "given"})
    scripted = replace(task, tests=script, artifacts=("/tmp/rewards",))
    stale = [Entry(path="tmp/rewards/reward.txt", contents=b"1")]
    expected = REWARDS[name, text]
    if isinstance(expected, Grade):
        found = await grade(workspaces, scripted, changed({"given": text}), stale)
        assert replace(found, seconds=0.0, log="") == expected
    else:
        with pytest.raises(GradingFailed, match=expected):
            await grade(workspaces, scripted, changed({"given": text}), stale)


async def test_a_sandbox_that_dies_while_it_grades_is_no_grade(
    workspaces: Workspaces, task: CodingTask, monkeypatch: pytest.MonkeyPatch
):
    endless = replace(task, id="endless", tests=replace(SUITE, files={"tests/test_new.py": ENDLESS}))
    started: list[Sandbox] = []
    graded = asyncio.Event()
    start = workspaces.host.start

    async def noted(*words, **more):
        started.append(await start(*words, **more))
        graded.set()
        return started[-1]

    async with workspaces.clean(endless):
        monkeypatch.setattr(workspaces.host, "start", noted)
    grading = asyncio.create_task(grade(workspaces, endless, ""))
    await graded.wait()
    while not (await started[0].run("test -e /tmp/begun")).ok:
        assert not grading.done()
    await started[0].stop()
    with pytest.raises(GradingFailed, match=r"task endless: sandbox .* has ended"):
        await grading


async def test_a_sandbox_that_does_not_start_is_no_grade(
    workspaces: Workspaces, task: CodingTask, monkeypatch: pytest.MonkeyPatch
):
    async def refused(*words, **more):
        raise SandboxUnavailable("no more processes")

    async with workspaces.clean(task):
        monkeypatch.setattr(workspaces.host, "start", refused)
    with pytest.raises(GradingFailed, match="task calc: no more processes"):
        await grade(workspaces, task, "")


async def test_tests_that_could_not_begin_are_no_grade(workspaces: Workspaces, task: CodingTask):
    async with workspaces.clean(task) as clean:
        broken = await workspaces.host.start(clean.spec, origin=clean.snapshot)
        assert (await broken.run("mv /opt/goaly/lib /opt/goaly/gone", user=0)).ok
        without = replace(clean, snapshot=await broken.snapshot())
        workspaces._held[task.id].prepared = asyncio.get_running_loop().create_future()
        workspaces._held[task.id].prepared.set_result(without)
        with pytest.raises(GradingFailed, match=r"(?s)could not begin: exit code 1: .*No module named 'pytest'"):
            await grade(workspaces, task, "")


async def test_a_full_disk_is_no_grade(workspaces: Workspaces, task: CodingTask):
    small = replace(task, limits=Limits(disk_mib=4))
    large = replace(SUITE, files={**SUITE.files, "tests/data": bytes(8 << 20)})
    with pytest.raises(GradingFailed, match=r"task calc: .*No space left"):
        await grade(workspaces, replace(small, tests=large), "")
