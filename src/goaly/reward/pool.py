"""The actor that scores responses. A shell around `Judge`; lives in the hub process."""

import asyncio
from collections.abc import Sequence

from monarch.actor import Actor, concurrent_endpoint

from goaly.prompts.prompt import Prompt
from goaly.reward.settings import RewardSettings
from goaly.reward.verifier_process import VerifierError
from goaly.reward.verifiers import Judge, RewardStats


class RewardPool(Actor):
    """Verifiers with a time limit, out of every event loop."""

    def __init__(self, settings: RewardSettings, verifiers: Sequence[str] = ()):
        """`verifiers` are those that prompts may name beside that of `settings`."""
        self._pool = Judge(settings, verifiers)
        self._named: dict[str, asyncio.Task[float]] = {}

    @concurrent_endpoint
    async def start(self) -> int:
        """Start the verifier processes, all ready on return; how many."""
        return await self._pool.start()

    @concurrent_endpoint
    async def score(self, prompt: Prompt, response: str, request: str | None = None) -> float:
        """The verifier's value for this response to this prompt; `cancel` ends a request that has a name."""
        if request is None:
            return await self._pool.score(prompt, response)
        task = self._named[request] = asyncio.create_task(self._pool.score(prompt, response))
        try:
            await asyncio.wait([task])  # Unblocked by the score, or by `cancel`.
        finally:
            del self._named[request]
            task.cancel()  # Nothing once it has ended; the end of it when this endpoint is stopped.
        if task.cancelled():
            raise VerifierError(f"request {request} was cancelled")
        return task.result()

    @concurrent_endpoint
    async def cancel(self, request: str) -> None:
        """Stop judging for this request, whose caller has gone; nothing when it has ended."""
        if request in self._named:
            self._named[request].cancel()

    @concurrent_endpoint
    async def stats(self) -> RewardStats:
        """What has been done so far."""
        return self._pool.stats()

    @concurrent_endpoint
    async def close(self) -> None:
        """Kill the verifier processes."""
        await self._pool.close()

    async def __cleanup__(self, exc: Exception | None) -> None:
        await self._pool.close()
