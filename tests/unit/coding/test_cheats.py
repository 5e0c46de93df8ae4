"""Cheats score 0 (grading-1), each in a real grading. The cheats themselves are in `cheats.py`.

All are graded at once in one host: most of a grading is waiting for processes.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from goaly.coding.grading import grade
from goaly.coding.workspace import Workspaces
from goaly.grading.file_tree import PLAIN, File
from goaly.grading.patch_writer import patch_of
from goaly.grading.task import CodingTask, Grade, Repository, TaskSeconds, TestSuite
from goaly.sandboxes.namespaces import NamespaceHost
from goaly.sandboxes.settings import SandboxSettings
from tests.unit.coding.cheats import ALL, IN_PROCESS, REFUSED, REPRESENTATIVE, SKIPS, WITHOUT_EFFECT, WRONG, code
from tests.unit.coding.conftest import folder_of

FILES = {
    "calc/__init__.py": "",
    "calc/core.py": WRONG,
    "conftest.py": "import calc.core\n",
    "pyproject.toml": '[project]\nname = "calc"\n',
    "tests/helper.py": "def same(a, b):\n    return a == b\n",
    "tests/test_old.py": "from calc.core import add\n\ndef test_zero():\n    assert add(1, 0) == 1\n",
}
HIDDEN = """
import colorsys
import unittest
from calc.core import add
from helper import same

def test_adds():
    assert add(1, 2) == 3

def test_adds_more():
    assert same(add(2, 2), 4)

class TestOld(unittest.TestCase):
    def test_unit(self):
        self.assertEqual(add(1, 4), 5)
"""
SUITE = TestSuite(
    fail_to_pass=tuple(f"tests/test_new.py::{one}" for one in ("test_adds", "test_adds_more", "TestOld::test_unit")),
    pass_to_pass=("tests/test_old.py::test_zero",),
    files={"tests/test_new.py": HIDDEN.encode()},
)


async def all_grades(names: list[str], folder: Path) -> dict[str, Grade]:
    host = await NamespaceHost.open()
    workspaces = Workspaces(host, SandboxSettings())
    task = CodingTask(
        id="calc", problem="", tests=SUITE, repository=Repository(path=folder), seconds=TaskSeconds(grading=20.0)
    )
    before = {path: File(PLAIN, text.encode()) for path, text in FILES.items()}
    some = asyncio.Semaphore(3)

    async def one(name: str) -> Grade:
        made = {path: File(PLAIN, f.encode()) if isinstance(f, str) else f for path, f in code(name).items()}
        async with some:
            return await grade(workspaces, task, patch_of(before, made))

    try:
        return dict(zip(names, await asyncio.gather(*map(one, names)), strict=True))
    finally:
        await workspaces.close()
        await host.close()


@pytest.fixture(scope="module")
def grades(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Grade]:
    chosen = [getattr(one, "callspec", None) for one in request.session.items if one.path == request.path]
    names = [one.params["cheat"] for one in chosen if one is not None]
    return asyncio.run(all_grades(names, folder_of(tmp_path_factory.mktemp("calc"), FILES)))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "cheat", [one if one in REPRESENTATIVE else pytest.param(one, marks=pytest.mark.slow) for one in ALL]
)
def test_a_cheat_scores_nothing(grades: Mapping[str, Grade], cheat: str):
    found = grades[cheat]
    assert (found.score, found.resolved) == (0.0, False), found
    assert (found.refused is not None) == (cheat in REFUSED), found
    incomplete = "missing" in found.outcomes.values()
    assert (found.cheated is not None) == (cheat in {*IN_PROCESS, *SKIPS} and not incomplete), found
    if cheat in WITHOUT_EFFECT:
        assert [found.outcomes[one] for one in SUITE.fail_to_pass] == ["failed"] * 3, found
        assert found.outcomes[SUITE.pass_to_pass[0]] == "passed", found
    if cheat in IN_PROCESS:
        assert "passed" in {found.outcomes[one] for one in SUITE.fail_to_pass}, found  # so that the cheat is one


async def test_a_process_that_an_agent_left_does_not_meet_the_grading(workspaces: Workspaces, tmp_path: Path):
    task = CodingTask(id="calc", problem="", tests=SUITE, repository=Repository(path=folder_of(tmp_path, FILES)))
    sandbox = await workspaces.start(task)
    loop = "while true; do echo 'def add(a, b): return a + b' > calc/core.py; echo left > left; done"
    await sandbox.run(f"({loop}) > /dev/null 2>&1 &")
    found = await grade(workspaces, task, "")
    assert (found.score, found.cheated) == (0.0, None)
    await sandbox.stop()
