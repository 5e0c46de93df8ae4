"""Attempts of episodes: one that fails costs its attempt, a verifier that fails ends the evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from goaly.agents.chat_elsewhere import ChatElsewhere
from goaly.base.errors import RunFailed
from goaly.environments.protocol import ActionRefused, EnvironmentDied
from goaly.generate.policy import ContextFull, PromptFillsContext
from goaly.generate.request import Sampling
from goaly.prompts.prompt import Prompt
from goaly.reward.verifier_process import VerifierError
from goaly.rollout.episode import EpisodeContext
from goaly.rollout.evaluation_attempts import FAILURES_IN_A_ROW, Attempt, Begun, Solution, by_episode
from goaly.rollout.running_episodes import Failed

ATTEMPT = Attempt(prompt=Prompt(id="q1", source="s", messages=()), index=0, sampling=Sampling(), seeds="0")
MOST = {"most": 2, "seconds": None}


async def broken(prompt: Prompt, response: str) -> float:
    raise VerifierError("it is down")


@contextmanager
def serve(attempt: Attempt) -> Iterator[Begun]:
    nothing = cast(Any, None)
    chat: Any = ChatElsewhere(nothing, attempt.prompt.id)
    context = EpisodeContext(
        policy=nothing, reward=broken, prompt=attempt.prompt, sample_index=0, chat=chat, tokenizer=nothing
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


@pytest.mark.parametrize(
    ("deaths", "retries", "rewards", "noted"),
    [
        (1, 1, 1.0, ["3"]),
        (2, 1, Failed("EnvironmentDied: gone"), ["2"]),
        (1, 0, Failed("EnvironmentDied: gone"), ["1"]),
    ],
)
async def test_an_attempt_whose_environment_died_begins_again_and_keeps_the_notes_of_its_last_one(
    deaths: int, retries: int, rewards: float, noted: list[str]
) -> None:
    begun = 0

    async def episode(prompt: Prompt, context: EpisodeContext) -> Any:
        nonlocal begun
        begun += 1
        context.chat.note({"attempt": str(begun)})
        if begun <= deaths:
            raise EnvironmentDied("gone")
        context.chat.note({"attempt": "3"})
        return context.chat.finish(1.0)

    solution = await by_episode(episode, serve, **MOST, retries=retries)(ATTEMPT)
    assert solution is not None
    assert (solution.reward, getattr(solution.reward, "why", None)) == (rewards, getattr(rewards, "why", None))
    assert [note["attempt"] for note in solution.notes][-1:] == noted


async def test_an_attempt_whose_action_was_refused_does_not_begin_again() -> None:
    begun = []

    async def episode(prompt: Prompt, context: EpisodeContext) -> Any:
        begun.append(prompt)
        raise ActionRefused("no")

    await by_episode(episode, serve, **MOST, retries=3)(ATTEMPT)
    assert len(begun) == 1
