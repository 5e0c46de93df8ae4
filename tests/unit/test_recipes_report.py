"""The bookkeeping of the recipes' benchmark: what is left to run, under which settings, and what has not passed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import bench.recipes
from bench.recipes import Finished, Recipe, chosen, complaints, content, files, latest, outcome, page, recipe, remaining
from bench.record import append, finished

SUMMARY = {
    "status": "finished",
    "pass_at_1_before": 0.4,
    "pass_at_1_after": 0.9,
    "seconds": 85.2,
    "policy_version": 160,
    "admitted": 1350,
    "trained": 1280,
    "rejected": 70,
    "failed": 0,
    "reasons": {"run_ended": 70},
}


def named(name: str, settings: str = "s") -> Recipe:
    return Recipe(name=name, file=Path(f"{name}.yaml"), app="apps.grpo.main", settings=settings)


def test_the_recipes_are_all_files_of_the_folder_and_the_two_they_stand_on() -> None:
    names = list(files())
    assert names[:2] == ["grpo/tiny", "ppo/tiny"]
    assert names[2:] == sorted(file.stem for file in Path("configs/recipes").glob("*.yaml"))


def test_only_names_recipes_and_one_that_is_not_there_is_told_with_those_that_are() -> None:
    assert list(chosen("dapo,ppo/tiny")) == ["dapo", "ppo/tiny"]
    assert chosen(None) == files()
    with pytest.raises(
        ValueError, match=r"--only=dapo,dpo: there is no recipe dpo; known are grpo/tiny, ppo/tiny, a3po"
    ):
        chosen("dapo,dpo")


def test_a_recipe_knows_its_script(tiny_model_folder: Path) -> None:
    model = f"model.path={tiny_model_folder}"
    assert recipe("grpo/tiny", files()["grpo/tiny"], model).app == "apps.grpo.main"
    assert recipe("ppo/tiny", files()["ppo/tiny"], model).app == "apps.ppo.main"


def test_settings_tell_apart_what_changes_a_result_and_nothing_else(tiny_model_folder: Path) -> None:
    def settings(*overrides: str) -> str:
        return recipe("dapo", files()["dapo"], f"model.path={tiny_model_folder}", *overrides).settings

    assert settings() == settings("run_dir=elsewhere", "hosts.bind={}", "telemetry.journal=false")
    assert settings() == settings("loss.importance_cap=2.0")  # the default, said aloud
    assert (
        len({settings(), settings("steps=7"), settings("loss.options.clip_high=0.3"), settings("prompts.seed=1")}) == 4
    )


def test_another_warm_start_is_another_result(tiny_model_folder: Path, tmp_path: Path) -> None:
    for file in tiny_model_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    before = recipe("grpo", files()["grpo"], f"model.path={tmp_path}").settings
    weights = bytearray((tmp_path / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert recipe("grpo", files()["grpo"], f"model.path={tmp_path}").settings != before


def test_what_is_finished_is_not_run_again_and_what_had_other_settings_is(tmp_path: Path) -> None:
    file = tmp_path / "new" / "runs.jsonl"
    assert finished(file, Finished) == []
    for one in (named("a"), named("b", "before")):
        append(file, outcome(one, SUMMARY))
    found = finished(file, Finished)
    assert remaining([named("a"), named("b"), named("c")], found) == [named("b"), named("c")]
    assert latest([named("a"), named("b")], found) == {"a": outcome(named("a"), SUMMARY), "b": None}


def test_of_two_runs_of_a_recipe_the_last_one_counts() -> None:
    first = outcome(named("a"), SUMMARY)
    second = replace(first, pass_at_1=0.5)
    assert latest([named("a")], [first, second]) == {"a": second}


def test_a_recipe_that_ends_too_low_or_not_at_all_is_told() -> None:
    good = outcome(named("good"), SUMMARY | {"pass_at_1_after": 0.85})
    low = outcome(named("low"), SUMMARY | {"pass_at_1_after": 0.849})
    runs = {"good": good, "low": low, "missing": None}
    assert complaints({"good": good}) == []
    assert complaints(runs) == [
        "low: held-out pass@1 0.849, must be at least 0.85",
        "missing: has no finished run",
    ]
    assert content(runs)["pass_at_1"] == {"good": 0.85, "low": 0.849}
    json.dumps(content(runs))
    text = page(runs)
    assert "1 of\n3 recipes have at least 0.85." in text
    assert "| good | 0.400 -> 0.850 | 160 | 70 | 85 |" in text
    assert "| low | 0.400 -> 0.849 (too low) |" in text
    assert "| missing | not finished |" in text


def test_a_run_that_fails_is_no_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench.recipes, "RUNS", tmp_path)
    broken = replace(named("broken"), file=tmp_path / "not_there.yaml")
    assert bench.recipes.run(broken) is None
    assert "broken                   did not finish: exit code 2; the end of" in capsys.readouterr().out
