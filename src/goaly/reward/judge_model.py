"""A model that scores responses, asked by OpenAI's API: an LLM judge in the place of a verifier's processes.

Its client repeats requests that meet a busy or failing server. A request that fails in the end, or exceeds the time
limit, counts as a verifier's failure (`failures.py`).
"""

import asyncio
import math
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from goaly.prompts.prompt import Prompt
from goaly.reward.failures import Failures, RewardStats
from goaly.reward.settings import JudgeSettings, RewardSettings
from goaly.reward.verifier_process import VerifierError

if TYPE_CHECKING:
    import openai

QUOTED = 200
"""Characters of an unreadable reply that a message shows."""


class JudgeModel:
    """Scores responses by asking a model."""

    def __init__(self, settings: RewardSettings, judge: JudgeSettings):
        """`settings` has the time limit, and says what becomes of failures."""
        self._judge = judge
        self._seconds = settings.time_limit_seconds
        self._failures = Failures(settings, f"judge {judge.model}")
        self._places = asyncio.Semaphore(judge.parallel)
        self._client: openai.AsyncOpenAI | None = None
        self._closed = False

    async def start(self) -> int:
        """Make the client; returns 0, the number of processes."""
        import openai  # takes 0.5 s

        key = os.environ.get(self._judge.key_variable, "") if self._judge.key_variable else ""
        self._client = openai.AsyncOpenAI(base_url=self._judge.url, api_key=key or "none")
        return 0

    async def score(self, prompt: Prompt, response: str) -> float:
        """The model's score of this response; an `Unscored` if it failed and the settings make that 0."""
        if self._client is None or self._closed:
            raise VerifierError("the judge was closed" if self._closed else "the judge was not started")
        try:
            async with (
                self._places,
                asyncio.timeout(self._seconds),
            ):  # the time limit does not count the wait for a place
                reply = await self._reply(self._client, prompt, response)
        except TimeoutError:
            end = self._failures.ran_out(prompt)
        except Exception as error:  # whatever the client raises
            end = self._failures.failed(prompt, f"{type(error).__name__}: {error}")
        else:
            end = self._read(prompt, reply)
        if isinstance(end, VerifierError):
            raise end
        return end

    def stats(self) -> RewardStats:
        """The statistics so far."""
        return replace(self._failures.stats)

    async def close(self) -> None:
        """Close the connections."""
        self._closed = True
        if self._client is not None:
            await self._client.close()

    async def _reply(self, client: "openai.AsyncOpenAI", prompt: Prompt, response: str) -> str:
        texts = {"question": prompt.messages[-1].content or "", "answer": prompt.answer or "", "response": response}
        asked = re.sub(r"\{(question|answer|response)\}", lambda place: texts[place[1]], self._judge.question)
        made = await client.chat.completions.create(
            model=self._judge.model, messages=[{"role": "user", "content": asked}], **self._judge.options
        )
        return made.choices[0].message.content or ""

    def _read(self, prompt: Prompt, reply: str) -> float | VerifierError:
        found = list(re.finditer(self._judge.pattern, reply))
        try:
            score = float(found[-1][1 if found[-1].re.groups else 0]) / self._judge.scale
        except (IndexError, TypeError, ValueError):
            score = math.nan
        if not math.isfinite(score):
            return self._failures.failed(prompt, f"its reply has no score: {reply[-QUOTED:]!r}")
        self._failures.scored()
        return score
