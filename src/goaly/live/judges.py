"""Judges of turns: a verifier in child processes, or a model that votes. Each gives a reward, or raises."""

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from goaly.live.settings import LiveJudgeSettings
from goaly.live.turn import Reaction
from goaly.prompts.prompt import Message, Prompt
from goaly.prompts.template import text_of
from goaly.reward.settings import RewardSettings
from goaly.reward.verifier_pool import VerifierPool


class NoVerdict(Exception):
    """The judge did not say whether a turn was good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A turn as its judge sees it."""

    turn: str
    messages: Sequence[Message]
    """The conversation before the answer."""
    answer: str
    reactions: Sequence[Reaction]


class TurnJudge(Protocol):
    """Gives rewards."""

    async def start(self) -> None:
        """Get ready."""

    async def reward(self, case: Case) -> float:
        """The reward of this turn; raises if there is none."""
        ...

    async def close(self) -> None:
        """End what it started."""


class VerifierJudge:
    """A function in child processes."""

    def __init__(self, settings: LiveJudgeSettings):
        assert settings.verifier is not None, "checked with the settings"
        self._pool = VerifierPool(
            RewardSettings(
                verifier=settings.verifier,
                workers=settings.workers,
                time_limit_seconds=settings.time_limit_seconds,
                on_time_limit="fail",
                on_error="fail",
            )
        )

    async def start(self) -> None:
        """Start the processes."""
        await self._pool.start()

    async def reward(self, case: Case) -> float:
        """The function's reward."""
        said = case.reactions[-1]
        about = {"kind": said.kind.value, "text": said.text or ""}
        if said.corrected is not None:
            about["corrected"] = said.corrected
        prompt = Prompt(id=case.turn, source="live", messages=tuple(case.messages), metadata=about)
        return await self._pool.score(prompt, case.answer)

    async def close(self) -> None:
        """Kill the processes."""
        await self._pool.close()


class VotingJudge:
    """A model that votes +1, 0 or -1, several times."""

    def __init__(self, settings: LiveJudgeSettings, ask: Callable[[str], Awaitable[str]]):
        """`ask` gives the model's reply to a question."""
        self._settings = settings
        self._ask = ask

    async def start(self) -> None:
        """It is ready."""

    async def reward(self, case: Case) -> float:
        """The majority of the votes."""
        said = [reaction.corrected or reaction.text or reaction.kind.value for reaction in case.reactions]
        texts = {
            "question": text_of(case.messages[-1].content or "") if case.messages else "",
            "answer": case.answer,
            "kind": case.reactions[-1].kind.value.replace("_", " "),
            "outcome": "\n".join(said),
        }
        question = re.sub(r"\{(question|answer|kind|outcome)\}", lambda place: texts[place[1]], self._settings.question)
        asked = (self._ask(question) for _ in range(self._settings.votes))
        replies = await asyncio.gather(*asked, return_exceptions=True)
        errors = [reply for reply in replies if isinstance(reply, BaseException)]
        if len(errors) == len(replies):
            raise errors[0]
        return majority([vote_of(reply, self._settings.pattern) for reply in replies])

    async def close(self) -> None:
        """It holds nothing."""


def vote_of(reply: str | BaseException, pattern: str) -> int | None:
    """The vote in a reply: its last one; None if it has none."""
    found = [] if isinstance(reply, BaseException) else re.findall(pattern, reply)
    return int(found[-1]) if found else None


def majority(votes: Sequence[int | None]) -> float:
    """The vote of more than half of those that can be read, or 0. NoVerdict if fewer than half of them can be."""
    read = [vote for vote in votes if vote is not None]
    if not read or 2 * len(read) < len(votes):
        raise NoVerdict(f"{len(read)} of {len(votes)} votes can be read")
    (vote, count), *_ = Counter(read).most_common(1)
    return float(vote) if 2 * count > len(read) else 0.0
