"""pass@k and what is asked for it: golden values, the estimator's lack of bias, and the flow through fakes."""

from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apps.eval.config import EvalConfig
from apps.eval.main import results_of
from goaly.generate.request import PromptTooLong, Sampling
from goaly.prompts.prompt import Prompt
from goaly.prompts.tasks.arithmetic import addition, verify, work_out
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.rollout.evaluation import EvalResult, Evaluation, pass_at_k
from goaly.rollout.evaluation_attempts import Answered, attempted, by_tokens, summaries_by, summary


@pytest.mark.parametrize(
    ("samples", "right", "k", "expected"),
    [(4, 1, 1, 0.25), (4, 1, 4, 1.0), (4, 1, 2, 0.5), (5, 2, 2, 0.7), (10, 3, 5, 1 - 21 / 252), (8, 0, 8, 0.0)],
)
def test_pass_at_k_has_the_values_worked_out_by_hand(samples: int, right: int, k: int, expected: float) -> None:
    assert pass_at_k(samples, right, k) == pytest.approx(expected)


@given(data=st.data(), samples=st.integers(1, 8))
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_sample(data: st.DataObject, samples: int) -> None:
    right, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    subsets = list(combinations([place < right for place in range(samples)], k))
    assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, subsets)) / comb(samples, k))


@pytest.mark.parametrize("k", [0, 5])
def test_k_beyond_the_samples_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match="at most the number of samples, 4"):
        pass_at_k(4, 1, k)


def test_results_average_over_prompts() -> None:
    result = EvalResult.of([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]], lengths=range(1, 21))
    assert result.pass_at == {1: 0.625, 2: 0.75, 4: 1.0}
    assert result.average == 0.625
    assert (result.prompts, result.samples_per_prompt) == (2, 4)
    assert result.lengths is not None
    assert (result.lengths.mean, result.lengths.median, result.lengths.p95, result.lengths.longest) == (
        10.5,
        11,
        20,
        20,
    )


@pytest.mark.parametrize("rewards", [[], [[]]])
def test_a_result_of_nothing_is_refused(rewards: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="at least one prompt and one sample"):
        EvalResult.of(rewards)


def test_partial_rewards_count_in_the_average_and_not_as_passes() -> None:
    result = EvalResult.of([[0.5, 0.5]])
    assert (result.pass_at_1, result.average) == (0.0, 0.5)


def test_prompts_with_different_numbers_of_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="every prompt must have 2 samples"):
        EvalResult.of([[1.0, 0.0], [1.0]])


@dataclass
class Wrote:
    """A fake sampler's answer."""

    tokens: Any


async def right(prompt: Prompt, response: str) -> float:
    """The task's verifier."""
    return verify(prompt, response)


GREEDY = Sampling(temperature=0.0)


class Adder:
    """A fake policy that works additions out, and gets every second answer to 99+1 wrong."""

    def __init__(self, tokenizer: ChatTokenizer):
        self._tokenizer = tokenizer
        self._asked = 0
        self.seeds: list[int | None] = []

    async def __call__(self, tokens: list[int], sampling: Sampling) -> Wrote:
        assert sampling.temperature == 0.0
        self.seeds.append(sampling.seed)
        first, second = self._tokenizer.decode(tokens).removesuffix("=").split("+")
        self._asked += first == "99"
        text = "|0" if first == "99" and self._asked % 2 else work_out(first, second)
        return Wrote(torch.tensor([*self._tokenizer.encode(text), *self._tokenizer.stop_token_ids]))


async def test_an_evaluation_asks_every_prompt_and_judges_the_texts(tokenizer: ChatTokenizer) -> None:
    prompts = [addition(1, 2), addition(99, 1)]
    adder = Adder(tokenizer)
    result = summary(await attempted(by_tokens(adder, tokenizer, right), prompts, 4, GREEDY))
    assert len(set(adder.seeds)) == 8
    assert result.pass_at == {1: 0.75, 2: pytest.approx((1 + 5 / 6) / 2), 4: 1.0}
    by_digits = summaries_by(
        await attempted(by_tokens(Adder(tokenizer), tokenizer, right), prompts, 4, GREEDY), "digits"
    )
    assert {digits: found.pass_at_1 for digits, found in by_digits.items()} == {"1": 1.0, "2": 0.5}
    assert by_digits["1"].lengths is not None
    assert by_digits["1"].lengths.mean == len("1+2+0=03|3") + 1


async def test_a_prompt_that_is_too_long_counts_as_not_solved_and_the_record_says_so(tokenizer: ChatTokenizer) -> None:
    adder = Adder(tokenizer)

    async def short_context(tokens: list[int], sampling: Sampling) -> Wrote:
        if tokenizer.decode(tokens).startswith("98"):
            raise PromptTooLong("too long")
        return await adder(tokens, sampling)

    answered = await attempted(by_tokens(short_context, tokenizer, right), [addition(1, 2), addition(98, 1)], 2, GREEDY)
    both, alone = summary(answered), summary(answered[1:])
    assert (both.pass_at_1, both.average, both.prompts, both.too_long) == (0.5, 0.5, 2, 1)
    assert both.lengths == summary(answered[:1]).lengths
    assert (alone.pass_at_1, alone.lengths, alone.too_long) == (0.0, None, 1)
    recorded = Evaluation(policy_version=3, results={"short": both, "easy": EvalResult.of([[1.0]])})
    assert recorded.metrics["evaluation/short/too_long"] == 1.0
    assert "evaluation/easy/too_long" not in recorded.metrics
    assert recorded.summary["sets"]["short"].items() >= {"prompts": 2, "too_long": 1, "pass@1": 0.5}.items()


def test_the_evaluation_app_warns_of_prompts_that_are_too_long(caplog: pytest.LogCaptureFixture) -> None:
    answered = [Answered(prompt=addition(1, 2), lengths=(), rewards=(None,))]
    assert results_of(EvalConfig(path="folder"), {"held_out": answered})["held_out"].too_long == 1
    (message,) = caplog.messages
    assert message.startswith("evaluation set held_out: 1 of 1 prompts leave no room")


def test_a_prompt_counts_as_too_long_once_and_its_other_samples_count_as_they_are() -> None:
    result = EvalResult.of([[None, 1.0], [None, None], [1.0, 0.0]])
    assert (result.too_long, result.pass_at_1, result.average) == (2, pytest.approx(1 / 3), pytest.approx(1 / 3))


async def test_a_failing_sampler_fails_the_evaluation(tokenizer: ChatTokenizer) -> None:
    async def broken(tokens: list[int], sampling: Sampling) -> Wrote:
        raise RuntimeError("engine gone")

    with pytest.raises(ExceptionGroup) as caught:
        await attempted(by_tokens(broken, tokenizer, right), [addition(1, 2)], 1, GREEDY)
    assert caught.group_contains(RuntimeError, match="engine gone")


def test_an_evaluation_is_read_back_from_its_metrics() -> None:
    results = {
        "aime": EvalResult.of([[1.0, 0.5], [0.0, None]], pass_at=[2]),
        "held_out": EvalResult.of([[1.0], [0.0], [None]]),
    }
    for newest in (None, 7):
        evaluation = Evaluation(policy_version=5, results=results, newest_version=newest)
        line = {"policy_version": 5, "time": 1.0, **evaluation.metrics}
        assert Evaluation.recorded(line, {"aime": 2, "held_out": 3}) == evaluation
