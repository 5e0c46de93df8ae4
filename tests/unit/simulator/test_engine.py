"""An engine in virtual time: rates, room, weights."""

import pytest

from goaly.generate.settings import GeneratorSettings
from goaly.simulator.clock import Clock
from goaly.simulator.engine import Engine, Sequence
from goaly.simulator.profile import DecodeRate, EngineTimes


class Decoding:
    """An engine, and when each of its sequences ended."""

    def __init__(self, *, step_seconds=(0.1, 0.1), kv_tokens=None, apply_seconds=0.0, pull_seconds=0.0, **settings):
        self.clock = Clock()
        self.changed: list[Engine] = []
        rates = tuple(
            DecodeRate(running=number, tokens_per_second=number / seconds)
            for number, seconds in enumerate(step_seconds, 1)
        )
        self.engine = Engine(
            self.clock,
            EngineTimes(decode=rates, kv_tokens_per_gib=kv_tokens),
            GeneratorSettings(**{"kv_cache_gib": 1.0, "on_update": "keep"} | settings),
            pull_seconds=pull_seconds,
            apply_seconds=apply_seconds,
            speed=1.0,
            ended=self._end,
            busy_changed=lambda change: None,
            changed=self.changed.append,
        )
        self.ends: dict[str, float] = {}
        self.answers: dict[str, Sequence] = {}
        self.asked = self.most_running = 0
        self.most_tokens = 0.0

    def ask(self, name: str, tokens: int, *, context: int = 0, min_version: int = 0, at: float = 0.0) -> None:
        answer = Sequence(name, context=context, uncached=0, tokens=tokens, min_version=min_version)
        self.clock.at(at, self.engine.submit, answer)
        self.asked += 1

    def run(self) -> dict[str, float]:
        def between() -> None:
            while self.changed:
                self.changed.pop().schedule()
            self.most_running = max(self.most_running, self.engine.running)
            self.most_tokens = max(self.most_tokens, self.engine.kv_tokens)

        self.clock.run(lambda: len(self.ends) < self.asked, between)
        return self.ends

    def _end(self, answer: Sequence) -> None:
        self.ends[answer.owner] = self.clock.now
        self.answers[answer.owner] = answer


def test_a_sequence_alone_takes_a_step_for_each_token():
    decoding = Decoding(step_seconds=(0.1, 0.3))
    decoding.ask("one", 20)
    assert decoding.run() == {"one": pytest.approx(2.0)}


def test_sequences_share_the_engine_and_the_rest_speeds_up_when_one_ends():
    decoding = Decoding(step_seconds=(0.1, 0.3))
    decoding.ask("short", 10)
    decoding.ask("long", 20)
    assert decoding.run() == {"short": pytest.approx(10 * 0.3), "long": pytest.approx(10 * 0.3 + 10 * 0.1)}


def test_no_more_run_than_max_running():  # simulator-1
    decoding = Decoding(max_running=2)
    for name in "abcde":
        decoding.ask(name, 10)
    assert decoding.run()["e"] == pytest.approx(3.0)
    assert decoding.most_running == 2


def test_a_sequence_waits_for_weights_that_are_new_enough():  # simulator-1
    decoding = Decoding(pull_seconds=0.5, apply_seconds=0.25)
    decoding.ask("new", 10, min_version=1)
    decoding.ask("old", 1)
    decoding.clock.at(2.0, decoding.engine.offer, 1)
    assert decoding.run() == {"old": pytest.approx(0.1), "new": pytest.approx(2.0 + 0.5 + 0.25 + 1.0)}
    assert dict(decoding.answers["new"].sampled) == {1: pytest.approx(10)}


def test_tokens_carry_the_version_that_sampled_them():
    decoding = Decoding(pull_seconds=0.0)
    decoding.ask("one", 20)
    decoding.clock.at(0.5, decoding.engine.offer, 1)
    decoding.run()
    assert dict(decoding.answers["one"].sampled) == {0: pytest.approx(5), 1: pytest.approx(15)}


def test_drain_applies_weights_when_nothing_runs_and_starts_nothing_before():
    decoding = Decoding(on_update="drain", apply_seconds=1.0)
    decoding.ask("running", 20)
    decoding.clock.at(0.5, decoding.engine.offer, 1)
    decoding.ask("later", 10, at=0.6)
    assert decoding.run() == {"running": pytest.approx(2.0), "later": pytest.approx(2.0 + 1.0 + 1.0)}
    assert dict(decoding.answers["running"].sampled) == {0: pytest.approx(20)}


def test_a_full_cache_keeps_a_prompt_waiting():  # simulator-1
    decoding = Decoding(kv_tokens=100.0)
    decoding.ask("large", 20, context=60)
    decoding.ask("other", 10, context=50)
    assert decoding.run() == {"large": pytest.approx(2.0), "other": pytest.approx(3.0)}


def test_a_cache_that_fills_up_preempts_the_one_that_started_last():  # simulator-1
    decoding = Decoding(kv_tokens=100.0)
    decoding.ask("first", 60)
    decoding.ask("second", 60)
    ends = decoding.run()
    assert ends["first"] == pytest.approx(6.0)
    assert ends["second"] > ends["first"]
    assert decoding.engine.preempted >= 1
    assert decoding.most_tokens <= 100.0 + 1e-3
    assert sum(tokens for _, tokens in decoding.answers["second"].sampled) == pytest.approx(60, abs=1.01)
