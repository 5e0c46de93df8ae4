"""The advantages of live turns, against written-out values."""

from pathlib import Path

import pytest
import torch
from live_traffic import ONE, answered, asked, opened, said, user

from goaly.live.advantages import turn_rewards
from goaly.live.baselines import PRIOR, Baselines
from goaly.live.collection import CollectionLimits
from goaly.live.hints import teacher_sees
from goaly.live.settings import LiveHintSettings
from goaly.live.turn import Reaction, ReactionKind
from goaly.live.turn_samples import samples_of
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.reward.advantages import ESTIMATORS, Scored


def of_turns(tokenizer: ChatTokenizer, folder: Path, scores: list[tuple[str, float]]) -> list[list[float]]:
    """The advantage of each turn's tokens; the turns answer these questions, and have these scores."""
    traffic = opened(tokenizer, folder)
    for question, score in scores:
        answered(traffic, ONE, [user(question)], "8")
        turn = list(traffic.collection.turns.values())[-1]
        turn.baseline = 0.25
        traffic.collection.hear(turn.id, Reaction(kind=ReactionKind.FEEDBACK, score=score), 0.0)
    samples = samples_of([(turn, traffic.turn(turn.id)) for turn in traffic.collection.turns.values()])
    found = turn_rewards(scored(samples))
    for sample, values_T in zip(samples, found, strict=True):
        assert (values_T[~sample.tokens["trained"]] == 0).all()
    return [values_T[sample.tokens["trained"]].tolist() for sample, values_T in zip(samples, found, strict=True)]


def scored(samples: list) -> Scored:
    return Scored(
        samples=tuple(samples),
        rewards=tuple(sample.tokens["rewards"].double() for sample in samples),
        groups_S=torch.zeros(len(samples), dtype=torch.int64),
        episodes_S=torch.arange(len(samples)),
    )


def test_the_estimator_is_found_by_the_name_in_the_settings():
    assert ESTIMATORS.find("goaly.live.advantages:turn_rewards") is turn_rewards


def test_a_single_turn_is_compared_with_the_baseline_of_its_key(tokenizer: ChatTokenizer, tmp_path: Path):
    (only,) = of_turns(tokenizer, tmp_path, [("3+4?", 1.0)])
    assert set(only) == {0.75}


def test_siblings_are_compared_with_each_other(tokenizer: ChatTokenizer, tmp_path: Path):
    found = of_turns(tokenizer, tmp_path, [("3+4?", 1.0), ("3+4?", -1.0), ("3+4?", -1.0), ("5+4?", -1.0)])
    means = [sum(one) / len(one) for one in found]
    assert means == pytest.approx([4 / 3, -2 / 3, -2 / 3, -1.25])


def test_equal_siblings_are_no_signal(tokenizer: ChatTokenizer, tmp_path: Path):
    assert {value for one in of_turns(tokenizer, tmp_path, [("3+4?", 0.1)] * 3) for value in one} == {0.0}


def test_each_turn_of_a_trajectory_has_its_own_advantage(tokenizer: ChatTokenizer, tmp_path: Path):
    traffic = opened(tokenizer, tmp_path)
    answered(traffic, ONE, [user("3+4?")], "8")
    answered(traffic, ONE, [user("3+4?"), said("8"), user("no, 7")], "7")
    for turn, score in zip(traffic.collection.turns.values(), (-1.0, 1.0), strict=True):
        traffic.collection.hear(turn.id, Reaction(kind=ReactionKind.FEEDBACK, score=score), 0.0)
    (sample,) = samples_of([(turn, traffic.turn(turn.id)) for turn in traffic.collection.turns.values()])
    (values_T,) = turn_rewards(scored([sample]))
    first, second = (values_T[note["start"] : note["stop"]] for note in sample.notes)
    assert set(first.tolist()) == {-1.0}
    assert set(second.tolist()) == {1.0}


def test_a_baseline_begins_at_zero_and_moves_to_the_mean():
    baselines = Baselines()
    assert baselines.of("app") == 0.0
    baselines.learn("app", 1.0)
    assert baselines.of("app") == pytest.approx(1 / (PRIOR + 1))
    for _ in range(2000):
        baselines.learn("app", 1.0)
    assert baselines.of("app") == pytest.approx(1.0, abs=0.01)
    assert baselines.of("other") == 0.0


def test_a_turn_that_a_teacher_alone_judges_has_no_advantage_and_a_context(tokenizer: ChatTokenizer, tmp_path: Path):
    """live-23"""
    traffic = opened(tokenizer, tmp_path, limits=CollectionLimits(hints_alone=True))
    answered(traffic, ONE, [user("3+4?")], "8")
    asked(traffic, ONE, [user("3+4?"), said("8"), user("no, 7")])
    answered(traffic, ONE, [user("3+4?")], "7")
    first, second = traffic.collection.turns.values()
    traffic.collection.hear(second.id, Reaction(kind=ReactionKind.FEEDBACK, score=1.0), 0.0)
    sees = teacher_sees(LiveHintSettings(text="{reaction}|{question}|{response}"), tokenizer, 1000)
    samples = samples_of([(turn, traffic.turn(turn.id)) for turn in (first, second)], sees)
    hinted, scored_alone = turn_rewards(scored(samples))
    assert (hinted == 0).all()
    assert set(scored_alone[samples[1].tokens["trained"]].tolist()) == {1.0}
    ((start, stop, tokens),) = samples[0].teacher_contexts
    assert samples[0].tokens["trained"][start:stop].all()
    assert ", 7|3+4?|8" in tokenizer.decode(list(tokens))
    assert samples[1].teacher_contexts == ()
    assert teacher_sees(LiveHintSettings(), tokenizer, len(tokens))(first, traffic.turn(first.id)) is None
