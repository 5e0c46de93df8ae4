"""What the maths verifier takes for an answer, and what it takes for equal: real-looking responses, right and wrong."""

import asyncio
import signal
import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as tries
from hypothesis import strategies as st
from math_verify.errors import TimeoutException

from goaly.prompts.prompt import Prompt
from goaly.reward import maths
from goaly.reward.maths import LOOK_CHARACTERS, MAX_ANSWER_CHARACTERS, extract, verify, verify_after_thinking
from goaly.reward.settings import RewardSettings
from goaly.reward.verifier_pool import VerifierPool

RIGHT = [
    ("5", r"The sum is $2+3$, so \boxed{5}."),
    ("5", r"First I thought \boxed{4}. But no: \boxed{5}"),
    ("5", "**Answer:** 5"),
    ("5", "Answer:\n$$\n5\n$$"),
    ("5", r"Answer: \boxed{5}"),
    ("5", "so we get x = 5.\nAnswer: x = 5"),
    ("5", r"\boxed{x = 2+3 = 5}"),
    ("5", r"It takes \boxed{5\text{ cm}} of rope"),
    ("5 cm", r"\boxed{5\text{ cm}}"),
    ("34", "Therefore the final answer is **34**."),
    ("34", "The answer is 34 because 17 divides it."),
    ("34", "The final answer is $34$. I hope it is correct."),
    ("34", "<think>maybe \\boxed{33}</think>\n\nAnswer: 34"),
    ("34", "17 * 2 = 34\n#### 34"),
    ("34", r"So we get \boxed{34}. I checked that the answer is correct."),
    ("34", "\\boxed{34}\n\nThus the answer is unique."),
    ("34", "\\boxed{34}\n\nAnswer: see above"),
    ("34", "**Final Answer**\n\\boxed{34}\n\nBoth ways agree, so this answer is right."),
    ("unique", "The answer is unique"),
    ("35", r"\boxed{34}? No: the answer is 35"),
    ("34", "34"),
    ("34", "$34$"),
    ("34", "答案\uff1a34"),
    ("34", r"Answer: \(34\)"),
    ("34", "Answer:\n\n34"),
    ("34", "Answer: **34**"),
    ("34", "\\boxed{34}\n\nI put it in \\boxed as I was told."),
    ("204", "Answer: 204 minutes"),
    ("033", "Answer: 33"),
    ("3000", "Answer: 3,000"),
    ("3000", r"\boxed{3{,}000}"),
    ("3000", r"\boxed{3\,000}"),
    ("3000", "Answer: 3 000."),
    ("3000", "Answer: x = 3,000"),
    ("(100,200)", "Answer: (100, 200)"),
    ("1000", "Answer: 1e3"),
    ("-3", "Answer: \u22123"),
    ("12", r"Answer: \$12"),
    ("12", "The ticket costs a lot.\nAnswer: $12"),
    ("50", "Answer: 50%"),
    ("0.5", r"\boxed{50\%}"),
    ("10\\%", "Answer: 10 percent"),
    (r"\frac{1}{2}", r"so $\boxed{\frac{1}{2}}$"),
    (r"\frac12", "Answer: 0.5"),
    ("1/2", r"\boxed{\dfrac{1}{2}}"),
    ("3/2", "Answer: 1 1/2"),
    ("1.5", r"\boxed{1\frac{1}{2}}"),
    ("0.333333", r"\boxed{1/3}"),
    ("(1,2)", "Answer: (1, 2)"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3, \pi/2)}"),
    (r"\{1,2\}", r"\boxed{\{2, 1\}}"),
    ("1,2", "Answer: $1$ and $2$"),
    ("[0,1)", r"\boxed{[0,1)}"),
    (r"(-\infty,1)\cup(2,\infty)", "Answer: (-inf,1) U (2, inf)"),
    (r"x \le 3", r"\boxed{(-\infty,3]}"),
    (r"\sqrt{2}", "Answer: sqrt(2)"),
    (r"11\sqrt{2}", r"\boxed{\,11\sqrt2\,}"),
    (r"\frac{\pi}{2}", "Answer: pi/2"),
    (r"16\pi", "Answer: 16π"),
    ("x^2+1", "Answer: 1 + x**2"),
    ("(x+1)^2", r"\boxed{x^2+2x+1}"),
    (r"90^\circ", "Answer: 90°"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\boxed{\begin{bmatrix}1&2\\3&4\end{bmatrix}}"),
    ("2+3i", r"\boxed{3i+2}"),
    ("A", "Answer: (A)"),
    (r"\text{Tuesday}", "Answer: Tuesday."),
    (r"\boxed{7}", "Answer: 7"),
    ("204", "\\boxed{204}\n\nThe answer is 204 minutes (3 hours and 24 minutes)."),
    ("5", "\\boxed{5}\n\nThe answer is an integer between 0 and 999."),
    ("5", "\\boxed{5}\n\nThe answer is obtained by adding 2 and 3."),
    ("5", "\\boxed{5}\n\nCheck: if the answer is 5, then 2x = 10."),
    ("5", "\\boxed{5}\n\nIf the answer is 6, then 2x = 12, which is too much."),
    ("5", "\\boxed{5}\n\nWe check our answer: $2 \\cdot 5 = 10$."),
    ("5", "\\boxed{5}\n\nThe answer is reasonable since $5 < 10$."),
    ("5", "\\boxed{5}\n\nThe answer is > 0."),
    ("5", "\\boxed{5}\n\n#### 2. Verification\n5 is right."),
    ("5", "Answer: 5\n\nLet me double check: the answer is correct."),
    ("5", r"\boxed{4} ... wait, the answer is 5"),
    ("5", "\\boxed{4}\n\nNo, the answer is actually $5$."),
    ("5", "Answer: 5, which is prime."),
    ("5", "Answer: 5, the third prime"),
    ("5", "Answer: 5 (since 2+3)"),
    ("5", "Answer: 5 \u2014 a prime"),
    ("5", "The answer is $5$ when $x = 2$."),
    ("10", "Answer: There are 10 ways."),
    ("5", "<think>6</think>Answer: 5"),
    ("10080", r"\boxed{10,\!080}"),
    (r"10,\!000", "10000"),
    ("10000", r"\boxed{\text{10,000}}"),
    ("10000", r"\boxed{10,000\text{ cm}}"),
    ("0.5", r"\boxed{.5}"),
    ("-.5", r"\boxed{-\frac12}"),
    ("x-y", r"\boxed{x - y}"),
    ("a - b", r"\boxed{-b+a}"),
    (r"\text{twenty-five}", "Answer: Twenty-five"),
    (r"(-\infty,2]", r"\boxed{x \le 2}"),
    ("(1,3)", "Answer: 1 < x < 3"),
    ("1/3", r"\boxed{0.\overline{3}}"),
    ("7/6", r"\boxed{1.1\overline{6}}"),
    (r"0.\overline{142857}", "Answer: 1/7"),
    ("1+2i", r"\boxed{1+2\mathrm{i}}"),
    ("34", "Answer: 34 dollars"),
    ("34", "Answer: 34 triangles"),
    ("34", "Answer: 34 ordered pairs of integers."),
    ("34", "Answer: 34 cm^2"),
    (r"12\text{ cm}^2", r"\boxed{12\,\mathrm{cm}^2}"),
    (r"336^\circ", "336"),
    ("34000", r"\boxed{34\text{ thousand}}"),
    ("2500000", "Answer: 2.5 million dollars"),
    ("34_8", r"\boxed{34_{8}}"),
    ("34_8", r"\boxed{34}"),
    (r"\sqrt{2}", r"\boxed{x = \sqrt{2} \approx 1.41}"),
    ("5.24", r"\boxed{\approx 5.24}"),
    (r"\log_2 3", r"\boxed{\frac{\ln 3}{\ln 2}}"),
    (r"\log_2 100", r"\boxed{\log_{2}{100}}"),
    (r"\frac 1 2", "Answer: 0.5"),
    ("2xy", r"\boxed{2yx}"),
]
WRONG = [
    ("5", r"\boxed{6}"),
    ("5", r"\boxed{5} no, \boxed{6}"),
    ("5", r"\boxed{5 \text{ or } 6}"),
    ("5", r"\boxed{5, 6}"),
    ("5", "Answer: $5$ and $6$"),
    ("5", "Answer: 5 or so, maybe 6"),
    ("5", "Answer: [1,2,3,4,5,6,7]"),
    ("5", r"\boxed{4=5}"),
    ("5", r"\boxed{x=4=5}"),
    ("5", "Answer: 5x"),
    ("5", "Answer: 5^2"),
    ("5", "Answer: 5 < x"),
    ("5", "Answer: -5"),
    ("5", "Answer: 5.0000001"),
    ("5", "Answer: five thousand"),
    ("5", ""),
    ("5", "Answer:"),
    ("5", r"\boxed{}"),
    ("5", r"\boxed{5"),
    ("5", "I do not know, it may be 5.\nOr not."),
    ("5", r"<think>\boxed{5} it is, or"),
    ("5 cm", r"\boxed{5\text{ m}}"),
    ("2", "Answer: 1 1"),
    ("1", "Answer: 1 1/2"),
    ("34", "Answer: 3 4"),
    ("1000", "Answer: 1,000,000"),
    ("1000", "Answer: 1.000"),
    ("1/3", "Answer: 0.33"),
    ("1/2", "Answer: 2/1"),
    ("0.0000001", "Answer: 0.0000002"),
    ("0", "Answer: 0.00000001"),
    ("(1,2)", r"\boxed{\{1,2\}}"),
    ("(1,2)", "Answer: (2,1)"),
    ("[0,1)", "Answer: [0,1]"),
    (r"\{1,2,3\}", r"\boxed{\{1,2\}}"),
    ("x<3", "Answer: x>3"),
    ("x<3", r"Answer: x \le 3"),
    ("x", "Answer: y"),
    ("abc", "Answer: cab"),
    (r"\text{Yes}", "Answer: No"),
    ("5", r"\boxed{5} ... wait, the answer is 6"),
    ("5", r"\boxed{5}, but the answer is 5 or 6"),
    ("5", r"\boxed{5}, or rather, the answer is not 5"),
    ("5", "The answer is not 5"),
    ("5", "The answer is not $5$"),
    ("5", "The answer is certainly not $5$."),
    ("5", "Answer: 5 (or 6)"),
    ("5", "Answer: 5, or 6"),
    ("5", "Answer: $5$ or 6"),
    ("5", "Answer: $$5$$ or $$6$$"),
    ("5", "Answer: 5 if n is even, 6 if n is odd"),
    ("5", "Answer: between 5 and 6"),
    ("5", "\\boxed{4}\n\nThe answer is obtained from 5."),
    ("5", "Answer: 5 hours and 6 minutes"),
    ("5", "Answer: 5 plus 6"),
    ("5", "Answer: 5t"),
    ("2t", "Answer: 2"),
    ("2xy", "Answer: 2"),
    ("2 \\sin x", "Answer: 2"),
    ("5", "<think>a</think> Answer: 6 <think> or Answer: 5"),
    ("34", r"\boxed{34\text{ thousand}}"),
    ("34", r"\boxed{34\text{ million}}"),
    ("34", r"\boxed{34\text{ thousand dollars}}"),
    ("34", "Answer: 34 thousand"),
    ("34", "Answer: $34$ thousand"),
    ("34", r"\boxed{34_8}"),
    ("34_8", r"\boxed{34_9}"),
    ("34", r"\boxed{34 \approx 35}"),
    ("35", r"\boxed{34 \approx 35}"),
    ("34", r"34\ldots"),
    (r"\{1,2\}", r"\boxed{\{1, 2, \ldots\}}"),
    ("34", r"\boxed{34 \text{ or more}}"),
    ("34", r"\boxed{34 \text{ at least}}"),
    ("34", "Answer: 34 or more"),
    ("x-y", r"\boxed{y - x}"),
    (r"(-\infty,2]", r"\boxed{x < 2}"),
    ("1/3", r"\boxed{0.\overline{4}}"),
    (r"\frac 1 2", "Answer: 12"),
    ("23", r"\boxed{2 3}"),
]


