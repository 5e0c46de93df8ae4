"""Pools of verifier processes: `VerifierPool` runs one verifier, `Judge` several. Asyncio, no actors.

Each process has a task that sends it requests and reads its replies. The recent time per score decides how many
requests a message holds: many for cheap verifiers, one for slow ones.

A process that exceeds the time limit of a score is killed and replaced. A process works at most `GONE_SECONDS` longer
for a caller that has gone. Any other failure fails the requests of one process, which is replaced. If a task of the
pool fails, the pool's own process ends (base-1).

Invariant
    reward-1: Every request ends once: with a score, with its own time limit, or with an error that names its prompt. A
        slow or crashing response delays the requests behind it, but never costs them their scores.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from goaly.base.process import vital_task
from goaly.prompts.prompt import Prompt
from goaly.reward.failures import Failures, RewardStats
from goaly.reward.judge_model import JudgeModel
from goaly.reward.settings import RewardSettings
from goaly.reward.verifier_process import Refused, VerifierDied, VerifierError, VerifierProcess

logger = logging.getLogger(__name__)

MESSAGE_SECONDS = 0.02
"""The work in one message to a process should take about this time."""
MOST_IN_A_MESSAGE = 64
TRIES = 2
"""A request fails after this many processes have died with it."""


@dataclass(slots=True, eq=False)
class _Request:
    prompt: Prompt
    response: str
    score: asyncio.Future[float]
    tries: int = 0


class VerifierPool:
    """Scores responses with one verifier, in child processes."""

    def __init__(self, settings: RewardSettings):
        self._settings = settings
        self._pending: deque[_Request] = deque()
        self._under_way: set[_Request] = set()
        self._arrived = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed: VerifierError | None = None
        self._seconds_per_score = MESSAGE_SECONDS
        self._failures = Failures(settings, f"verifier {settings.verifier}")

    async def start(self) -> int:
        """Start the processes, and return their number once all are ready; raises if the verifier can't be imported."""
        if not self._tasks:
            starting = [VerifierProcess.start(self._settings.verifier) for _ in range(self._settings.workers)]
            started = await asyncio.gather(*starting, return_exceptions=True)
            children = [child for child in started if isinstance(child, VerifierProcess)]
            if len(children) < len(started):
                await asyncio.gather(*(child.kill() for child in children))
                raise next(error for error in started if isinstance(error, BaseException))
            self._tasks = [vital_task(self._serve(child), "verifier") for child in children]
        return len(self._tasks)

    async def score(self, prompt: Prompt, response: str) -> float:
        """The verifier's score of this response; an `Unscored` if it failed and the settings make that 0."""
        if self._closed is not None or not self._tasks:
            raise self._closed or VerifierError("the reward pool was not started")
        request = _Request(prompt, response, asyncio.get_running_loop().create_future())
        self._pending.append(request)
        self._arrived.set()
        return await request.score  # Unblocked by a reply, by the time limit, or by `close`.

    def stats(self) -> RewardStats:
        """The statistics so far."""
        return replace(self._failures.stats)

    async def close(self) -> None:
        """Kill the processes; pending scores fail."""
        self._end(VerifierError("the reward pool was closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, child: VerifierProcess | None) -> None:
        try:
            while True:
                requests = await self._take()
                child = child or await self._replacement(requests)
                if child is not None and not await self._judged(child, requests):
                    await child.kill()
                    self._failures.stats.replaced += 1
                    child = await self._replacement([])
        finally:
            if child is not None:
                await child.kill()

    async def _take(self) -> list[_Request]:
        while True:
            while not self._pending:
                self._arrived.clear()
                await self._arrived.wait()  # Unblocked by `score`; `close` cancels.
            share = math.ceil(len(self._pending) / len(self._tasks))
            fitting = int(MESSAGE_SECONDS / max(self._seconds_per_score, 1e-9))
            count = max(1, min(fitting, share, MOST_IN_A_MESSAGE))
            taken = [self._pending.popleft() for _ in range(count)]
            if wanted := [request for request in taken if not request.score.done()]:
                self._under_way.update(wanted)
                return wanted

    async def _judged(self, child: VerifierProcess, requests: list[_Request]) -> bool:
        try:
            return await self._judge(child, requests)
        except Exception as error:  # not the verifier's fault, so `on_error` does not apply
            logger.exception("the reward pool of %s failed %d requests", self._settings.verifier, len(requests))
            self._refuse_all(requests, f"the reward pool failed: {type(error).__name__}: {error}")
            return False

    async def _judge(self, child: VerifierProcess, requests: list[_Request]) -> bool:
        """Have the child score these; False if it must be replaced. Every request ends or is pending again."""
        waiting = deque(requests)
        started = time.monotonic()
        try:
            await child.send([(request.prompt, request.response) for request in requests])
            while waiting:
                reply = await child.reply(self._settings.time_limit_seconds, waiting[0].score)
                now = time.monotonic()
                self._spent(now - started)
                started = now
                request = waiting.popleft()
                if isinstance(reply, Refused):
                    _end(request, self._failures.failed(request.prompt, reply.why))
                else:
                    self._failures.scored()
                    _end(request, reply)
        except TimeoutError:
            self._spent(time.monotonic() - started)
            self._ran_out(waiting.popleft())
            return False
        except VerifierDied as error:
            waiting[0].tries += 1
            if waiting[0].tries >= TRIES:
                lost = waiting.popleft()
                _end(lost, self._failures.failed(lost.prompt, f"{error}, {TRIES} times"))
            return False
        finally:
            self._under_way.difference_update(requests)
            self._pending.extendleft(reversed(waiting))  # reward-1
            if waiting:
                self._arrived.set()
        return True

    async def _replacement(self, requests: list[_Request]) -> VerifierProcess | None:
        try:
            return await VerifierProcess.start(self._settings.verifier)
        except (VerifierError, OSError) as error:  # such as no free process or memory at the moment
            logger.warning("can't replace a verifier process: %s", error)
            self._refuse_all(requests, f"no process for its verifier: {error}")
            return None

    def _refuse_all(self, requests: list[_Request], why: str) -> None:
        for request in requests:
            if not request.score.done():
                self._failures.stats.errors += 1
                _end(request, VerifierError(f"prompt {request.prompt.id}: {why}"))  # reward-1
        self._under_way.difference_update(requests)

    def _spent(self, seconds: float) -> None:
        self._seconds_per_score += 0.1 * (seconds - self._seconds_per_score)

    def _ran_out(self, request: _Request) -> None:
        if not request.score.done():  # else its caller has gone
            _end(request, self._failures.ran_out(request.prompt))

    def _end(self, error: VerifierError) -> None:
        self._closed = self._closed or error
        for request in [*self._pending, *self._under_way]:
            if not request.score.done():
                request.score.set_exception(error)
        self._pending.clear()


class Judge:
    """Scores each response with the verifier of its prompt, or the run's, which may be a model; one pool for each."""

    def __init__(self, settings: RewardSettings, others: Sequence[str] = ()):
        """`settings` names the verifier of prompts without one; `others` are those that prompts may name."""
        self._usual = settings.verifier
        verifiers = dict.fromkeys((settings.verifier, *others))
        self._pools: dict[str, VerifierPool | JudgeModel] = {
            verifier: VerifierPool(replace(settings, verifier=verifier)) for verifier in verifiers
        }
        if settings.judge is not None:
            self._pools[self._usual] = JudgeModel(settings, settings.judge)

    async def start(self) -> int:
        """Start all processes, and return their number once all are ready; raises if a verifier can't be imported."""
        started = await asyncio.gather(*(pool.start() for pool in self._pools.values()), return_exceptions=True)
        counts = [count for count in started if isinstance(count, int)]
        if len(counts) < len(started):
            await self.close()
            raise next(error for error in started if isinstance(error, BaseException))
        return sum(counts)

    async def score(self, prompt: Prompt, response: str) -> float:
        """The score of this response by the prompt's verifier."""
        verifier = prompt.verifier or self._usual
        if verifier not in self._pools:
            known = ", ".join(self._pools)
            raise VerifierError(f"prompt {prompt.id}: unknown verifier {verifier}; processes run {known}")
        return await self._pools[verifier].score(prompt, response)

    def stats(self) -> RewardStats:
        """The statistics so far, summed over all verifiers."""
        stats: list[dict[str, Any]] = [asdict(pool.stats()) for pool in self._pools.values()]
        return RewardStats(**{key: sum(each[key] for each in stats) for key in stats[0]})

    async def close(self) -> None:
        """Kill the processes; pending scores fail."""
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))


def _end(request: _Request, end: float | VerifierError) -> None:
    if request.score.done():
        return
    if isinstance(end, VerifierError):
        request.score.set_exception(end)
    else:
        request.score.set_result(end)
