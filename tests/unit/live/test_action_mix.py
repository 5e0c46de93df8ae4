"""Kinds of answers, and the test of their mix."""

import numpy as np
import pytest

from goaly.live.action_mix import ActionKind, ActionMix, action_of


@pytest.mark.parametrize(
    ("text", "calls", "malformed", "kind"),
    [
        ("12", 0, 0, ActionKind.ANSWER),
        ("", 1, 0, ActionKind.TOOL_CALL),
        ("May I?", 1, 0, ActionKind.TOOL_CALL),
        ("", 1, 1, ActionKind.MALFORMED_CALL),
        ("Which file do you mean?\n", 0, 0, ActionKind.QUESTION),
        ("I'm sorry, but I can't help with that.", 0, 0, ActionKind.REFUSAL),
        ("I\u2019m unable to do so. Shall I try?", 0, 0, ActionKind.REFUSAL),
        ("Done. " * 100 + "I cannot say more.", 0, 0, ActionKind.ANSWER),
    ],
)
def test_an_answer_is_one_kind_of_action(text: str, calls: int, malformed: int, kind: ActionKind):
    assert action_of(text, calls=calls, malformed=malformed) is kind


BASELINE = [(ActionKind.ANSWER, 0.2)] * 9 + [(ActionKind.QUESTION, 0.1)]


def mix_of(shares: dict[ActionKind, float], *, pairs: int, length: float = 0.2, seed: int = 1) -> ActionMix:
    chance, mix = np.random.default_rng(seed), ActionMix(bound=0.2, error_rate=0.05)
    for kind in chance.choice([*shares], p=[*shares.values()], size=pairs):
        mix.add(str(kind), length, BASELINE)
    return mix


def test_the_mix_of_the_baseline_is_within_the_bound():
    mix = mix_of({ActionKind.ANSWER: 0.9, ActionKind.QUESTION: 0.1}, pairs=120)
    assert mix.is_within
    assert mix.shifts == []


def test_a_policy_that_asks_instead_of_acting_is_noticed():
    mix = mix_of({ActionKind.ANSWER: 0.3, ActionKind.QUESTION: 0.7}, pairs=120)
    assert not mix.is_within
    assert {"more question", "less answer"} <= set(mix.shifts)


def test_malformed_calls_count_as_actions():
    mix = mix_of({ActionKind.ANSWER: 0.4, ActionKind.MALFORMED_CALL: 0.6}, pairs=120)
    assert "more malformed_call" in mix.shifts


def test_answers_of_another_length_are_noticed():
    mix = mix_of({ActionKind.ANSWER: 0.9, ActionKind.QUESTION: 0.1}, pairs=120, length=0.9)
    assert mix.shifts == ["more length"]


def test_a_few_answers_show_nothing():
    mix = mix_of({ActionKind.ANSWER: 1.0}, pairs=5)
    assert not mix.is_within
    assert mix.shifts == []


def test_a_mix_at_the_bound_passes_at_most_at_the_error_rate():
    # a share of questions of 0.1 + 0.2
    shares = {ActionKind.ANSWER: 0.7, ActionKind.QUESTION: 0.3}
    passed = sum(mix_of(shares, pairs=100, seed=seed).is_within for seed in range(150))
    assert passed <= 0.05 * 150 + 3 * (0.05 * 0.95 * 150) ** 0.5