def problem(answer: str | None) -> Prompt:
    return Prompt(id="p", source="aime", messages=(), answer=answer)


@pytest.mark.parametrize(("answer", "response"), RIGHT)
def test_an_answer_is_found_and_compared_however_it_is_written(answer: str, response: str):
    assert verify(problem(answer), response) == 1.0


@pytest.mark.parametrize(("answer", "response"), WRONG)
def test_an_unequal_a_missing_or_an_undecided_answer_gets_nothing(answer: str, response: str):
    assert verify(problem(answer), response) == 0.0


FORMS = (
    "Answer: {}",
    "Answer: ${}$.",
    r"\boxed{{{}}}",
    "so the answer is **{}**.",
    "<think>no: \\boxed{{0}}</think>#### {}",
    "Answer: x = {}",
)


@given(
    st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12), st.sampled_from(FORMS), st.sampled_from(["", ","])
)
def test_integers_are_rewarded_if_and_only_if_they_are_equal(one: int, other: int, form: str, group: str):
    assert verify(problem(str(one)), form.format(f"{one:{group}}")) == 1.0
    assert verify(problem(str(one)), form.format(f"{other:{group}}")) == float(one == other)


@given(*[st.integers(1, 60)] * 4, st.sampled_from([r"\frac{{{}}}{{{}}}", r"\dfrac{{{}}}{{{}}}", "{}/{}"]))
@tries(max_examples=60)
def test_fractions_are_rewarded_if_and_only_if_they_are_equal(a: int, b: int, c: int, d: int, form: str):
    assert verify(problem(rf"\frac{{{a}}}{{{b}}}"), rf"\boxed{{{form.format(c, d)}}}") == float(a * d == b * c)


