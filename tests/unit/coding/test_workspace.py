"""The clean state of a task in real sandboxes (coding-1), and the patch of what an agent did there (coding-2)."""

import asyncio
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from goaly.coding.workspace import Workspaces
from goaly.grading.file_tree import PLAIN, File, FileTree
from goaly.grading.patch_apply import apply_patch
from goaly.grading.patch_reader import PatchProblem, read_patch
from goaly.grading.patch_writer import patch_of
from goaly.grading.python_with_pytest import Toolbox, find_tools
from goaly.grading.repository_files import repository_files
from goaly.grading.task import CodingTask, Repository, TaskProblem, TaskSeconds, TestSuite
from goaly.sandboxes.contract import USERS_FOLDERS, Entry, SandboxDied, SandboxSpec
from goaly.sandboxes.namespaces import NamespaceHost
from goaly.sandboxes.sandbox import Sandbox
from goaly.sandboxes.settings import SandboxSettings
from tests.unit.coding.conftest import folder_of

LIBRARIES = [str(path) for path in Path("/usr/lib").glob("python3*")]
SUITE = TestSuite(fail_to_pass=("tests/test_x.py::test_x",))


@pytest.fixture
def task(tmp_path: Path) -> CodingTask:
    files = {"calc.py": "def add(a, b):\n    return a - b\n", "README": "calc\n", ".gitignore": "*.log\n"}
    return CodingTask(id="calc", problem="fix add", tests=SUITE, repository=Repository(path=folder_of(tmp_path, files)))


async def said(sandbox: Sandbox, command: str) -> str:
    result = await sandbox.run(command)
    assert result.ok, result.stderr.text()
    return result.stdout.text()


async def test_agents_start_in_one_clean_commit_with_python_pytest_and_git(workspaces: Workspaces, task: CodingTask):
    sandbox = await workspaces.start(task)
    assert (
        await said(sandbox, "pwd; git status --short; git rev-list --count --all; git stash list") == "/repository\n1\n"
    )
    assert "passed" in await said(sandbox, "printf 'def test_x(): pass\n' > test_x.py; python -m pytest -q; pytest -q")
    assert await said(sandbox, "git add -A && git commit -q -m mine && git rev-list --count HEAD") == "2\n"


