"""The staleness experiment's bookkeeping: what is left to run, intervals, differences."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from bench.chart import line_chart
from bench.lagged import LaggedSettings, Outcome
from bench.report import Interval, finished
from bench.staleness import (
    FIRST_SEED,
    LEARNING_RATES,
    LOSSES,
    MAIN,
    OTHERS,
    RECOMMENDED,
    Arm,
    Finished,
    content,
    plot,
    remaining,
    settings_of,
    summary,
    table,
)
from goaly.base.config import load
from goaly.losses.objective import PolicyObjective
from goaly.plan.run_config import RunConfig
from goaly.reward.settings import AdvantageSettings


@pytest.fixture
def settings(tmp_path: Path) -> LaggedSettings:
    (tmp_path / "model.safetensors").write_bytes(b"warm start")
    return LaggedSettings(model=str(tmp_path))


def run(arm: Arm, seed: int, pass_at_1: float, settings: str = "", **more: float) -> Finished:
    known = {"area": 0.5, "effective_sample_size": 0.9, "age_mean": 1.0, "age_max": 2.0, "stopped_at": None}
    curve = [(0, 0.4), (10, pass_at_1)]
    return Finished(
        arm=arm.name,
        lr=arm.lr,
        seed=seed,
        settings=settings,
        pass_at_1=pass_at_1,
        curve=curve,
        seconds=1.0,
        **(known | more),
    )


def arm(loss: str, max_staleness: int) -> Arm:
    return Arm(loss=loss, max_staleness=max_staleness, lr=LEARNING_RATES[0])


def test_an_interval_is_students_over_the_standard_error() -> None:
    interval = Interval.of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert interval.mean == 3.0
    assert interval.half_width == pytest.approx(2.776 * 2.5**0.5 / 5**0.5)
    assert str(interval) == "3.000 ± 1.963"
    assert not interval.holds_zero


def test_one_value_has_no_interval_and_excludes_nothing() -> None:
    interval = Interval.of([0.7])
    assert (interval.half_width, interval.holds_zero, str(interval)) == (None, True, "0.700")


def test_the_area_is_the_mean_over_versions_not_over_points() -> None:
    outcome = Outcome(curve=[(0, 0.0), (10, 1.0), (40, 1.0)], metrics=[])
    assert outcome.area == pytest.approx((5 + 30) / 40)


def test_what_is_finished_is_not_run_again_and_what_had_other_settings_is(
    settings: LaggedSettings, tmp_path: Path
) -> None:
    file = tmp_path / "runs.jsonl"
    done = run(MAIN[0], FIRST_SEED, 0.9, settings_of(MAIN[0], settings))
    other = run(MAIN[1], FIRST_SEED, 0.9, settings_of(MAIN[1], replace(settings, steps=1)))
    file.write_text("".join(json.dumps(asdict(one)) + "\n" for one in (done, other)))
    work = remaining(finished(file, Finished), settings, 2, 1)
    first, second = FIRST_SEED, FIRST_SEED + 1
    expected = [(main, first) for main in MAIN[1:]] + [(main, second) for main in MAIN]
    assert work == expected + [(rest, first) for rest in OTHERS]


def test_another_learning_rate_is_another_experiment(settings: LaggedSettings) -> None:
    one, other = (Arm(loss=RECOMMENDED, max_staleness=8, lr=lr) for lr in LEARNING_RATES)
    assert settings_of(one, settings) != settings_of(other, settings)


def test_the_reported_seeds_are_not_those_that_the_settings_were_chosen_on(settings: LaggedSettings) -> None:
    assert min(seed for _, seed in remaining([], settings, 5, 3)) > 4


def test_another_warm_start_is_another_experiment(settings: LaggedSettings) -> None:
    before = settings_of(MAIN[0], settings)
    (Path(settings.model) / "model.safetensors").write_bytes(b"another one")
    assert settings_of(MAIN[0], settings) != before


def test_a_difference_is_taken_seed_by_seed_from_the_run_at_zero() -> None:
    fresh, stale = arm("default", 0), arm("uncorrected", 8)
    runs = [run(fresh, 0, 0.8), run(fresh, 1, 0.6), run(stale, 0, 0.7), run(stale, 1, 0.5), run(stale, 2, 0.0)]
    arms = summary(runs)
    assert list(arms) == ["default/0", "uncorrected/8"]
    assert arms["default/0"]["difference"] is arms["default/0"]["area_difference"] is None
    difference = arms["uncorrected/8"]["difference"]
    assert (difference.mean, difference.half_width, difference.count) == (pytest.approx(-0.1), pytest.approx(0), 2)
    assert arms["uncorrected/8"]["seeds"] == 3
    assert arms["uncorrected/8"]["pass_at_1"].mean == pytest.approx(0.4)


def test_at_zero_all_losses_are_one_so_only_the_default_is_run() -> None:
    assert {one.loss for one in (*MAIN, *OTHERS) if one.max_staleness == 0} == {"default"}
    gradients = []
    for name, loss in LOSSES.items():
        logprobs_P = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
        columns = {
            "sampler_logprobs": logprobs_P.detach().clone(),
            "sampler_versions": torch.zeros(3, dtype=torch.int32),
            "advantages": torch.tensor([1.0, 1.0, -1.0]),
            "documents": torch.tensor([0, 0, 1]),
        }
        aggregated = replace(loss, aggregation="token_mean")
        PolicyObjective(aggregated)(logprobs_P, torch.zeros(3), columns, 0).total.backward()
        assert logprobs_P.grad is not None, name
        gradients.append(logprobs_P.grad)
    for gradient in gradients:
        torch.testing.assert_close(gradient, gradients[0])


def test_the_recommended_loss_is_the_recipe_for_stale_data(tiny_model_folder: Path) -> None:
    arguments = ["--config=configs/recipes/stale.yaml", f"model.path={tiny_model_folder}"]
    config = load(RunConfig, arguments, prog="test", description="").config
    assert config.loss == LOSSES[RECOMMENDED]
    assert config.advantages == AdvantageSettings()


def test_table_file_and_plot_hold_every_arm() -> None:
    at_one_rate = [main for main in MAIN if main.lr == LEARNING_RATES[0]]
    arms = summary([run(main, seed, 0.5 + 0.1 * seed) for main in at_one_rate for seed in range(2)])
    assert content(arms)["pass_at_1"] == {name: pytest.approx(0.55) for name in arms}
    json.dumps(content(arms))
    for main in at_one_rate:
        assert f"| {main.name} | 2 |" in table(arms)
        assert f">{main.name}</text>" in plot(arms)


def test_a_chart_names_its_curves_and_is_the_same_text_each_time() -> None:
    def chart(floor: float | None) -> str:
        curves = {"slow": [(0, 0.1), (10, 0.4)], "fast": [(0, 0.1), (10, 0.9)]}
        return line_chart(curves, title="Rates", x_label="step", y_label="pass@1", floor=floor)

    assert chart(None) == chart(None) != chart(0.05)
    assert all(f">{text}<" in chart(None) for text in ("slow", "fast", "Rates", "step", "pass@1"))
