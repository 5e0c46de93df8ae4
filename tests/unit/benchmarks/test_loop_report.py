"""The overlap benchmark: its loads are what they say, and its ratios are taken against the best synchronous arm."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from bench import tail
from bench.loop import Measured, Round, arms, room_for, round_of, summary, table
from goaly.base.config import load
from goaly.models.tiny_model import write_tiny_model
from goaly.plan.run_config import RunConfig


@pytest.mark.parametrize("longest_over_mean", [2, 5, 20])
def test_a_load_has_the_stated_mean_and_longest_answer(longest_over_mean: int) -> None:
    longest = longest_over_mean * tail.MEAN
    power = tail._power(longest)
    lengths = [tail._quantile(tail.drawn(str(sample)), power, longest) for sample in range(20_000)]
    assert sum(lengths) / len(lengths) == pytest.approx(tail.MEAN, rel=0.05)
    assert longest * 0.9 < max(lengths) <= longest
    assert min(lengths) >= tail.SHORTEST


def test_a_load_leaves_room_for_its_longest_answer_also_in_the_models_context(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    assert room_for("task", tmp_path / "model", tmp_path) == ()
    short = room_for("5", tmp_path / "model", tmp_path)
    assert short == ("sampling.max_tokens=200", "generator.max_context=264", "backlog.row_length=1024")
    room = room_for("20", tmp_path / "model", tmp_path)
    assert room[:3] == ("sampling.max_tokens=800", "generator.max_context=864", "backlog.row_length=1024")
    (longer,) = [setting.partition("=")[2] for setting in room[3:]]
    load(RunConfig, [f"model.path={longer}", "steps=1", *room[:3]], prog="", description="")


def test_the_colocated_arm_uses_every_core_in_both_halves_and_is_synchronous() -> None:
    (colocated,) = [arm for arm in arms(2) if arm.name == "colocated/0"]
    expected = {"generator.replicas=2", "trainer.fsdp=2", "hosts.bind={}", "backlog.max_staleness=0"}
    assert set(colocated.overrides) == expected


def test_the_speedup_is_over_the_best_synchronous_arm_and_numbers_are_medians() -> None:
    def one(arm: str, step_seconds: float) -> Measured:
        zeros = {"tokens_per_second": 1.0, "pass_rate": 0.5, "age_mean": 0.0, "update_steps": 0.1}
        return Measured(load="5", arm=arm, step_seconds=step_seconds, publish_share=0.01, machine={}, **zeros)

    found = [one("divided/0", 1.2), one("colocated/0", 1.0), *(one("divided/8", s) for s in (0.4, 0.5, 9.0))]
    rounds = [
        Round(load="5", steps=9, t_gen=generate, t_train=0.45, runs=tuple(found[number::3]))
        for number, generate in enumerate((0.3, 0.2, 0.4))
    ]
    assert [round_of(json.dumps(asdict(each))) for each in rounds] == rounds
    result = summary(rounds)
    assert (result["5"]["t_gen"], result["5"]["t_train"]) == (0.3, 0.45)
    assert result["5"]["speedup"] == pytest.approx(2.0)
    assert result["5"]["speedup_8_vs_0"] == pytest.approx(2.4)
    assert result["5"]["arms"]["divided/8"]["overlap"] == pytest.approx(0.9)
    assert "| 5 | divided/8 | 0.500 (0.400 to 9.000) |" in table(result)
