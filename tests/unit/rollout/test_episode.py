"""Episodes: what was said becomes a trajectory, token by token."""

from dataclasses import replace

import pytest
import torch

from goaly.base.errors import EpisodeError
from goaly.generate.policy import Completion
from goaly.generate.request import Finish
from goaly.prompts.prompt import Prompt
from goaly.reward.estimate import estimate
from goaly.reward.settings import AdvantageSettings
from goaly.rollout.episode import Episode
from goaly.trajectory import Group, Outcome, Trajectory, Turn

PROMPT = Prompt(id="q1", source="test", messages=())


def completion(prompt: list[int], tokens: list[int], finish: Finish = Finish.STOP, version: int = 3) -> Completion:
    return Completion(
        prompt=tuple(prompt),
        tokens=torch.tensor(tokens, dtype=torch.int64),
        logprobs=torch.full((len(tokens),), -0.25),
        versions=torch.full((len(tokens),), version, dtype=torch.int32),
        finish=finish,
        text="",
    )


def test_one_turn_by_hand():  # rollout-6
    one = Episode(PROMPT, [5, 6], 2).wrote(completion([5, 6], [7, 8, 1])).finish(0.5)
    assert one.tokens["tokens"].tolist() == [5, 6, 7, 8, 1]
    assert one.tokens["trained"].tolist() == [False, False, True, True, True]
    assert one.tokens["sampler_logprobs"].tolist() == [0.0, 0.0, -0.25, -0.25, -0.25]
    assert one.tokens["sampler_versions"].tolist() == [-1, -1, 3, 3, 3]
    assert one.tokens["rewards"].tolist() == [0.0, 0.0, 0.0, 0.0, 0.5]
    assert (one.prompt_id, one.sample_index, one.outcome) == ("q1", 2, Outcome.COMPLETE)


def test_what_the_environment_said_between_turns_is_not_trained_and_the_reward_sits_on_the_last_trained_token():
    episode = Episode(PROMPT, [5], environment="calculator").wrote(completion([5], [6, 7]))
    episode.observed([40, 41]).wrote(completion([5, 6, 7, 40, 41], [8], version=4)).observed([42])
    whole = episode.finish(1.0)
    assert whole.tokens["tokens"].tolist() == [5, 6, 7, 40, 41, 8, 42]
    assert whole.tokens["trained"].tolist() == [False, True, True, False, False, True, False]
    assert whole.tokens["sampler_versions"].tolist() == [-1, 3, 3, -1, -1, 4, -1]
    assert whole.tokens["rewards"].tolist() == [0, 0, 0, 0, 0, 1, 0]
    assert whole.environment == "calculator"
    assert [(turn.author, turn.start, turn.stop) for turn in whole.turns] == [
        ("prompt", 0, 1),
        ("policy", 1, 3),
        ("environment", 3, 5),
        ("policy", 5, 6),
        ("environment", 6, 7),
    ]
    assert isinstance(whole.turns[0], Turn)


def test_a_step_is_credited_where_it_ended_and_the_process_estimator_finds_it_there():
    def of(first: float, second: float) -> Trajectory:
        episode = Episode(PROMPT, [5]).wrote(completion([5], [6, 7])).observed([40]).credited(first - 1).credited(1)
        return episode.wrote(completion([5, 6, 7, 40], [8])).credited(second / 2).finish(second / 2)

    samples = (of(1.0, 3.0), of(2.0, 2.0))
    assert samples[0].tokens["rewards"].tolist() == [0, 0, 0, 1, 3]
    assert samples[0].reward == 4
    group = Group(ticket=0, prompt_id="q1", source="test", samples=samples)
    one, other = estimate([group], AdvantageSettings(name="process", options={"epsilon": 0.0})).advantages
    # steps 1, 3 and 2, 2: mean 2, deviation sqrt(1/2); from each step on
    torch.testing.assert_close(one, torch.tensor([0, 0, 0, 0, 2**0.5]))
    assert other.tolist() == [0] * 5


def test_nothing_can_be_credited_before_the_policy_wrote():
    with pytest.raises(EpisodeError, match=r"prompt q1: a reward of 1\.0 before the policy wrote anything"):
        Episode(PROMPT, [5]).observed([6]).credited(1.0)


def test_an_answer_that_the_token_limit_cut_is_truncated():
    assert Episode(PROMPT, [5]).wrote(completion([5], [6], Finish.LENGTH)).finish(0.0).outcome is Outcome.TRUNCATED


def test_an_answer_to_other_tokens_is_refused():
    episode = Episode(PROMPT, [5, 6])
    with pytest.raises(
        EpisodeError, match="prompt q1: the completion continues 2 other tokens; it must continue the 2"
    ):
        episode.wrote(completion([5, 7], [8]))  # tokenized again, and differently
    episode.wrote(completion([5, 6], [8]))
    with pytest.raises(EpisodeError, match="must continue the 3 recorded"):
        episode.wrote(completion([5, 6], [8]))


def test_an_empty_answer_still_carries_the_reward():
    empty = Episode(PROMPT, [5, 6]).wrote(completion([5, 6], [])).finish(1.0)
    assert (empty.reward, empty.trained_tokens, len(empty)) == (1.0, 0, 2)
    silent = Episode(PROMPT, [5, 6]).observed([]).finish(1.0)
    assert (silent.reward, silent.outcome, silent.tokens["tokens"].dtype) == (1.0, Outcome.COMPLETE, torch.int64)


def test_a_completion_that_is_not_for_training_is_refused_with_what_to_do():
    untrained = replace(completion([5], [6]), trained=False)
    with pytest.raises(EpisodeError, match=r"prompt q1: .* sampled with trained=False; record it with \.observed\("):
        Episode(PROMPT, [5]).wrote(untrained)


def test_the_largest_float32_is_still_a_reward():
    largest = torch.finfo(torch.float32).max
    assert Episode(PROMPT, [5]).wrote(completion([5], [6])).finish(largest).reward == largest


def chose(first: int, count: int) -> torch.Tensor:
    """Choices of experts of so many tokens, all different."""
    return (first + torch.arange(count * 4)).to(torch.uint8).view(count, 2, 2)


def test_the_first_recorded_choices_of_a_token_stand_and_tokens_after_the_last_completion_have_none():
    # rollout-7, trajectory-2
    first, second = chose(0, 3), chose(100, 6)
    episode = Episode(PROMPT, [5, 6]).wrote(replace(completion([5, 6], [7, 8]), choices=first)).observed([40])
    episode.wrote(replace(completion([5, 6, 7, 8, 40], [9, 1]), choices=second)).observed([41, 42])
    recorded = episode.finish(1.0).tokens["expert_choices"]
    assert torch.equal(recorded[:3], first)
    assert torch.equal(recorded[3:6], second[3:])
    assert recorded[6:].tolist() == [[[0, 0], [0, 0]]] * 3
    assert "expert_choices" not in Episode(PROMPT, [5]).wrote(completion([5], [7])).finish(1.0).tokens
