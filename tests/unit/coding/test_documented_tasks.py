"""The examples of docs/coding.md work when they are copied."""

import re
import runpy
import subprocess
from pathlib import Path

import pytest

from apps.coding.tasks.__main__ import main

PAGE = (Path(__file__).parents[3] / "docs" / "coding.md").read_text()


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the page's blocks that make files were run, with its scripts beside them."""
    for block in re.findall(r"```bash\n(mkdir .*?)```", PAGE, re.DOTALL):
        subprocess.run(["bash", "-euc", block], cwd=tmp_path, check=True, timeout=20)
    for name, script in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / name).write_text(script)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder_of_our_own_gets_its_ids_and_can_be_used(copied: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["list", "my_tasks"]) == 1
    assert "`validate --write` finds them" in capsys.readouterr().out
    assert main(["validate", "my_tasks", "--write", "--times", "1"]) == 0
    assert "cart  1 tests to pass, 1 to keep" in capsys.readouterr().out
    runpy.run_path("try_grade.py")
    assert capsys.readouterr().out.startswith("1.0 {")


def test_a_script_that_writes_its_reward_can_be_used(copied: Path):
    assert main(["validate", "scored", "--times", "1", "coding.tasks.root=/"]) == 0


def test_the_grader_in_python_is_an_episode_of_its_own(copied: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(copied))
    from my_grader import ShortPatches  # pyrefly: ignore[missing-import]

    from goaly.coding.episode import CodingEpisode

    assert ShortPatches.grade is not CodingEpisode.grade
