"""Hints for a teacher: which answers get one, and what the teacher then sees."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from goaly.prompts.prompt import Message, Prompt
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.rollout.hints import with_hints
from goaly.rollout.settings import HintSettings
from goaly.trajectory import Group, Outcome, Trajectory, Turn, token_data

PROMPT = Prompt(id="p", source="s", messages=(Message(role="user", content="57+68="),), answer="125")


@pytest.fixture(scope="module")
def tokenizer(tiny_model_folder: Path) -> ChatTokenizer:
    return ChatTokenizer(tiny_model_folder)


def answered(tokenizer: ChatTokenizer, *answers: tuple[str, float]) -> Group:
    """A group of these texts with their rewards."""
    question, samples = tokenizer.render(PROMPT.messages), []
    for index, (text, reward) in enumerate(answers):
        tokens = question + tokenizer.encode(text)
        written = torch.arange(len(tokens)) >= len(question)
        columns = {
            "tokens": torch.tensor(tokens),
            "trained": written,
            "sampler_logprobs": -0.5 * written.float(),
            "sampler_versions": torch.where(written, 0, -1).int(),
            "rewards": torch.where(torch.arange(len(tokens)) == len(tokens) - 1, reward, 0.0),
        }
        turns = (
            Turn(author="prompt", start=0, stop=len(question)),
            Turn(author="policy", start=len(question), stop=len(tokens)),
        )
        samples.append(
            Trajectory(
                tokens=token_data(columns),
                prompt_id="p",
                sample_index=index,
                turns=turns,
                environment="",
                outcome=Outcome.COMPLETE,
            )
        )
    return Group(ticket=0, prompt_id="p", source="s", samples=tuple(samples))


def seen(group: Group, tokenizer: ChatTokenizer) -> list[str | None]:
    """What the teacher sees before each answer, as text; None if it sees what the policy saw."""
    return [tokenizer.decode(one.teacher_contexts[0].tokens) if one.teacher_contexts else None for one in group.samples]


def hinted(group: Group, tokenizer: ChatTokenizer, text: str, room: int = 99, **settings: str) -> list[str | None]:
    made = HintSettings(text=text, **settings)
    return seen(with_hints(group, PROMPT, made, tokenizer, room), tokenizer)


def test_only_failed_answers_get_a_hint_unless_all_shall(tokenizer):
    group = answered(tokenizer, ("|115", 0.0), ("|125", 1.0))
    first, second = hinted(group, tokenizer, "{answer}|{question}")
    assert "125|57+68=" in first
    assert second is None
    assert all(hinted(group, tokenizer, "{answer}|{question}", to="all"))


def test_a_hint_may_have_the_failed_answer_and_a_sibling_that_passed(tokenizer):
    group = answered(tokenizer, ("|115", 0.0), ("|125", 1.0), ("|15", 0.0))
    first, second, third = hinted(group, tokenizer, "{response},{sibling},{question}")
    assert "|115,|125,57+68=" in first
    assert second is None
    assert "|15,|125,57+68=" in third


def test_an_answer_without_what_its_hint_would_say_gets_none(tokenizer):
    failed = answered(tokenizer, ("|115", 0.0), ("|15", 0.0))
    assert hinted(failed, tokenizer, "{sibling}|{question}") == [None, None]
    unknown = with_hints(failed, replace(PROMPT, answer=None), HintSettings(text="{answer}|"), tokenizer, 99)
    assert seen(unknown, tokenizer) == [None, None]


def test_a_hint_that_leaves_no_room_for_its_answer_is_left_out(tokenizer):
    group = answered(tokenizer, ("|115", 0.0))
    with_hint = len(tokenizer.render((Message(role="user", content="125|57+68="),))) + len(tokenizer.encode("|115"))
    assert hinted(group, tokenizer, "{answer}|{question}", room=with_hint) != [None]
    assert hinted(group, tokenizer, "{answer}|{question}", room=with_hint - 1) == [None]


def test_a_context_that_the_script_gave_stays(tokenizer):
    group = answered(tokenizer, ("|115", 0.0))
    group = replace(group, samples=(group.samples[0].taught([1, 2]),))
    made = with_hints(group, PROMPT, HintSettings(text="{answer}"), tokenizer, 99)
    assert made.samples[0].teacher_contexts == group.samples[0].teacher_contexts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{question}", "must say more than the policy saw"),
        ("{wrong} {answer}", "{wrong} is unknown; known are {question}, {response}, {answer}, {sibling}"),
        ("{answer", "write {{ and }} for braces"),
    ],
)
def test_a_hint_that_says_nothing_or_something_unknown_is_refused(text: str, said: str):
    (problem,) = HintSettings(text=text).problems("rollout.hint.")
    assert problem.startswith("rollout.hint.text=")
    assert said in problem
