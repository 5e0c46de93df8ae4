"""Patches that are written, read and applied here, against git as the judge."""

import os
import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goaly.grading.file_tree import EXECUTABLE, LINK, PLAIN, File, FileTree
from goaly.grading.patch_apply import apply_patch
from goaly.grading.patch_reader import PatchProblem, read_patch
from goaly.grading.patch_writer import patch_of
from goaly.sandboxes.contract import Entry
from goaly.sandboxes.files import folder_entries

LINES = st.lists(st.sampled_from([b"", b"a", b"b\r", b"-- c", b"++ d", b" e", b"@@ -1 +1 @@", b"\\ f", "ü".encode()]))
TEXTS = st.builds(lambda lines, end: b"\n".join(lines) + end, LINES, st.sampled_from([b"", b"\n"]))
CONTENTS = st.one_of(TEXTS, st.binary(max_size=200), st.sampled_from([b"\0\1" * 500, b"\xff\n"]))
FILES = st.builds(File, st.sampled_from([PLAIN, EXECUTABLE]), CONTENTS)
NAMES = st.sampled_from(["x.py", "a b/c d.py", "tests/ü.py", "-.py", 'q"uote\\.py', "b/b.py", "tab\t.py"])
FOLDERS = st.dictionaries(NAMES, st.one_of(FILES, st.just(File(LINK, b"b/b.py"))), max_size=5)


def lay(folder: Path, files: dict[str, File]) -> None:
    for name, file in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if file.mode == LINK:
            path.symlink_to(os.fsdecode(file.contents))
        else:
            path.write_bytes(file.contents)
            path.chmod(file.mode & 0o777)


