"""The actor that scores responses. A shell around `VerifierPool`; lives in the hub process."""

from monarch.actor import Actor, concurrent_endpoint

from goaly.prompts.prompt import Prompt
from goaly.reward.settings import RewardSettings
from goaly.reward.verifiers import RewardStats, VerifierPool


class RewardPool(Actor):
    """Verifiers with a time limit, out of every event loop."""

    def __init__(self, settings: RewardSettings):
        self._pool = VerifierPool(settings)

    @concurrent_endpoint
    async def start(self) -> int:
        """Start the verifier processes, all ready on return; how many."""
        return await self._pool.start()

    @concurrent_endpoint
    async def score(self, prompt: Prompt, response: str) -> float:
        """The verifier's value for this response to this prompt."""
        return await self._pool.score(prompt, response)

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
