"""Which prompts are refused before an engine sees them."""

from typing import Any

import numpy
import pytest

from goaly.generate.request import PromptTooLong, check_prompt


def check(prompt: Any) -> None:
    check_prompt("7.0", prompt, vocabulary=32, max_context=8)


@pytest.mark.parametrize("prompt", [[0], [31], [0, 31, 5], list(range(7)), [numpy.int64(3)]])
def test_ids_of_the_vocabulary_that_leave_room_for_an_answer_are_taken(prompt: list[int]) -> None:
    check(prompt)
    with pytest.raises(ValueError, match=f"below {max(prompt)}"):
        check_prompt("7.0", prompt, vocabulary=max(prompt), max_context=8)
    with pytest.raises(PromptTooLong):
        check_prompt("7.0", prompt, vocabulary=32, max_context=len(prompt))


@pytest.mark.parametrize(("prompt", "too_long"), [([1] * 8, True), ([], False), ([32], False)])
def test_a_prompt_that_is_too_long_is_told_from_one_that_is_wrong(prompt: list[int], too_long: bool) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the kind of error is the claim
        check(prompt)
    assert isinstance(caught.value, PromptTooLong) == too_long


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ([], "the prompt is empty"),
        ([1] * 8, "has 8 tokens, must have fewer than generator.max_context=8"),
        ([1, 2, 32, 3], "token id 32 at position 2 of the prompt is not in the model's vocabulary"),
        ([1, -1], "token id -1 at position 1 .* must be at least 0 and below 32"),
        ([1, 10**30], "token ids must be integers"),
        ([1, 2.5], "token ids must be integers"),
        ([1, None], "token ids must be integers"),
        (["a"], "token ids must be integers"),
    ],
)
def test_other_prompts_are_refused_with_the_request_and_the_reason(prompt: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"request 7.0: .*{why}"):
        check(prompt)
