"""`python -m apps.coding.tasks`: tasks are listed, validated with real sandboxes, and graded by predictions."""

import json
import tomllib
from pathlib import Path

import pytest

from apps.coding.tasks.__main__ import main
from goaly.coding.predictions import Prediction, write_predictions
from tests.unit.grading.harbor_folders import CONFIG, write_harbor
from tests.unit.grading.own_folders import FAIL_TO_PASS, PASS_TO_PASS, SOLUTION, write_own
from tests.unit.grading.swe_rows import row, write_rows


def test_list_shows_each_task_and_keeps_those_that_can_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", row(), row(instance_id="acme__shop-2", patch="no patch"))
    assert main(["list", str(rows), "--keep", str(tmp_path / "good.jsonl"), "coding.tasks.swe.image=acme/{id}"]) == 1
    first, second, last = capsys.readouterr().out.splitlines()
    assert first == "acme__Shop-12  1 tests to pass, 1 to keep; in acme/acme__shop-12"
    assert second.startswith("acme__shop-2  cannot be used: ")
    assert last == "1 of 2 tasks can be used"
    assert main(["list", str(tmp_path / "good.jsonl"), "coding.tasks.swe.image=acme/{id}"]) == 0


@pytest.mark.slow
def test_validate_writes_the_ids_of_tests_and_leaves_out_tasks_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = write_own(tmp_path / "tasks/own")
    (own / "task.toml").write_text('[task]\nproblem = "Half of the price is tax."\n')
    words = ["--times", "1", "--json", str(tmp_path / "out.json"), "--keep", str(tmp_path / "good.jsonl")]
    assert main(["validate", str(own), "--write", *words]) == 0
    written = tomllib.loads((own / "task.toml").read_text())["task"]
    assert (written["fail_to_pass"], written["pass_to_pass"]) == ([FAIL_TO_PASS], [PASS_TO_PASS])
    broken = write_own(tmp_path / "tasks/broken")
    (broken / "hidden_tests/tests/test_hidden.py").write_text("import nothing\n")
    capsys.readouterr()
    assert main(["validate", str(tmp_path / "tasks"), *words]) == 1
    said = capsys.readouterr().out
    assert "broken  left out: the solution scores 0, must be 1 (time 1 of 1): " in said
    assert said.endswith("1 of 2 tasks can be used\n")
    assert json.loads((tmp_path / "out.json").read_text())["own"]["wrong"] is None
    assert json.loads((tmp_path / "good.jsonl").read_text()) == {"task": "tasks/own"}


def test_a_task_of_harbors_form_is_validated_in_a_root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wc").mkdir()
    script = 'if [ "$(cat answer.txt 2>&1)" = "$EXPECTED" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n'
    write_harbor(tmp_path / "wc", task_toml=CONFIG, tests__test_sh=script)
    assert main(["validate", str(tmp_path / "wc"), "--times", "1", "coding.tasks.root=/"]) == 0, capsys.readouterr().out


def test_grade_reports_with_the_keys_of_swe_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("solved", "unsolved", "empty", "absent"):
        write_own(tmp_path / "tasks" / name)
    patches = {"solved": SOLUTION, "unsolved": SOLUTION.replace("/ 2", "/ 3"), "empty": ""}
    made = [Prediction(instance_id=id, model_name_or_path="me", model_patch=patch) for id, patch in patches.items()]
    write_predictions(tmp_path / "predictions.jsonl", made)
    command = ["grade", str(tmp_path / "tasks"), str(tmp_path / "predictions.jsonl")]
    assert main([*command, "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["resolved_ids"] == ["solved"]
    assert report["unresolved_ids"] == ["unsolved"]
    assert report["empty_patch_ids"] == ["empty"]
    assert report["incomplete_ids"] == ["absent"]
    counts = {key: report[f"{key}_instances"] for key in ("total", "submitted", "completed", "resolved", "error")}
    assert counts == {"total": 4, "submitted": 3, "completed": 2, "resolved": 1, "error": 0}
    assert f"unsolved  unresolved: {FAIL_TO_PASS} failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["list", "gone.jsonl"], "gone.jsonl: there is no such file"),
        (["list", "rows.jsonl", "coding.tasks.swe.imag=x"], "coding.tasks.swe.imag=x: unknown key"),
        (["grade", "rows.jsonl", "other.jsonl"], "other.jsonl: acme__other-1 is no task of rows.jsonl"),
        (["grade", "rows.jsonl", "gone.jsonl"], "gone.jsonl: cannot be read"),
        (["validate", "rows.jsonl", "--write"], "--write is for tasks of our own form"),
    ],
)
def test_a_command_that_cannot_run_says_why(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", row())
    other = Prediction(instance_id="acme__other-1", model_name_or_path="me", model_patch="")
    write_predictions(tmp_path / "other.jsonl", [other])
    assert main(words) == 2
    assert says in capsys.readouterr().err


def test_an_unknown_option_ends_with_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["list", "rows.jsonl", "--deep"])
    assert "--deep: no such option" in capsys.readouterr().err
