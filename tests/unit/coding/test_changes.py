"""Which files of a real sandbox's workdir a turn changed, in small workdirs and in large ones."""

import pytest
import pytest_asyncio

from goaly.coding import changes as module
from goaly.coding.changes import FileChanges
from goaly.grading.file_tree import FileTree
from goaly.sandboxes.sandbox import Sandbox

WORKDIR = "/tmp/work"


@pytest_asyncio.fixture(loop_scope="module", params=[module.SMALL_BYTES, 1], ids=["small", "large"])
async def changes(sandbox: Sandbox, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FileChanges:
    monkeypatch.setattr(module, "SMALL_BYTES", request.param)
    await sandbox.run("printf '1\\n2\\n3\\n' > a.py; echo x > 'with blank.txt'; echo '*.log' > .gitignore", cwd=WORKDIR)
    await sandbox.run("mkdir .git; echo 1 > .git/HEAD", cwd=WORKDIR)
    opened = FileChanges(sandbox, WORKDIR, FileTree(await sandbox.download(WORKDIR)))
    await opened.begin()
    return opened


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("true", {}),
        ("printf '1\\ntwo\\n3\\nfour\\n' > a.py", {"a.py": "+2 -1"}),
        ("mkdir -p deep && printf 'a\\nb\\n' > deep/b.py", {"deep/b.py": "+2 -0 (new)"}),
        ("rm 'with blank.txt'", {"with blank.txt": "+0 -1 (deleted)"}),
        ("mv a.py c.py", {"a.py": "+0 -3 (deleted)", "c.py": "+3 -0 (new)"}),
        ("head -c 100 /dev/zero > a.py", {"a.py": "binary"}),
        ("chmod +x a.py; touch .gitignore", {"a.py": "+0 -0"}),
        ("echo > out.log; echo 2 > .git/HEAD; mkdir __pycache__; echo > __pycache__/a.pyc", {}),
    ],
)
async def test_a_turn_has_the_lines_of_the_files_that_it_changed(
    sandbox: Sandbox, changes: FileChanges, command: str, expected: dict[str, str]
):
    await sandbox.run(command, cwd=WORKDIR)
    assert await changes.since_last() == expected


async def test_a_turn_is_compared_with_the_turn_before(sandbox: Sandbox, changes: FileChanges):
    for command, expected in [
        ("echo 4 >> a.py", {"a.py": "+1 -0"}),
        ("echo 5 >> a.py; echo new > d.py", {"a.py": "+1 -0", "d.py": "+1 -0 (new)"}),
        ("true", {}),
        ("printf '1\\n2\\n3\\n' > a.py; rm d.py", {"a.py": "+0 -2", "d.py": "+0 -1 (deleted)"}),
    ]:
        await sandbox.run(command, cwd=WORKDIR)
        assert await changes.since_last() == expected


async def test_files_that_cannot_be_read_are_named_or_left_out(sandbox: Sandbox, changes: FileChanges):
    await sandbox.run("head -c 2000000 /dev/zero > big", cwd=WORKDIR)
    await changes.since_last()
    await sandbox.run("rm -r /tmp/work", cwd="/")
    assert isinstance(await changes.since_last(), dict)