async def test_a_workdir_that_is_too_large_is_a_problem_of_the_task(
    workspaces: Workspaces, task: CodingTask, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("goaly.grading.preparation.MOST_BYTES", 1000)
    big = replace(task, setup=("head -c 2000 /dev/zero > big",))
    with pytest.raises(TaskProblem, match="task calc: workdir=/repository: /repository has more than 1000 bytes"):
        await workspaces.start(big)


@pytest.mark.slow
async def test_a_root_without_python_gets_this_one_with_pytest(host: NamespaceHost):
    tools = await find_tools(host, SandboxSpec(hidden=(*USERS_FOLDERS, *LIBRARIES, sys.base_prefix)), {})
    sandbox = await host.start(SandboxSpec(environment={"PATH": tools.path}), origin=tools.snapshot)
    assert tools.python == "/opt/goaly/bin/python"
    program = "import sys, json, ssl, sqlite3, pytest; print(json.dumps(sys.version_info[:2]))"
    assert json.loads(await said(sandbox, f"python -c '{program}'")) == list(sys.version_info[:2])


async def test_callers_share_one_preparation_and_a_cancelled_one_does_not_stop_it(
    workspaces: Workspaces, task: CodingTask
):
    setup = replace(task, setup=("echo $RANDOM $$ $(date +%N) > made-by-setup",))
    first = asyncio.create_task(workspaces.start(setup))
    second, third = asyncio.create_task(workspaces.start(setup)), asyncio.create_task(workspaces.start(setup))
    await asyncio.sleep(0)
    first.cancel()
    made = [await said(await one, "cat made-by-setup") for one in (second, third)]
    assert made[0] == made[1] != ""
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_tools_whose_sandbox_died_are_laid_again_once_for_all_tasks_that_waited_for_them(
    host: NamespaceHost, task: CodingTask, monkeypatch: pytest.MonkeyPatch
):
    found = []

    async def dies_once(*given: Any) -> Toolbox:
        found.append(None)
        if len(found) == 1:
            raise SandboxDied("its server was killed")
        return await find_tools(*given)

    monkeypatch.setattr("goaly.coding.workspace.find_tools", dies_once)
    opened = Workspaces(host, SandboxSettings())
    tasks = [replace(task, id=f"calc{number}") for number in range(3)]
    for one in await asyncio.gather(*map(opened.start, tasks)):
        await one.stop()
    assert len(found) == 2
    await opened.close()


async def test_the_history_after_the_base_commit_is_gone(workspaces: Workspaces, tmp_path: Path):
    folder = folder_of(tmp_path, {"a.py": "base\n", "data.log": "tracked although ignored\n", ".gitignore": "*.log\n"})
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@t"]

    def run(*words: str) -> str:
        return subprocess.run([*git, *words], check=True, capture_output=True, text=True).stdout.strip()

    run("init", "-q")
    run("add", "-A", "-f")
    run("commit", "-q", "-m", "base")
    base = run("rev-parse", "HEAD")
    (folder / "a.py").write_text("the solution\n")
    run("commit", "-q", "-a", "-m", "solution")
    run("tag", "v2")
    run("gc", "-q")
    (folder / "a.py").write_text("stashed\n")
    run("stash")
    archive = tmp_path / "repository.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, "name-1234")
    repository = Repository(path=archive, base_commit=base)
    task = CodingTask(id="history", problem="", tests=SUITE, repository=repository)
    sandbox = await workspaces.start(task)
    assert await said(sandbox, "cat a.py; git status --short; git log --all --format=%s") == "base\nbase\n"
    assert "data.log" in await said(sandbox, "git ls-files")
    objects = await said(sandbox, "git cat-file --batch-all-objects --batch-check")
    assert objects.count("blob") == 3
    gone = await sandbox.run(
        "git stash list; git tag; git reflog | grep -v base; ls .git/packed-refs .git/objects/pack/*"
    )
    assert gone.stdout.text() == ""
    with pytest.raises(TaskProblem, match="history2: base_commit='beef'"):
        await workspaces.start(replace(task, id="history2", repository=replace(repository, base_commit="beef")))


async def test_setup_has_its_own_time_and_network_and_nothing_of_it_goes_on(workspaces: Workspaces, task: CodingTask):
    proxied = replace(
        task,
        id="proxied",
        setup=("env | grep -c ^http_proxy=http://127.0.0.1 > proxies", "(sleep 1000; echo late > late) &"),
        setup_hosts=("example.org",),
    )
    sandbox = await workspaces.start(proxied)
    assert await said(sandbox, "cat proxies; env | grep -i proxy || true") == "1\n"
    assert await said(sandbox, "ps -e | grep -c sleep || true; grep -c ' 0A ' /proc/net/tcp || true") == "0\n0\n"
    assert await workspaces.patch(proxied, sandbox) == ""
    with pytest.raises(TaskProblem, match="failing: setup 'echo no >&2; exit 3': exit code 3: no"):
        await workspaces.start(replace(task, id="failing", setup=("echo no >&2; exit 3",)))
    slow = replace(task, id="slow", setup=("sleep 1000",), seconds=TaskSeconds(setup=0.2))
    with pytest.raises(TaskProblem, match=r"slow: setup"):
        await workspaces.start(slow)


async def test_the_patch_has_every_kind_of_change_and_fits(workspaces: Workspaces, task: CodingTask):
    sandbox = await workspaces.start(task)
    await said(
        sandbox,
        "echo new > 'new file.txt'; printf '\\0\\1' > binary; rm README; chmod +x calc.py; echo '#' >> calc.py;"
        "mkdir -p a/ü; echo x > a/ü/deep; ln -s calc.py link; echo noise > noise.log; python -m compileall -q .",
    )
    patch = await workspaces.patch(task, sandbox)
    async with workspaces.clean(task) as clean:
        made = apply_patch(clean.tree, read_patch(patch))
    assert set(made) == {"new file.txt", "binary", "README", "calc.py", "a/ü/deep", "link"}
    assert made["README"] is None
    assert made["binary"] == File(PLAIN, b"\0\1")


PLANTED = {
    "hooks, filters and drivers": "git config core.fsmonitor 'touch /tmp/ran; false';"
    " git config core.hooksPath /tmp/hooks; git config filter.x.clean 'touch /tmp/ran; echo harmless';"
    " git config diff.x.textconv 'touch /tmp/ran'; git config diff.external 'touch /tmp/ran';"
    " mkdir -p .git/info; echo '* filter=x diff=x' > .git/info/attributes",
    "a git in PATH": "mkdir -p /tmp/bin; printf '#!/bin/sh\\ntouch /tmp/ran\\n' > /tmp/bin/git; chmod +x /tmp/bin/git",
    "a commit of the change": "git add -A; git commit -q -m mine; git update-index --assume-unchanged calc.py",
    "no git at all": "rm -rf .git",
    "a file in its place": "rm -rf .git; echo 'gitdir: /tmp/elsewhere' > .git",
    "files that nobody may read": "chmod 000 calc.py; chmod 000 .git",
}


@pytest.mark.parametrize("plant", PLANTED)
async def test_what_an_agent_does_to_git_means_nothing_to_its_patch(
    workspaces: Workspaces, task: CodingTask, plant: str
):
    sandbox = await workspaces.start(task)
    await said(sandbox, f"sed -i 's/a - b/a + b/' calc.py; {PLANTED[plant]}")
    patch = await workspaces.patch(task, sandbox)
    assert patch.count("diff --git") == 1
    assert "+    return a + b\n" in patch
    assert not (await sandbox.run("test -e /tmp/ran")).ok


async def test_a_deleted_or_an_endless_workdir_is_a_patch_or_its_problem(workspaces: Workspaces, task: CodingTask):
    sandbox = await workspaces.start(task)
    await sandbox.run("rm -rf /repository/* /repository/.[a-z]*")
    assert (await workspaces.patch(task, sandbox)).count("deleted file mode") == 3
    await said(sandbox, "truncate -s 70M /repository/a")
    with pytest.raises(PatchProblem, match="more than"):
        await workspaces.patch(task, sandbox)


async def test_only_the_last_states_are_kept_and_one_in_use_stays(host: NamespaceHost, task: CodingTask):
    workspaces = Workspaces(host, SandboxSettings(), kept=1)
    tasks = [replace(task, id=f"calc-{n}") for n in range(3)]
    async with workspaces.clean(tasks[0]) as first:
        for one in tasks[1:]:
            async with workspaces.clean(one):
                pass
        assert first.tree["README"].contents == b"calc\n"
        assert (await host.start(first.spec, origin=first.snapshot)).alive()
    await workspaces.start(tasks[0])
    with pytest.raises(ValueError, match="two different tasks have the id 'calc-0'"):
        await workspaces.start(replace(tasks[0], problem="another"))
    await workspaces.close()


def test_archives_that_lead_out_are_refused(tmp_path: Path):
    def tar(*members: tarfile.TarInfo) -> Path:
        with tarfile.open(tmp_path / "x.tar", "w") as archive:
            for member in members:
                archive.addfile(member, io.BytesIO(b"x" * member.size))
        return tmp_path / "x.tar"

    def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tarfile.TarInfo:
        made = tarfile.TarInfo(name)
        made.type, made.linkname, made.size = kind, link, size
        return made

    def entries(path: Path) -> list[Entry]:
        return repository_files(path, most_bytes=100)

    assert [one.path for one in entries(tar(member("top", tarfile.DIRTYPE), member("top/x", size=3)))] == ["x"]
    assert [one.path for one in entries(tar(member("./top/x"), member("./y"), member("l", tarfile.SYMTYPE, "y")))]
    for evil in (member("../x"), member("/etc/x"), member("a/../../x")):
        with pytest.raises(TaskProblem, match="leads out of the archive's folder"):
            entries(tar(evil))
    for target in ("/etc/passwd", "../../x"):
        with pytest.raises(TaskProblem, match="the link 'top/a' leads out"):
            entries(tar(member("top/a", tarfile.SYMTYPE, target), member("y")))
    with pytest.raises(TaskProblem, match="is a device or a pipe"):
        entries(tar(member("null", tarfile.CHRTYPE)))
    with pytest.raises(TaskProblem, match="has more than"):
        entries(tar(member("big", size=101)))
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb", bytes(1 << 20))
    with pytest.raises(TaskProblem, match="has more than"):
        entries(tmp_path / "x.zip")
    (tmp_path / "x.zip").write_bytes(b"no archive")
    with pytest.raises(TaskProblem, match="cannot be read as a repository"):
        entries(tmp_path / "x.zip")


def test_large_contents_of_a_tree_are_read_back():
    files = {f"f{n}": bytes([n]) * (1 << 18) for n in range(8)}
    tree = FileTree([Entry(path=path, contents=contents) for path, contents in files.items()])
    assert {path: file.contents for path, file in tree.items()} == files
    assert patch_of(tree, {"f0": None}).startswith("diff --git a/f0 b/f0\ndeleted file mode 100644\n")
    tree.close()


async def test_a_task_with_a_path_of_its_own_has_pytest_all_the_same(workspaces: Workspaces, task: CodingTask):
    task = replace(task, environment={"PATH": "/opt/own/bin:/usr/bin:/bin"})
    sandbox = await workspaces.start(task)
    assert (await said(sandbox, "echo $PATH; pytest --version")).startswith(("/opt/goaly/bin:/opt/own", "/opt/own"))


async def test_states_that_several_callers_forget_at_once_are_forgotten_once(host: NamespaceHost, task: CodingTask):
    workspaces = Workspaces(host, SandboxSettings(), kept=1)

    async def used(number: int) -> None:
        async with workspaces.clean(replace(task, id=f"calc-{number}")):
            pass

    for _ in range(2):
        await asyncio.gather(*(used(number) for number in range(6)))
    assert len(workspaces._held) == 1
    await workspaces.close()
