"""The benchmark of bitwise numerics treats both sides alike and names the bars that were missed."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from bench import parity
from bench.parity import LEAST_TOKENS, in_turns
from bench.parity_result import Combination, Result, Sampled, markdown
from goaly.generate.scheduling_counter import SchedulingCounts


def result(*, differing: int = 0, bitwise: float = 1.1, preemptions: int = 4, tokens: int = LEAST_TOKENS) -> Result:
    compared = Combination(
        model="dense", dtype="float32", generator="TP 1", trainer="1 rank", tokens=tokens, differing=differing
    )
    seconds = {"fast": [1.0, 2.0, 1.0], "bitwise": [9.0, 2 * bitwise, bitwise]}
    return Result(
        generators=[
            Sampled(
                model="dense",
                dtype="float32",
                generator="TP 1",
                scheduling=SchedulingCounts(preemptions=count, prompts_in_parts=2, prefix_hits=3),
            )
            for count in (7, preemptions)
        ],
        combinations=[compared],
        seconds={"experts_train_cost": seconds, "generate_cost": seconds, "train_cost": seconds},
    )


def test_each_side_runs_as_often_after_itself_as_after_the_other():
    order: list[str] = []
    seconds = in_turns({name: partial(order.append, name) for name in ("fast", "bitwise")}, rounds=3)
    assert {name: len(rounds) for name, rounds in seconds.items()} == {"fast": 3, "bitwise": 3}
    pairs = list(pairwise(order[3:]))  # after the warm-up, and its last run before the first round
    assert {pair: pairs.count(pair) for pair in pairs} == {
        (first, second): 3 for first in ("fast", "bitwise") for second in ("fast", "bitwise")
    }


def test_a_cost_is_the_median_of_the_rounds_ratios():
    assert result().numbers()["generate_cost"] == pytest.approx(1.1)


def test_what_misses_its_bar_is_named():
    assert result().missed() == []
    assert result(bitwise=1.2).missed() == [f"{model}train_cost 1.2 is above 1.15" for model in ("experts_", "")]
    assert result(differing=3).missed() == ["differing_tokens 3 is above 0"]
    assert result(preemptions=0).missed() == ["preemptions 0 is not above 0"]


def test_the_least_of_any_generator_counts():
    numbers = result().numbers()
    assert (numbers["preemptions"], numbers["prompts_in_parts"], numbers["prefix_hits"]) == (4, 2, 3)
    assert "had at least: preemptions 4, prompts_in_parts 2, prefix_hits 3." in markdown(result())


def test_a_cost_is_reported_with_its_bar():
    assert "| `experts_train_cost` | 1.15 | 1.100 |" in markdown(result())


def test_the_command_fails_after_a_missed_bar(monkeypatch: pytest.MonkeyPatch):
    found = result(bitwise=1.4).seconds["generate_cost"]
    monkeypatch.setattr(parity, "fork_ranks_from_one_server", lambda: None)
    monkeypatch.setattr(parity, "bits", lambda *_: replace(result(tokens=LEAST_TOKENS // 4 - 1), seconds={}))
    monkeypatch.setattr(parity, "training", lambda *_, **__: {"fast": [1.0], "bitwise": [1.0]})
    monkeypatch.setattr(parity, "generation", lambda *_, **__: found)
    with pytest.raises(SystemExit) as ended:
        parity.main([])
    missed = [f"{kind}generate_cost 1.4 is above 1.3" for kind in ("", "experts_")]
    assert ended.value.code == "; ".join([*missed, "tokens 24,999 is below 100,000"])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["--only", "dense", "--model", "folder"], "--only names a tiny model"),
        (["--only", "bits", "--markdown", "page.md"], "--markdown with --only also needs --json"),
    ],
)
def test_what_would_measure_nothing_or_forget_the_rest_is_refused(
    capsys: pytest.CaptureFixture[str], line: list[str], said: str
):
    with pytest.raises(SystemExit):
        parity.main(line)
    assert said in capsys.readouterr().err


def test_what_is_measured_again_takes_the_place_of_what_was_and_the_rest_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    file, asked = tmp_path / "parity.json", []
    before = result().updated(Result(combinations=[replace(result().combinations[0], model="tied", tokens=7)]))
    before.write(file)
    assert Result.read(file) == before

    def bits(name: str, *_: object) -> Result:
        asked.append(name)
        return replace(result(preemptions=5), seconds={})

    monkeypatch.setattr(parity, "fork_ranks_from_one_server", lambda: None)
    monkeypatch.setattr(parity, "bits", bits)
    parity.main(["--only", "dense", "--json", str(file)])
    after = Result.read(file)
    assert asked == ["dense"]
    assert (after.numbers()["preemptions"], after.numbers()["tokens"]) == (5, LEAST_TOKENS + 7)
    assert after.seconds == before.seconds