@given(st.text(alphabet=r"\{}$()[]^_=,.%/*-+ 0159xab" + "\n", max_size=40))
@tries(max_examples=150)
def test_no_response_raises(text: str):
    for response in (text, rf"\boxed{{{text}}}", f"Answer: {text}"):
        assert verify(problem("7/3"), response) in (0.0, 1.0)


@given(st.recursive(st.sampled_from(["1", "x", r"\{"]), lambda inner: inner.map(lambda text: rf"\frac{{{text}}}{{2}}")))
def test_a_box_ends_at_its_own_brace(inside: str):
    assert extract(rf"a {{ b }} \boxed{{{inside}}} }} {{") == inside


HOSTILE = (
    *("So the answer is 5. ", "Answer: ", "Answer: \\[", "Answer: $", "The answer is right. ", "answer*"),
    *("it is ", "if the ", "if   ", "\n#### ", "\n#### 1. ", "答案是 ", "\\boxed{", "\\boxed", "\\text{", "\\(", "$"),
    *("{", "}", "\\{", " ", "\n", "*", "1", "1 ", "1,", "a ", "a, ", "( ", "; ", "<think>", "</think>"),
)


@given(st.lists(st.tuples(st.sampled_from(HOSTILE), st.integers(1, 20_000)), min_size=1, max_size=4), st.booleans())
@tries(max_examples=30, deadline=None)
def test_each_character_is_read_twice_at_most(parts: list[tuple[str, int]], is_closed: bool):
    text = "".join(part * (characters // len(part) + 1) for part, characters in parts) + "}" * is_closed
    read: list[int] = []
    said = maths._said
    with pytest.MonkeyPatch.context() as counted:
        counted.setattr(maths, "_said", lambda piece: (read.append(len(piece)), said(piece))[1])
        extract(text)
    assert sum(read) <= 2 * len(text)
    assert max(read, default=0) <= LOOK_CHARACTERS


@pytest.mark.timeout(60)  # by the square of the length it would take minutes
@pytest.mark.parametrize("part", HOSTILE)
def test_300_000_hostile_characters_do_not_take_the_square_of_their_number(part: str):
    text = part * (300_000 // len(part))
    for response in (text, rf"\boxed{{5}} {text}", f"Answer: {text}5", rf"\boxed{{{text}}}", f"{text}\nAnswer: right"):
        extract(response)


def test_thinking_that_does_not_end_gets_nothing_where_the_template_opens_it():
    for response, score in (("so \\boxed{5}", 0.0), ("\\boxed{6}</think>\n\nAnswer: 5", 1.0), ("5</think> 6", 0.0)):
        assert verify_after_thinking(problem("5"), response) == score
    with pytest.raises(ValueError, match="must have one"):
        verify_after_thinking(problem(None), "")


@pytest.mark.parametrize("answer", [None, " ", r"\frac{1}{", "1 1"])
def test_a_problem_without_a_readable_answer_raises(answer: str | None):
    with pytest.raises(ValueError, match=r"answer=.*: (a maths problem must have one|must be a number)"):
        verify(problem(answer), "Answer: 5")


@pytest.mark.timeout(300, method="thread")  # math-verify uses the signal by which pytest would end it
@pytest.mark.parametrize("power", ["9^{9^{9^9}}", "(100000!)!", "(1+x+y+z)^{100}"])
def test_an_expression_that_can_not_be_computed_is_wrong_within_seconds(power: str):
    assert verify(problem("5"), rf"\boxed{{{power}}}") == 0.0
    assert verify(problem("1"), "Answer: " + "1*" * MAX_ANSWER_CHARACTERS + "1") == 0.0


def test_an_answer_that_takes_too_long_is_wrong_also_if_the_first_signal_is_lost(monkeypatch: pytest.MonkeyPatch):
    lost: list[str] = []

    class Freed:
        def __del__(self) -> None:  # an exception here is ignored
            lost.append("in time")
            signal.raise_signal(signal.SIGALRM)
            lost.append("too late")

    def endless(*arguments: Any, **options: Any) -> bool:
        del arguments
        Freed()
        while True:
            pass

    monkeypatch.setattr(maths, "COMPARE_SECONDS", 0.05)
    monkeypatch.setattr(maths, "compare", endless)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pytest.PytestUnraisableExceptionWarning)
        assert verify(problem("x+5"), r"\boxed{5+x}") == 0.0
    assert lost == ["in time"]
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_an_answer_that_took_too_long_to_read_once_is_read_again(monkeypatch: pytest.MonkeyPatch):
    read = maths.parse

    def too_slow(text: str, *arguments: Any, **options: Any) -> list[Any]:
        if "68" in text:
            raise TimeoutException
        return read(text, *arguments, **options)

    response = r"\boxed{\frac{34}{68}}"
    with monkeypatch.context() as busy:
        busy.setattr(maths, "parse", too_slow)
        assert verify(problem(r"\frac{1}{2}"), response) == 0.0
    assert verify(problem(r"\frac{1}{2}"), response) == 1.0


async def test_a_run_judges_with_it_by_its_path():
    pool = VerifierPool(RewardSettings(verifier="goaly.reward.maths:verify"))
    await pool.start()
    try:
        responses = (r"\boxed{\frac{2}{4}}", r"\boxed{9^{9^{9^9}}}", "Answer: 0.5")
        assert await asyncio.gather(*(pool.score(problem("1/2"), one) for one in responses)) == [1.0, 0.0, 1.0]
    finally:
        await pool.close()
