"""The overlap benchmark: its loads are what they say, and its ratios are taken against the best synchronous arm."""

import pytest

from bench import tail
from bench.loop import Measured, arms, load_of, summary, table


@pytest.mark.parametrize("longest_over_mean", [2, 5, 20])
def test_a_load_has_the_stated_mean_and_longest_answer(longest_over_mean: int) -> None:
    longest = longest_over_mean * tail.MEAN
    power = tail._power(longest)
    lengths = [tail._quantile(tail._chance(str(sample)), power, longest) for sample in range(20_000)]
    assert sum(lengths) / len(lengths) == pytest.approx(tail.MEAN, rel=0.05)
    assert longest * 0.9 < max(lengths) <= longest
    assert min(lengths) >= tail.SHORTEST


def test_a_load_leaves_room_for_its_longest_answer() -> None:
    assert load_of("task")[1] == ()
    assert load_of("20")[1] == ("sampling.max_tokens=800", "generator.max_context=864", "backlog.row_length=1024")


def test_the_colocated_arm_uses_every_core_in_both_halves_and_is_synchronous() -> None:
    (colocated,) = [arm for arm in arms(2) if arm.name == "colocated/0"]
    expected = {"generator.replicas=2", "trainer.fsdp=2", "hosts.bind={}", "backlog.max_staleness=0"}
    assert set(colocated.overrides) == expected


def test_the_speedup_is_over_the_best_synchronous_arm_and_numbers_are_medians() -> None:
    def one(arm: str, step_seconds: float) -> Measured:
        zeros = {"tokens_per_second": 1.0, "pass_rate": 0.5, "age_mean": 0.0, "update_steps": 0.1}
        return Measured(load="5", arm=arm, step_seconds=step_seconds, publish_share=0.01, machine={}, **zeros)

    found = [one("divided/0", 1.2), one("colocated/0", 1.0), *(one("divided/8", s) for s in (0.4, 0.5, 9.0))]
    result = summary(found, {"5": (0.3, 0.45)})
    assert result["5"]["speedup"] == pytest.approx(2.0)
    assert result["5"]["speedup_8_vs_0"] == pytest.approx(2.4)
    assert result["5"]["arms"]["divided/8"]["overlap"] == pytest.approx(0.9)
    assert "| 5 | divided/8 | 0.500 (0.400 to 9.000) |" in table(result)
