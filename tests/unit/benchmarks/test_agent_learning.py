"""The bars of the agents' benchmark, and what it runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.agent_learning import AGENTS, chosen, complaints, experiment, main, report
from bench.recipes import Finished

DONE = Finished(
    recipe="calculator",
    settings="s",
    seed=1,
    pass_at_1_before=0.2,
    pass_at_1=0.95,
    area=0.6,
    seconds=180.0,
    policy_version=60,
    rejected=0,
    failed=0,
)


def test_every_agent_that_ships_is_run_by_its_own_script() -> None:
    files = {agent.file.name for agent in AGENTS.values()}
    assert files == {file.name for file in Path("configs/agent").glob("*.yaml")}
    assert AGENTS["calculator-agents"].overrides == ("agent.function=apps.agent.calculator:with_agents",)
    assert {AGENTS[name].app for name in ("guessing", "guessing-ppo")} == {"apps.agent.guessing"}


def test_only_names_agents_and_one_that_is_not_there_is_told_with_those_that_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert chosen(None) == list(AGENTS)
    with pytest.raises(SystemExit) as ended:
        main(["--only", "guessing,chess"])
    assert ended.value.code == 2
    assert "there is no agent chess; known are calculator, calculator-agents" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"pass_at_1_before": 0.4}, "calculator, seed 1: begins with 0.400, must be under 0.40"),
        ({"pass_at_1": 0.89}, "calculator, seed 1: ends with 0.890, must be at least 0.9"),
        ({"seconds": 601.0}, "calculator, seed 1: took 601 s, must take at most 600"),
        ({}, None),
    ],
)
def test_what_keeps_an_agent_from_passing_is_said(changes: dict[str, float], complaint: str | None) -> None:
    runs = {"calculator": [replace(DONE, **changes)]}
    assert complaints(runs, 1) == ([complaint] if complaint else [])
    assert complaints(runs, 2)[0] == "calculator: has 1 finished runs, must have 2"


def test_the_numbers_are_those_of_the_worst_seed() -> None:
    runs = {"guessing": [DONE, replace(DONE, seed=2, pass_at_1=0.8, seconds=90.0)]}
    found = json.loads(json.dumps(report(runs, 2)))
    assert (found["pass_at_1"], found["seconds"]) == ({"guessing": 0.8}, {"guessing": 180.0})
    assert found["complaints"] == []


def test_a_warm_start_that_is_missing_is_one_clear_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    override = (f"model.path={tmp_path}/none",)
    monkeypatch.setitem(AGENTS, "calculator", AGENTS["calculator"]._replace(overrides=override))  # ty: ignore
    with pytest.raises(SystemExit):
        main(["--only", "calculator"])
    assert f"model.path={tmp_path}/none: has no config.json" in capsys.readouterr().err


def test_a_seed_is_no_other_setting(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    override = (f"model.path={tiny_model_folder}",)
    monkeypatch.setitem(AGENTS, "calculator", AGENTS["calculator"]._replace(overrides=override))  # ty: ignore
    monkeypatch.setattr("bench.recipes.warm_start", lambda file: {"file": file})  # its demonstrations are not made here
    one, two = (experiment("calculator", seed) for seed in (1, 2))
    assert (one.settings, one.app) == (two.settings, "apps.agent.main")
    assert set(two.overrides) == {*override, "prompts.seed=2", "generator.seed=2"}
