"""The actor that scores responses with a `Judge` in the hub process, for `reward.placement=hub`."""

from collections.abc import Sequence

from monarch.actor import Actor

from goaly.base.actors import NamedTasks, concurrent_endpoint
from goaly.prompts.prompt import Prompt
from goaly.reward.failures import RewardStats
from goaly.reward.settings import RewardSettings
from goaly.reward.verifier_pool import Judge
from goaly.reward.verifier_process import VerifierError


class RewardPool(Actor):
    """Scores responses in verifier processes; callers may cancel a request by its name."""

    def __init__(self, settings: RewardSettings, verifiers: Sequence[str] = ()):
        """`verifiers` are those that prompts may name in addition to that of `settings`."""
        self._judge = Judge(settings, verifiers)
        self._requests = NamedTasks()

    @concurrent_endpoint
    async def start(self) -> int:
        """Start the verifier processes, and return their number once all are ready."""
        return await self._judge.start()

    @concurrent_endpoint
    async def score(self, prompt: Prompt, response: str, request: str | None = None) -> float:
        """The verifier's score of this response; `cancel` ends a request that has a name."""
        if request is None:
            return await self._judge.score(prompt, response)
        task = await self._requests.run(request, self._judge.score(prompt, response))
        if task.cancelled():
            raise VerifierError(f"request {request} was cancelled")
        return task.result()

    @concurrent_endpoint
    async def cancel(self, request: str) -> None:
        """Cancel this request; one that has ended is ignored."""
        await self._requests.cancel([request])

    @concurrent_endpoint
    async def stats(self) -> RewardStats:
        """The statistics so far."""
        return self._judge.stats()

    @concurrent_endpoint
    async def close(self) -> None:
        """Kill the verifier processes."""
        await self._judge.close()

    async def __cleanup__(self, exc: Exception | None) -> None:
        await self._judge.close()
