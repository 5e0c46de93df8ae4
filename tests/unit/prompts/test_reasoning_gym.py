"""Data sets of the real reasoning-gym package as prompts, and their own scoring as a verifier."""

import json
import re
import sys
from dataclasses import replace
from random import Random

import pytest

from goaly.prompts.mixture import distinct_prompts, each_source, prompt_mixture
from goaly.prompts.prompt import SPLIT_KEY, Split, split_of
from goaly.prompts.settings import PromptSettings, ReasoningGymSettings, SourceSettings, SupervisedSettings
from goaly.prompts.stream import PromptStream
from goaly.prompts.tasks.reasoning_gym import ReasoningGym, verify

SUMS = ReasoningGymSettings(name="chain_sum", options={"max_terms": 3}, size=1000, seed=7)


def prompts_of(gym: ReasoningGymSettings, **settings) -> PromptSettings:
    return PromptSettings(task="reasoning_gym", reasoning_gym=gym, **settings)


def taken(stream: PromptStream, count: int):
    return [stream.next() for _ in range(count)]


def test_prompts_are_the_data_sets_and_a_resumed_stream_goes_on():
    """prompts-3."""
    stream = PromptStream(prompts_of(SUMS))
    first = taken(stream, 5)
    assert first[0].messages[0].content.startswith("State the final answer to the following arithmetic problem: ")
    assert first[0].source == "chain_sum"
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = PromptStream(prompts_of(SUMS))
    resumed.load_state_dict(state)
    assert taken(resumed, 5) == taken(stream, 5)
    other = PromptStream(prompts_of(replace(SUMS, options={"max_terms": 4})))
    with pytest.raises(ValueError, match="prompt stream: source is"):
        other.load_state_dict(state)


def test_held_out_problems_are_never_trained_on():
    """prompts-1."""
    settings = prompts_of(replace(SUMS, options={"max_terms": 2, "max_digits": 1}), held_out_fraction=0.3)
    trained = {prompt.split_key for prompt in taken(PromptStream(settings), 300)}
    held_out = {prompt.split_key for prompt in distinct_prompts(settings, Split.HELD_OUT, 20)}
    assert len(held_out) == 20
    assert not trained & held_out
    asked = replace(settings, reasoning_gym=replace(settings.reasoning_gym, wording="{question} Think."))
    held_out_too = distinct_prompts(asked, Split.HELD_OUT, 20)
    assert {split_of(prompt, 0.3) for prompt in held_out_too} == {Split.HELD_OUT}
    assert {prompt.split_key for prompt in held_out_too} == held_out, "in any wording"


def test_an_answer_is_scored_by_the_data_set_in_tags_or_as_a_whole():
    prompt = ReasoningGym(SUMS.data_set, SUMS.wording).problem(Random(0))
    assert verify(prompt, f" {prompt.answer}\n") == 1
    assert verify(prompt, f"{prompt.answer}.00") == 1, "its own scoring compares numbers"
    assert verify(prompt, f"I think <answer>0</answer>, no: <answer> {prompt.answer} </answer>") == 1
    assert verify(prompt, f"<answer>{prompt.answer}1</answer>") < 1
    assert verify(prompt, "") < 1


def test_an_answer_is_never_scored_against_another_question():
    prompt = ReasoningGym(SUMS.data_set, SUMS.wording).problem(Random(0))
    changed = replace(prompt, metadata={**prompt.metadata, SPLIT_KEY: "of another process"})
    with pytest.raises(ValueError, match="PYTHONHASHSEED=0"):
        verify(changed, "1")
    with pytest.raises(ValueError, match="is not of reasoning-gym"):
        verify(replace(prompt, metadata={}), "1")


def test_sources_have_data_sets_of_their_own():
    counts = replace(SUMS, name="letter_counting", options={}, wording="{question} Answer in tags.")
    settings = PromptSettings(
        task=None,
        sources=(
            SourceSettings(name="sums", task="reasoning_gym", reasoning_gym=SUMS),
            SourceSettings(name="letters", task="reasoning_gym", reasoning_gym=counts),
        ),
    )
    assert [alone.reasoning_gym for alone in each_source(settings).values()] == [SUMS, counts]
    mixture = prompt_mixture(settings)
    sums, letters = mixture.next(), mixture.next()
    assert (sums.source, letters.source) == ("sums", "letters")
    assert letters.messages[0].content.endswith(" Answer in tags.")
    assert [verify(prompt, str(prompt.answer)) for prompt in (sums, letters)] == [1, 1]


@pytest.mark.parametrize(
    ("gym", "why"),
    [
        ({"name": "chain_sums"}, "name=chain_sums: reasoning-gym has no such data set, must be one of .*chain_sum,"),
        ({"name": "chain_sum", "options": {"terms": 3}}, "refuses these options.*unexpected keyword argument 'terms'"),
        ({"name": "chain_sum", "options": {"min_terms": 9}}, "refuses these options .AssertionError"),
        ({"name": "chain_sum", "options": {"seed": 9}}, "options: seed must be set beside them, as gym.seed"),
        ({"name": "chain_sum", "wording": "Add."}, "must contain {question}"),
    ],
)
def test_a_wrong_data_set_is_one_line(gym, why):
    (line,) = ReasoningGymSettings(**gym).problems("gym.")
    assert line.startswith("gym.")
    assert re.search(why, line)


def test_the_task_and_its_section_belong_together():
    assert prompts_of(ReasoningGymSettings()).problems("prompts.") == [
        "prompts.reasoning_gym.name=null: must name a data set where prompts.task is reasoning_gym"
    ]
    idle = PromptSettings(reasoning_gym=SUMS).problems("prompts.")
    assert "prompts.reasoning_gym.name=chain_sum: has no effect, prompts.task is arithmetic" in idle
    (line,) = SupervisedSettings(task="reasoning_gym").problems("data.")
    assert line == "data.task=reasoning_gym: must be one of arithmetic"


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.delitem(sys.modules, "goaly.prompts.tasks.reasoning_gym")
    (line,) = SUMS.problems("gym.")
    assert line.startswith("gym.name=chain_sum: reasoning-gym cannot be imported")
    assert line.endswith("install goaly[reasoning-gym]")
