"""Mixtures of prompt sources: exact resuming (prompts-3), shares (prompts-4), refused states; curricula."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goaly.base.config.check import check
from goaly.prompts.curriculum import Curriculum, Passes
from goaly.prompts.mixture import Mixture, distinct_prompts, prompt_mixture
from goaly.prompts.prompt import Split
from goaly.prompts.settings import ArithmeticSettings, CurriculumSettings, PromptSettings, SourceSettings
from goaly.prompts.stream import PromptStream


def source(name: str, digits: int, weight: float = 1.0) -> SourceSettings:
    arithmetic = ArithmeticSettings(min_digits=digits, max_digits=digits)
    return SourceSettings(name=name, weight=weight, task="arithmetic", arithmetic=arithmetic)


THREE = PromptSettings(task=None, sources=(source("easy", 2, 2.0), source("middle", 3), source("hard", 4)))
LEARNING = PromptSettings(task=None, sources=THREE.sources, curriculum=CurriculumSettings(half_life_samples=64))
WEIGHTS = st.dictionaries(st.sampled_from(["easy", "middle", "hard"]), st.floats(0.01, 10), max_size=3)


def drawn(mixture: Mixture, count: int) -> Counter[str]:
    return Counter(mixture.next().source for _ in range(count))


def test_sources_come_in_their_shares_and_under_their_names() -> None:
    mixture = prompt_mixture(THREE)
    assert mixture.shares == {"easy": 0.5, "middle": 0.25, "hard": 0.25}
    assert drawn(mixture, 8) == {"easy": 4, "middle": 2, "hard": 2}
    assert drawn(mixture, 400) == {"easy": 200, "middle": 100, "hard": 100}
    assert mixture.position == 408


def test_one_source_is_the_plain_stream() -> None:
    mixture, stream = prompt_mixture(PromptSettings()), PromptStream(PromptSettings())
    assert [mixture.next() for _ in range(5)] == [stream.next() for _ in range(5)]


def test_a_single_listed_source_gives_its_name_too() -> None:
    mixture = prompt_mixture(PromptSettings(task=None, sources=(source("own", 2),)))
    assert drawn(mixture, 3) == {"own": 3}


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(WEIGHTS, st.integers(0, 12)), min_size=1, max_size=8))
def test_each_source_stays_within_the_number_of_sources_of_its_shares_whatever_they_change_to(changes) -> None:
    mixture, given_, due = prompt_mixture(THREE), Counter(), Counter()
    for weights, count in changes:
        mixture.set_weights(weights)
        for _ in range(count):
            due.update(mixture.shares)
            given_.update([mixture.next().source])
            assert all(abs(given_[name] - due[name]) < 3 for name in due)  # prompts-4


@settings(deadline=None, max_examples=40)
@given(before=st.integers(0, 20), weights=WEIGHTS, passed=st.integers(0, 8))
@pytest.mark.parametrize("config", [THREE, LEARNING], ids=["fixed", "curriculum"])
def test_a_resumed_mixture_gives_the_prompts_that_would_have_come(config, before, weights, passed) -> None:
    mixture, resumed = prompt_mixture(config), prompt_mixture(config)
    drawn(mixture, before)
    mixture.set_weights(weights)
    mixture.learn({"hard": Passes(samples=8, passed=passed)})
    drawn(mixture, 3)
    resumed.load_state_dict(json.loads(json.dumps(mixture.state_dict())))
    assert resumed.shares == mixture.shares
    assert [resumed.next() for _ in range(12)] == [mixture.next() for _ in range(12)]


def test_weights_set_live_act_from_the_next_prompt_on() -> None:
    mixture = prompt_mixture(THREE)
    assert drawn(mixture, 2) == {"easy": 1, "middle": 1}
    mixture.set_weights({"easy": 3.0, "hard": 0.0})
    assert mixture.shares == {"easy": 0.75, "middle": 0.25, "hard": 0.0}
    counts = drawn(mixture, 40)
    assert counts["hard"] == 0  # also while half a prompt is owed
    assert abs(counts["easy"] - 30) <= 1


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"eassy": 1.0}, "weight of eassy: no such prompt source; known are easy, middle, hard"),
        ({"hard": -1.0}, "weight of hard=-1.0: must be a number of at least 0"),
        ({"hard": float("nan")}, "weight of hard=nan: must be a number of at least 0"),
        ({"easy": 0.0, "middle": 0.0, "hard": 0.0}, "one must be above 0"),
    ],
)
def test_weights_that_cannot_be_are_refused_and_change_nothing(weights, said) -> None:
    mixture = prompt_mixture(THREE)
    with pytest.raises(ValueError, match=said):
        mixture.set_weights(weights)
    assert mixture.shares["easy"] == 0.5


def test_a_state_of_other_sources_or_another_curriculum_is_refused() -> None:
    state = prompt_mixture(THREE).state_dict()
    other = PromptSettings(task=None, sources=(source("easy", 2), source("other", 3)))
    with pytest.raises(ValueError, match="prompt sources are easy, other, but the saved state has easy, middle"):
        prompt_mixture(other).load_state_dict(state)
    with pytest.raises(ValueError, match=r"prompts\.curriculum: the saved state has none"):
        prompt_mixture(LEARNING).load_state_dict(state)


def test_sources_of_one_kind_do_not_draw_alike_and_share_no_problem_with_the_held_out() -> None:
    twins = PromptSettings(task=None, sources=(source("a", 6), source("b", 6)))
    mixture = prompt_mixture(twins)
    trained = [mixture.next() for _ in range(200)]
    assert len({prompt.id for prompt in trained}) > 190
    assert {prompt.source for prompt in distinct_prompts(twins, Split.HELD_OUT, 10)} == {"a", "b"}
    held_out = distinct_prompts(twins, Split.HELD_OUT, 200)
    assert {prompt.split_key for prompt in trained}.isdisjoint(prompt.split_key for prompt in held_out)


def test_a_curriculum_prefers_what_is_passed_half_the_time_and_gives_up_on_none() -> None:
    curriculum = Curriculum(["never", "half", "always"], CurriculumSettings(floor=0.2, half_life_samples=16))
    assert [curriculum.factor(name) for name in ("never", "half", "always")] == [1.0, 1.0, 1.0]
    for _ in range(40):
        seen = {"never": 0, "half": 4, "always": 8}
        curriculum.observe({name: Passes(samples=8, passed=passed) for name, passed in seen.items()})
    factors = [curriculum.factor(name) for name in ("never", "half", "always")]
    assert factors == pytest.approx([0.2, 1.0, 0.2])


def test_older_samples_fade_by_half_in_a_half_life() -> None:
    curriculum = Curriculum(["a"], CurriculumSettings(half_life_samples=1))
    curriculum.observe({"a": Passes(samples=2, passed=2)})
    # of one pass in two a quarter is left; the two new ones count 1/2 and 1
    assert curriculum.pass_rate("a") == pytest.approx((1 / 4 + 3 / 2) / (2 / 4 + 3 / 2))
    assert curriculum.factor("a") == pytest.approx(4 * (7 / 8) * (1 / 8))


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=6),
    st.floats(0.5, 1000),
)
def test_how_often_samples_are_reported_changes_nothing(reports, half_life) -> None:
    once, often = (Curriculum(["a"], CurriculumSettings(half_life_samples=half_life)) for _ in range(2))
    for times, samples, passed in reports:
        found = Passes(samples=samples, passed=min(passed, samples))
        once.observe({"a": Passes(samples=times * found.samples, passed=times * found.passed)})
        for _ in range(times):
            often.observe({"a": found})
    assert once.pass_rate("a") == pytest.approx(often.pass_rate("a"))


def test_what_is_learnt_moves_the_shares_on_top_of_the_weights() -> None:
    mixture = prompt_mixture(LEARNING)
    for _ in range(20):
        mixture.learn({"easy": Passes(samples=64, passed=64), "hard": Passes(samples=64, passed=32)})
    assert mixture.shares == pytest.approx({"easy": 0.2 / 2.2, "middle": 1 / 2.2, "hard": 1 / 2.2}, rel=1e-3)


def test_settings_tell_the_problems_of_sources() -> None:
    zero = {"name": "a", "weight": 0.0, "task": "arithmetic"}
    broken = {"sources": [zero, {"name": "a", "weight": -1.0}], "curriculum": {"floor": 0.0}}
    assert check(PromptSettings, broken, "prompts")[1] == [
        "prompts.sources.1.weight=-1.0: must be at least 0",
        "prompts.curriculum.floor=0.0: must be above 0 and at most 1",
        "prompts.sources.1.files=[]: must name at least one file where prompts.sources.1.task is null",
        "prompts.task=arithmetic: must be null where prompts.sources are given",
        "prompts.sources: each must have a name of its own; more than one is a",
    ]
    assert PromptSettings(curriculum=CurriculumSettings()).problems("prompts.") == [
        "prompts.curriculum: needs at least two prompts.sources to choose between"
    ]