def git(folder: Path, *words: str, stdin: bytes = b"") -> bytes:
    quiet = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "PATH": os.environ["PATH"], "LANG": "C"}
    author = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "core.fileMode=true", "-c", "core.autocrlf=false"]
    done = subprocess.run(["git", *author, *words], cwd=folder, input=stdin, capture_output=True, env=quiet, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def tree(folder: Path) -> dict[str, File]:
    return dict(FileTree(folder_entries(folder)))


@settings(max_examples=25, deadline=None)
@given(before=FOLDERS, after=FOLDERS)
def test_git_applies_what_is_written_here(tmp_path_factory: pytest.TempPathFactory, before, after):
    changes = {path: after.get(path) for path in before | after if before.get(path) != after.get(path)}
    patch = patch_of(before, changes)
    folder = tmp_path_factory.mktemp("git")
    lay(folder, before)
    git(folder, "init", "-q")
    if patch:
        git(folder, "apply", "--whitespace=nowarn", "-", stdin=patch.encode())
    assert tree(folder) == after
    made = {**before, **apply_patch(before, read_patch(patch))}
    assert {path: file for path, file in made.items() if file is not None} == after


@settings(max_examples=25, deadline=None)
@given(before=FOLDERS, after=FOLDERS, renames=st.booleans(), context=st.integers(1, 4))
def test_what_git_writes_is_applied_here(tmp_path_factory: pytest.TempPathFactory, before, after, renames, context):
    folder = tmp_path_factory.mktemp("git")
    git(folder, "init", "-q")
    lay(folder, before)
    git(folder, "add", "-A", "-f")
    git(folder, "commit", "-q", "--allow-empty", "-m", "before")
    for path in before:
        (folder / path).unlink()
    lay(folder, after)
    git(folder, "add", "-A", "-f")
    how = ["-M20%", "-C20%", "--find-copies-harder"] if renames else ["--no-renames"]
    patch = os.fsdecode(git(folder, "diff", "--cached", "--binary", f"-U{context}", *how))
    made = {**before, **apply_patch(before, read_patch(patch))}
    assert {path: file for path, file in made.items() if file is not None} == after


def test_hunks_move_to_the_nearest_place_where_their_lines_are():
    numbers = [f"{n}\n" for n in range(60)]
    changed = [*numbers[:40], "new\n", *numbers[41:]]
    before, after = File(PLAIN, "".join(numbers).encode()), File(PLAIN, "".join(changed).encode())
    patch = patch_of({"x": before}, {"x": after})
    moved = File(PLAIN, b"first\n" * 7 + before.contents)
    made = apply_patch({"x": moved}, read_patch(patch))
    assert made == {"x": File(PLAIN, b"first\n" * 7 + after.contents)}
    with pytest.raises(PatchProblem, match="x: the lines of the hunk at line 38 are not there"):
        apply_patch({"x": File(PLAIN, before.contents.replace(b"39\n", b"thirty-nine\n"))}, read_patch(patch))


def test_a_change_of_binary_contents_as_gits_delta(tmp_path: Path):
    noise = random.Random(0).randbytes(20_000)
    before = {"x": File(PLAIN, noise)}
    after = {"x": File(PLAIN, noise[:9000] + b"inserted" + noise[9500:])}
    git(tmp_path, "init", "-q")
    lay(tmp_path, before)
    git(tmp_path, "add", "-A")
    lay(tmp_path, after)
    patch = git(tmp_path, "diff", "--binary").decode()
    assert "\ndelta " in patch
    assert apply_patch(before, read_patch(patch)) == after
    with pytest.raises(PatchProblem, match="the old file has another size"):
        apply_patch({"x": File(PLAIN, b"short")}, read_patch(patch))


def added(path: str, mode: str = "100644", line: str = "text") -> str:
    return (
        f"diff --git a/{path} b/{path}\nnew file mode {mode}\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+{line}\n"
        + "\\ No newline at end of file\n" * (mode == "120000")
    )


REFUSED = {
    "must be a path below the workdir": added("../x"),
    "'/etc/x': must be a path below the workdir": added("x").replace("b/x", "/etc/x").replace("a/x", "/etc/x"),
    "files of git": added("sub/.GIT/hooks/x"),
    "compiled code may not be": added("tests/__pycache__/test_x.cpython-311.pyc"),
    "a link to '../../etc/passwd', which is outside": added("a/b", "120000", "../../etc/passwd"),
    "a link to '/etc', which is outside": added("b", "120000", "/etc"),
    "folder is a link, not a folder": added("folder", "120000", "x.py") + added("folder/new"),
    "x.py is a file, not a folder": added("x.py/y"),
    "'100755x' is no mode": "diff --git a/x.py b/x.py\nold mode 100644\nnew mode 100755x\n",
    "mode 104755: must be": "diff --git a/x.py b/x.py\nold mode 100644\nnew mode 104755\n",
    "x.py: the patch makes it, but it is there already": added("x.py"),
    "y.py: the patch changes it, but it is not there": "--- a/y.py\n+++ b/y.py\n@@ -1 +1 @@\n-a\n+b\n",
    "the hunk ends before": "--- a/x.py\n+++ b/x.py\n@@ -1,2 +1 @@\n-a\n+b\n",
    "a hunk without the name of its file": "@@ -1 +1 @@\n-a\n+b\n",
    "a binary file without its contents": "diff --git a/x b/x\nBinary files a/x and b/x differ\n",
    "at most 1048576 bytes": added("big", line="x" * (1 << 20)),
    "of more than 1048576 bytes": patch_of({}, {"bomb": File(PLAIN, bytes(2 << 20))}),
    "in the form of `git diff`": "I changed x.py, and now it works.",
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_a_patch_may_not_do_is_refused_as_a_whole(reason: str):
    with pytest.raises(PatchProblem) as caught:
        apply_patch({"x.py": File(PLAIN, b"a\n")}, read_patch(REFUSED[reason]))
    assert reason in str(caught.value)


def test_new_files_that_the_clean_gitignore_ignores_are_no_changes():
    clean = {
        ".gitignore": b"*.log\nbuild/\n!keep.log\n/top\ndocs/**/out\n",
        "sub/.gitignore": b"secret\n",
        "old.log": b"",
    }
    base = FileTree([Entry(path=path, contents=contents) for path, contents in clean.items()])
    names = [
        "a.log",
        "sub/keep.log",
        "build/x",
        "src/build/y",
        "top",
        "sub/top",
        "docs/a/b/out",
        "sub/secret",
        "secret",
    ]
    kept = [Entry(path=path, contents=contents) for path, contents in clean.items()]
    kept[2] = Entry(path="old.log", contents=b"tracked files count")
    changes = base.changes([*kept, *(Entry(path=name, contents=b"new") for name in names)])
    assert set(changes) == {"old.log", "sub/keep.log", "sub/top", "secret"}
    assert base.changes(kept[:2]) == {"old.log": None}
    left_behind = ("__pycache__/x.cpython-311.pyc", ".git/config", "sub/.git/HEAD", ".pytest_cache/v/x")
    assert base.changes([*kept[:2], *(Entry(path=path) for path in left_behind)]) == {"old.log": None}
