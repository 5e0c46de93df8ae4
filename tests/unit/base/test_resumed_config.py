"""`--resume FOLDER`: the config is that of the run, and only what the run can change is overridden."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from goaly.base.config import Loaded, exit_code, load, run_cli
from goaly.base.config.settings import PositiveInt, Section, Settings
from goaly.base.errors import ConfigError


class Run(Settings):
    steps: PositiveInt
    seed: int = 0

    def refused_changes(self, changed: "Run") -> Iterator[str]:
        """A run that goes on keeps its seed."""
        if changed.seed != self.seed:
            yield f"seed={changed.seed}: must stay {self.seed}"

    def _problems(self, at: Section) -> Iterator[str]:
        if self.steps == 13:
            yield f"{at.steps}: brings bad luck"


class Once(Settings):
    steps: int = 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run."""
    (tmp_path / "config.yaml").write_text("steps: 3\nseed: 1\n")
    return tmp_path


def problems(*argv: str, schema: type = Run) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(schema, argv, prog="prog", description="")
    return error.value.problems


def test_a_resumed_run_has_its_own_config_and_what_is_overridden(folder: Path) -> None:
    argv = ["--resume", str(folder), "steps=5"]
    loaded = load(Run, argv, prog="prog", description="")
    file = folder / "config.yaml"
    assert loaded == Loaded(config=Run(steps=5, seed=1), dry_run=False, path=file, resume=folder)
    assert loaded.arguments == tuple(argv)


def test_a_run_that_is_not_resumed_is_compared_with_nothing(folder: Path) -> None:
    loaded = load(Run, [f"--config={folder / 'config.yaml'}", "seed=9", "--dry-run"], prog="prog", description="")
    assert (loaded.config, loaded.resume, loaded.dry_run) == (Run(steps=3, seed=9), None, True)


def test_what_a_resumed_run_may_not_change_is_told_with_its_source(folder: Path) -> None:
    assert problems("--resume", str(folder), "seed=2") == ["seed=2: must stay 1 (override)"]


def test_wrong_values_are_told_before_they_are_compared(folder: Path) -> None:
    assert problems("--resume", str(folder), "seed=2", "steps=0") == ["steps=0: must be at least 1 (override)"]
    assert problems("--resume", str(folder), "seed=2", "steps=13") == ["steps=13: brings bad luck (override)"]


def test_a_run_whose_config_is_refused_now_cannot_be_compared(folder: Path) -> None:
    (folder / "config.yaml").write_text("steps: 13\nseed: 1\n")
    assert problems("--resume", str(folder), "steps=5", "seed=2") == ["steps=13: brings bad luck"]


def test_what_is_wrong_with_the_resuming_itself_is_told_alone(folder: Path) -> None:
    own = "a resumed run has its own config; override single keys by key=value"
    assert problems("--resume", str(folder), "--config=a", "--config=b", "steps=0") == [f"--config=a: {own}"]
    assert problems("--resume", str(folder / "no")) == [
        f"--resume={folder / 'no'}: must be the folder of a run, which has a config.yaml"
    ]
    assert problems("--resume", str(folder), schema=Once) == [
        f"--resume={folder}: is for RL runs, which have a log; this script starts anew"
    ]
    flags = "known are --config FILE, --resume FOLDER, --dry-run, --help, and key=value"
    assert problems("--resume", str(folder), "--fast") == [f"--fast: unknown flag; {flags}"]


def test_a_flag_that_is_cut_short_is_unknown() -> None:
    flags = "known are --config FILE, --resume FOLDER, --dry-run, --help, and key=value"
    assert problems("steps=1", "--dry") == [f"--dry: unknown flag; {flags}"]
    assert problems("steps=1", "--conf=x")[0] == f"--conf=x: unknown flag; {flags}"


def test_a_flag_without_its_value_is_told_beside_the_other_problems() -> None:
    assert problems("steps=0", "--resume") == [
        "--resume: names no run folder, write --resume FOLDER",
        "steps=0: must be at least 1 (override)",
    ]


def test_two_configs_are_refused_and_the_first_is_looked_at(folder: Path) -> None:
    first = folder / "config.yaml"
    assert problems(f"--config={first}", "--config=b", "--config=c", "steps=0") == [
        f"--config=b: --config={first} is given already, there can be one",
        f"--config=c: --config={first} is given already, there can be one",
        "steps=0: must be at least 1 (override)",
    ]


def test_a_script_runs_main_with_its_command_line_and_exits_with_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(loaded: Loaded[Run]) -> int:
        return loaded.config.steps

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("goaly.base.config.exit_quickly", end)
    monkeypatch.setattr("sys.argv", ["script.py", "steps=7"])
    with pytest.raises(SystemExit) as ended:
        run_cli(main, Run, prog="prog", description="Does it.")
    assert ended.value.code == 7


def test_a_script_says_its_name_beside_its_problems_and_in_its_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("goaly.base.config.exit_quickly", lambda code: None)
    monkeypatch.setattr("sys.argv", ["script.py", "steps=0"])
    run_cli(lambda loaded: None, Run, prog="prog", description="Does it.")
    assert capsys.readouterr().err == (
        "prog: a problem with the configuration\n"
        "  steps=0: must be at least 1 (override)\n"
        "`prog --help` explains every key.\n"
    )
    with pytest.raises(SystemExit) as ended:
        exit_code(lambda loaded: None, Run, ["-h"], prog="other", description="Does more.")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: other [--config FILE] ")
    assert "\nDoes more.\n" in shown
    monkeypatch.setattr("sys.argv", ["script.py", "--help"])
    with pytest.raises(SystemExit):
        run_cli(lambda loaded: None, Run, prog="prog", description="Does it.")
    shown = capsys.readouterr().out
    assert shown.startswith("usage: prog [--config FILE] ")
    assert "\nDoes it.\n" in shown
