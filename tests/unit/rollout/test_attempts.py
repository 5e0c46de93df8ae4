"""Attempts of episodes: one that fails costs its attempt, a verifier that fails ends the evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from goaly.base.errors import RunFailed
from goaly.generate.policy import ContextFull, PromptFillsContext
from goaly.generate.request import Sampling
from goaly.prompts.prompt import Prompt
from goaly.reward.verifier_process import VerifierError
from goaly.rollout.attempts import FAILURES_IN_A_ROW, Attempt, Begun, Solution, by_episode
from goaly.rollout.episode import EpisodeContext

ATTEMPT = Attempt(prompt=Prompt(id="q1", source="s", messages=()), index=0, sampling=Sampling(), seeds="0")
MOST = {"most": 2, "seconds": None}


async def broken(prompt: Prompt, response: str) -> float:
    raise VerifierError("it is down")


@contextmanager
def serve(attempt: Attempt) -> Iterator[Begun]:
    nothing = cast(Any, None)
    context = EpisodeContext(
        policy=nothing, reward=broken, prompt=attempt.prompt, sample_index=0, chat=nothing, tokenizer=nothing
    )
    yield Begun(context=context, tokens=lambda: 7)


@pytest.mark.parametrize("catches", [False, True])
async def test_a_verifier_that_fails_ends_the_evaluation(catches: bool) -> None:
    async def episode(prompt: Prompt, context: EpisodeContext) -> Any:
        try:
            return await context.reward(prompt, "5")
        except VerifierError:
            if catches:
                raise ValueError("no score") from None
            raise

    with pytest.raises(VerifierError, match="it is down"):
        await by_episode(episode, serve, **MOST)(ATTEMPT)


async def test_episodes_that_fail_in_a_row_end_the_evaluation_and_those_without_room_do_not() -> None:
    async def fails(prompt: Prompt, context: EpisodeContext) -> Any:
        raise ValueError("a mistake of its own")

    async def fills(prompt: Prompt, context: EpisodeContext) -> Any:
        raise ExceptionGroup("of two chats", [ContextFull("full"), ContextFull("full")])

    async def too_long(prompt: Prompt, context: EpisodeContext) -> Any:
        raise PromptFillsContext("too long")

    lost = Solution(reward=0.0, tokens=7)
    assert await by_episode(too_long, serve, **MOST)(ATTEMPT) is None
    solve = by_episode(fills, serve, **MOST)
    assert [await solve(ATTEMPT) for _ in range(2 * FAILURES_IN_A_ROW)] == [lost] * 2 * FAILURES_IN_A_ROW
    solve = by_episode(fails, serve, **MOST)
    assert [await solve(ATTEMPT) for _ in range(FAILURES_IN_A_ROW - 1)] == [lost] * (FAILURES_IN_A_ROW - 1)
    with pytest.raises(RunFailed, match=r"16 attempts failed in a row; the last: .*a mistake of its own"):
        await solve(ATTEMPT)
