"""The addition task: what is asked, how it is worked out, and what counts as right."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goaly.prompts.settings import ArithmeticSettings
from goaly.prompts.tasks.arithmetic import Arithmetic, addition, verify, work_out
from goaly.prompts.tokenizer import ChatTokenizer

numbers = st.integers(min_value=0, max_value=10**12)


@given(first=numbers, second=numbers)
def test_a_worked_out_addition_always_verifies(first: int, second: int) -> None:
    assert verify(addition(first, second), work_out(str(first), str(second))) == 1.0


@given(first=numbers, second=numbers, wrong=numbers)
def test_only_the_exact_final_answer_is_right(first: int, second: int, wrong: int) -> None:
    prompt = addition(first, second)
    assert verify(prompt, f"|{wrong}") == float(wrong == first + second)
    assert verify(prompt, f"|{first + second} ") == 0.0
    assert verify(prompt, f"|0{first + second}") == 0.0
    assert verify(prompt, str(first + second)) == 0.0


def test_work_is_written_least_significant_digit_first_with_its_carries() -> None:
    assert work_out("57", "68") == "7+8+0=15,5+6+1=12|125"
    assert work_out("99", "1") == "9+1+0=10,9+0+1=10|100"
    assert work_out("3", "4") == "3+4+0=07|7"


def test_a_teacher_that_forgets_every_carry_adds_digit_by_digit() -> None:
    assert work_out("57", "68", Random(0), forgotten_carry_rate=1.0) == "7+8+0=15,5+6+0=11|115"


@given(seed=st.integers(0, 10**6))
def test_demonstrations_are_right_exactly_where_no_carry_is_forgotten(seed: int) -> None:
    random = Random(seed)
    task = Arithmetic(ArithmeticSettings(max_digits=6), forgotten_carry_rate=0.5)
    prompt = task.problem(random)
    work = task.demonstration(prompt, random)
    first, second = prompt.messages[0].content.removesuffix("=").split("+")
    assert verify(prompt, work) == float(work == work_out(first, second))


@given(seed=st.integers(0, 10**6))
def test_problems_have_the_digits_that_the_settings_allow(seed: int) -> None:
    prompt = Arithmetic(ArithmeticSettings(min_digits=3, max_digits=5)).problem(Random(seed))
    first, second = prompt.messages[0].content.removesuffix("=").split("+")
    assert len(first) == len(second) == int(prompt.metadata["digits"])
    assert 3 <= len(first) <= 5


def test_long_problems_are_rare() -> None:
    task = Arithmetic(ArithmeticSettings(min_digits=1, max_digits=8, weight_power=1.0))
    drawn = [int(task.problem(Random(seed)).metadata["digits"]) for seed in range(4000)]
    assert drawn.count(1) / drawn.count(8) == pytest.approx(8, rel=0.3)


@given(first=numbers, second=numbers)
def test_the_tiny_vocabulary_holds_the_whole_task(tokenizer: ChatTokenizer, first: int, second: int) -> None:
    text = addition(first, second).messages[0].content + work_out(str(first), str(second))
    assert tokenizer.decode(tokenizer.encode(text)) == text
