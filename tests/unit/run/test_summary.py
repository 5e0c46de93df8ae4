"""What `summary.json` says of a run that evaluated any number of times."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from goaly.base.config import load
from goaly.plan.run_config import RunConfig
from goaly.rollout.evaluation import EvalResult, Evaluation
from goaly.rollout.evaluation_settings import EvaluationSet, EvaluationSettings
from goaly.rollout.running_episodes import Failed
from goaly.run.run import Run
from goaly.run.start import write_summary


@pytest.fixture
def config(tiny_model_folder: Path) -> RunConfig:
    """A run of nine steps that shows nothing."""
    argv = [f"model.path={tiny_model_folder}", "steps=9", "telemetry.tensorboard=false", "telemetry.progress=off"]
    return load(RunConfig, argv, prog="test", description="").config


def evaluation(policy_version: int, pass_at_1: float, **others: float) -> Evaluation:
    """An evaluation that came to this on the default set, and on others."""

    def result(value: float) -> EvalResult:
        return EvalResult(prompts=20, samples_per_prompt=1, pass_at={1: value}, average=value)

    results = {"held_out": result(pass_at_1)} | {name: result(value) for name, value in others.items()}
    return Evaluation(policy_version=policy_version, results=results)


@pytest.mark.parametrize(
    ("evaluations", "start", "before", "after"),
    [
        ([(0, 0.1), (2, 0.2), (4, 0.3)], 0, 0.1, 0.3),
        ([(0, 0.1), (0, 0.15)], 0, 0.1, None),
        ([(3, 0.4)], 0, None, 0.4),
        ([(3, 0.4), (9, 0.5)], 3, 0.4, 0.5),
        ([], 0, None, None),
    ],
)
def test_before_is_the_first_evaluation_ahead_of_training_and_after_is_the_last(
    evaluations, start, before, after, config, tmp_path: Path
) -> None:
    async def summarized() -> dict:
        run = Run(config, tmp_path)
        run.trainer = SimpleNamespace(start_version=start, policy_version=9)
        run.evaluations = [evaluation(version, pass_at_1) for version, pass_at_1 in evaluations]
        write_summary(run, "failed")
        return json.loads((tmp_path / "summary.json").read_text())

    summary = asyncio.run(summarized())
    assert (summary["pass_at_1_before"], summary["pass_at_1_after"]) == (before, after)
    assert [one["policy_version"] for one in summary["evaluations"]] == [version for version, _ in evaluations]


async def test_before_and_after_are_of_the_settings_first_set_whichever_sets_the_evaluations_asked(
    config, tmp_path: Path
) -> None:
    sets = {name: EvaluationSet(task="arithmetic", prompts=1) for name in ("first", "second")}
    run = Run(replace(config, evaluation=EvaluationSettings(sets=sets)), tmp_path)
    run.trainer = SimpleNamespace(start_version=0, policy_version=9)
    run.evaluations = [
        Evaluation(policy_version=version, results={name: EvalResult.of([[value]]) for name, value in asked.items()})
        for version, asked in [
            (0, {"second": 1}),
            (0, {"first": 0, "second": 0}),
            (5, {"first": 1}),
            (9, {"second": 0}),
        ]
    ]
    write_summary(run, "finished")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["pass_at_1_before"], summary["pass_at_1_after"]) == (0, 1)
    assert run.conclusion == "first pass@1: 0.00 -> 1.00, second pass@1: 1.00 -> 0.00"


class Answers:
    """Rollouts that pass every prompt from the first version on, and record what they were asked."""

    def __init__(self):
        self.asked = []

    async def rewards(self, prompts, samples_per_prompt, sampling, policy_version):
        self.asked.append(([prompt.verifier for prompt in prompts], samples_per_prompt, sampling, policy_version))
        return [[float(policy_version > 0)] * samples_per_prompt for _ in prompts]


async def test_every_set_is_asked_in_its_own_way_and_recorded_with_the_policy_version(config, tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "1"}\n{"prompt": "2"}\n{"prompt": "1"}\n')
    own_set = EvaluationSet(
        files=(str(own),), samples_per_prompt=2, pass_at=(2,), sampling={"top_p": 0.5}, verifier="a.b:c"
    )
    sets = {"sums": EvaluationSet(task="arithmetic", prompts=3), "own": own_set}
    run = Run(replace(config, evaluation=EvaluationSettings(sets=sets)), tmp_path)
    run.rollouts = answers = Answers()
    assert run.conclusion == "policy version 0"
    for version in (0, 4):
        run.trainer = SimpleNamespace(start_version=0, policy_version=version)
        await run.evaluate()
    assert answers.asked[2:] == [([None] * 3, 1, {}, 4), (["a.b:c"] * 2, 2, {"top_p": 0.5}, 4)]
    assert (await run.evaluate(["own"])).results.keys() == {"own"}
    assert run.conclusion == "sums pass@1: 0.00 -> 1.00, own pass@1: 0.00 -> 1.00"
    run.metrics.close()
    first, second, _ = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    scores = {"evaluation/sums/pass@1", "evaluation/sums/avg@1"}
    scores |= {f"evaluation/own/{score}" for score in ("pass@1", "pass@2", "avg@2")}
    assert (first.keys() - {"time"}, first["policy_version"]) == (scores | {"policy_version"}, 0)
    assert {second[score] for score in scores} == {1.0}
    write_summary(run, "finished")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [list(one["sets"]) for one in summary["evaluations"]] == [["sums", "own"], ["sums", "own"], ["own"]]
    assert summary["evaluations"][1] == {
        "policy_version": 4,
        "sets": {
            "sums": {"prompts": 3, "pass@1": 1.0, "avg@1": 1.0},
            "own": {"prompts": 2, "pass@1": 1.0, "pass@2": 1.0, "avg@2": 1.0},
        },
    }
    with pytest.raises(ValueError, match="no evaluation set is named owns; known are sums, own"):
        await run.evaluate(["owns"])


async def test_prompts_that_are_too_long_and_episodes_that_fail_end_no_evaluation_and_are_recorded_each_time(
    config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Short(Answers):
        async def rewards(self, prompts, *args):
            return [[None], [Failed("no such tool")], *(await super().rewards(prompts, *args))[2:]]

    sets = {"sums": EvaluationSet(task="arithmetic", prompts=4)}
    run = Run(replace(config, evaluation=EvaluationSettings(sets=sets)), tmp_path)
    run.rollouts = Short()
    for version in (0, 4):
        run.trainer = SimpleNamespace(start_version=0, policy_version=version)
        await run.evaluate()
    run.metrics.close()
    lines = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    scores = [[line[f"evaluation/sums/{key}"] for key in ("too_long", "failed", "pass@1")] for line in lines]
    assert scores == [[1, 1, 0], [1, 1, 0.5]]
    resumed = Run(replace(config, evaluation=EvaluationSettings(sets=sets)), tmp_path)
    assert [one.metrics for one in resumed.evaluations] == [one.metrics for one in run.evaluations]
    failed = "evaluation set sums: 1 of 4 samples count reward 0, because their episodes failed; the last: no such tool"
    assert caplog.messages == [
        failed,
        "evaluation set sums: 1 of 4 prompts leave no room for an answer in the context and count as not solved",
        failed,
    ]


async def test_the_last_line_of_a_run_has_the_pass_at_1_of_held_out_prompts(config, tmp_path: Path) -> None:
    run = Run(config, tmp_path)
    run.trainer = SimpleNamespace(start_version=0, policy_version=9)
    run.evaluations = [evaluation(0, 0.361), evaluation(5, 0.7), evaluation(9, 0.975)]
    assert run.conclusion == "held-out pass@1: 0.36 -> 0.97"
    run.evaluations = [evaluation(0, 0.361)]
    assert run.conclusion == "held-out pass@1: 0.36"
