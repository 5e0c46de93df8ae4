"""Scores responses by the verifier that their prompt names, or else by the run's. Asyncio, no actors."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, replace

from goaly.prompts.prompt import Prompt
from goaly.reward.process import VerifierError
from goaly.reward.settings import RewardSettings
from goaly.reward.verifiers import RewardStats, VerifierPool


class Judge:
    """A pool of processes for each verifier, all under the same limits."""

    def __init__(self, settings: RewardSettings, others: Sequence[str] = ()):
        """`settings` names the verifier of prompts that name none; `others` are those that prompts may name."""
        self._usual = settings.verifier
        verifiers = dict.fromkeys((settings.verifier, *others))
        self._pools = {verifier: VerifierPool(replace(settings, verifier=verifier)) for verifier in verifiers}

    async def start(self) -> int:
        """Start all processes, ready on return; how many. Raises when a verifier can't be imported."""
        started = await asyncio.gather(*(pool.start() for pool in self._pools.values()), return_exceptions=True)
        counts = [count for count in started if isinstance(count, int)]
        if len(counts) < len(started):
            await self.close()
            raise next(error for error in started if isinstance(error, BaseException))
        return sum(counts)

    async def score(self, prompt: Prompt, response: str) -> float:
        """The value of its verifier for this response to this prompt."""
        verifier = prompt.verifier or self._usual
        if verifier not in self._pools:
            known = ", ".join(self._pools)
            raise VerifierError(f"prompt {prompt.id}: no process runs its verifier {verifier}, only {known}")
        return await self._pools[verifier].score(prompt, response)

    def stats(self) -> RewardStats:
        """What has been done so far, by all verifiers together."""
        stats = [asdict(pool.stats()) for pool in self._pools.values()]
        return RewardStats(**{key: sum(each[key] for each in stats) for key in stats[0]})

    async def close(self) -> None:
        """Kill the processes; whoever still waits for a score gets an error."""
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))
