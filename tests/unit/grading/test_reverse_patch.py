"""The reverse of a patch takes it back."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goaly.grading.reverse_patch import reversed_patch

LINES = st.lists(st.sampled_from(["", "a", "b", "-- c", "++ d", " e", "@@ -1 +1 @@", "\\ f", "diff --git a/x b/x"]))
CONTENTS = st.tuples(LINES, st.booleans()).map(lambda drawn: "\n".join(drawn[0]) + "\n" * (drawn[1] and drawn[0] != []))
FOLDERS = st.dictionaries(st.sampled_from(["x.py", "a b/c d.py", "-.py", "b/b.py"]), CONTENTS, max_size=4)


def git(folder: Path, *words: str, stdin: str = "") -> str:
    done = subprocess.run(["git", *words], cwd=folder, input=stdin.encode(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def lay(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def files_in(folder: Path) -> dict[str, str]:
    found = (path for path in folder.rglob("*") if path.is_file() and ".git" not in path.parts)
    return {str(path.relative_to(folder)): path.read_text() for path in found}


@settings(max_examples=12, deadline=None)
@given(before=FOLDERS, after=FOLDERS, renames=st.booleans())
def test_the_reverse_of_a_patch_of_git_takes_it_back(
    tmp_path_factory: pytest.TempPathFactory, before: dict[str, str], after: dict[str, str], renames: bool
) -> None:
    folder = tmp_path_factory.mktemp("patch")
    git(folder, "init", "-q")
    lay(folder, before)
    git(folder, "add", "-A")
    git(folder, "-c", "user.name=a", "-c", "user.email=a", "commit", "-q", "--allow-empty", "-m", "before")
    git(folder, "rm", "-q", "-r", "--ignore-unmatch", ".")
    lay(folder, after)
    git(folder, "add", "-A")
    patch = git(folder, "diff", "--cached", "--find-renames" if renames else "--no-renames")
    if patch:
        git(folder, "apply", "-", stdin=reversed_patch(patch, most_bytes=1 << 20))
    assert files_in(folder) == before


def test_a_change_of_the_mode_is_refused_by_the_name_of_its_file() -> None:
    with pytest.raises(ValueError, match=r"run\.sh: .* cannot be taken back"):
        reversed_patch("diff --git a/run.sh b/run.sh\nold mode 100644\nnew mode 100755\n", most_bytes=1 << 20)
