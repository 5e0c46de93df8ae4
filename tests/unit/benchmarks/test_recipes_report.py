"""The bookkeeping of the recipes' benchmark: what is left to run, under which settings, and what has not passed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import bench.recipes
from bench.recipes import Finished, Recipe, chosen, complaints, content, files, latest, outcome, page, recipe, remaining
from bench.report import append, finished

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


RATES = [0.4, 0.6, 0.8]


def named(name: str, settings: str = "s", seed: int = 0) -> Recipe:
    return Recipe(name=name, file=Path(f"{name}.yaml"), app="apps.grpo.main", settings=settings, seed=seed)


def done(name: str, pass_at_1: float = 0.9, area: float = 0.6, seed: int = 0) -> Finished:
    return replace(outcome(named(name, seed=seed), SUMMARY | {"pass_at_1_after": pass_at_1}, RATES), area=area)


def test_the_recipes_are_all_files_of_the_folder_the_two_they_stand_on_and_those_with_experts() -> None:
    names = list(files())
    assert names[:4] == ["grpo/tiny", "ppo/tiny", "grpo/tiny_moe", "grpo/tiny_moe_shared"]
    recipes = sorted(file.stem for file in Path("configs/recipes").glob("*.yaml"))
    assert names[4:] == [*recipes, "control/shuffled", "control/flipped", "control/other_group"]


def test_only_names_recipes_and_one_that_is_not_there_is_told_with_those_that_are() -> None:
    assert list(chosen("dapo,ppo/tiny")) == ["dapo", "ppo/tiny"]
    assert chosen(None) == files()
    with pytest.raises(
        ValueError, match=r"--only=dapo,dpo: there is no recipe dpo; known are grpo/tiny, ppo/tiny, grpo/tiny_moe"
    ):
        chosen("dapo,dpo")


def test_a_recipe_knows_its_script(tiny_model_folder: Path) -> None:
    model = f"model.path={tiny_model_folder}"
    assert recipe("grpo/tiny", files()["grpo/tiny"], model).app == "apps.grpo.main"
    assert recipe("ppo/tiny", files()["ppo/tiny"], model).app == "apps.ppo.main"


def test_settings_tell_apart_what_changes_a_result_and_nothing_else(tiny_model_folder: Path) -> None:
    def settings(*overrides: str) -> str:
        return recipe("dapo", files()["dapo"], f"model.path={tiny_model_folder}", *overrides).settings

    assert settings() == settings("run_dir=elsewhere", "hosts.bind={}", "telemetry.trace=false")
    assert settings() == settings("loss.importance_cap=2.0")  # the default, said aloud
    assert (
        len({settings(), settings("steps=7"), settings("loss.options.clip_high=0.3"), settings("prompts.seed=1")}) == 4
    )


def test_a_warm_start_of_other_settings_is_another_result(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settings_with(warm_start: str) -> str:
        (tmp_path / "sft.yaml").write_text(f"base: {bench.recipes.CONFIGS.absolute()}/sft/tiny.yaml\n{warm_start}")
        monkeypatch.setattr(bench.recipes, "WARM_START", tmp_path / "sft.yaml")
        bench.recipes.warm_start.cache_clear()
        return recipe("grpo", files()["grpo"], f"model.path={tiny_model_folder}").settings

    assert settings_with("") == settings_with("output: elsewhere")
    assert settings_with("") != settings_with("steps: 7")
    bench.recipes.warm_start.cache_clear()


def test_a_recipe_starts_from_the_warm_start_of_its_name_if_there_is_one() -> None:
    experts = [bench.recipes.warm_start(name)["tiny"]["experts"] for name in ("gspo.yaml", "tiny_moe.yaml")]
    assert experts == [0, 8]


def test_what_is_finished_is_not_run_again_and_what_had_other_settings_or_seeds_is(tmp_path: Path) -> None:
    file = tmp_path / "new" / "runs.jsonl"
    assert finished(file, Finished) == []
    for one in (named("a"), named("b", "before")):
        append(file, outcome(one, SUMMARY, RATES))
    found = finished(file, Finished)
    wanted = [named("a"), named("a", seed=1), named("b"), named("c")]
    assert remaining(wanted, found) == wanted[1:]
    assert latest(wanted, found) == {"a": [outcome(named("a"), SUMMARY, RATES)], "b": [], "c": []}


def test_of_two_runs_of_a_recipe_and_seed_the_last_one_counts() -> None:
    assert latest([named("a")], [done("a"), done("a", 0.5)]) == {"a": [done("a", 0.5)]}


def test_a_run_knows_its_seed_and_the_area_under_its_curve() -> None:
    run = outcome(named("a", seed=2), SUMMARY, RATES)
    assert (run.seed, run.area, run.pass_at_1) == (2, 0.6, 0.9)


def test_a_seed_overrides_prompts_and_sampling_and_is_no_other_setting(tiny_model_folder: Path) -> None:
    model = f"model.path={tiny_model_folder}"
    one, two = (recipe("grpo", files()["grpo"], model, seed=seed) for seed in (0, 3))
    assert one.settings == two.settings
    assert set(two.overrides) == {model, "prompts.seed=3", "generator.seed=3"}


def test_a_recipe_with_experts_must_reach_more() -> None:
    one, other = (done("grpo/tiny_moe", reached) for reached in (0.9, 0.89))
    assert (one.learned, other.learned) == (True, False)
    (line,) = complaints({"grpo/tiny_moe": [other]}, 1)
    assert line == "grpo/tiny_moe, seed 0: held-out pass@1 0.890, must be at least 0.9"


def test_a_recipe_passes_only_if_every_seed_learns_and_learns_more_than_every_control() -> None:
    assert complaints({"a": [done("a"), done("a", seed=1)], "control/x": [done("control/x", 0.4, 0.45)] * 2}, 2) == []
    runs = {
        "slow": [done("slow", area=0.45)],
        "collapsed": [done("collapsed", area=0.39)],
        "low": [done("low", 0.849)],
        "missing": [],
        "control/learns": [done("control/learns", 0.85, 0.45)],
    }
    assert complaints(runs, 1) == [
        "slow, seed 0: area 0.450, must be above that of every control (0.450)",
        "collapsed, seed 0: area 0.390, must be above pass@1 before training (0.400)",
        "low, seed 0: held-out pass@1 0.849, must be at least 0.85",
        "missing: has 0 finished runs, must have 1",
        "control/learns, seed 0: a control learned, held-out pass@1 0.850",
    ]
    assert content(runs, 1)["pass_at_1"] == {"slow": 0.9, "collapsed": 0.9, "low": 0.849, "control/learns": 0.85}
    json.dumps(content(runs, 1))
    text = page(runs, 1)
    assert "0 of 4 recipes pass: they reach 0.85" in text
    assert "- collapsed, seed 0: area" in text
    assert "All passed." in page({"a": [done("a")]}, 1)
    assert "| low | 1 | 0.400 -> 0.849 (0.849 to 0.849) | 0.600 (0.600 to 0.600) | 160 | 70 | 85 |" in text
    assert "| missing | 0 | not finished |" in text


def test_a_run_that_fails_is_no_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench.recipes, "RUNS", tmp_path)
    broken = replace(named("broken"), file=tmp_path / "not_there.yaml")
    assert bench.recipes.run(broken) is None
    assert "broken                   did not finish: exit code 2; the end of" in capsys.readouterr().out
