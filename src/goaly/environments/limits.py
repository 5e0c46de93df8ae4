"""An environment under time limits and retries, which counts what happens in it as `environment/…`.

environments-2: Only a request that had no effect, or may be made again (`Unsent`), is retried, and within its time
    limit.
environments-3: After a timeout or a cancellation the state is unknown: the environment takes no step, and a pool
    replaces it.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from goaly.base.telemetry.metrics import count
from goaly.environments.protocol import (
    ActionRefused,
    Disconnected,
    Environment,
    EnvironmentDied,
    EnvironmentFailed,
    EnvironmentTimeout,
    Observation,
    StepResult,
    Unsent,
)

T = TypeVar("T")

_FIRST_PAUSE_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentLimits:
    """Time limits, in seconds, and retries."""

    reset_seconds: float = 60.0
    step_seconds: float = 60.0
    episode_seconds: float = 3600.0
    """From the start of `reset` on. It ends the call during which it passes."""
    retries: int = 5
    """How often one call is made again; the pause before doubles each time, from 0.02 s."""


class LimitedEnvironment:
    """An environment that keeps limits."""

    def __init__(self, environment: Environment, limits: EnvironmentLimits | None = None):
        self._environment = environment
        self._limits = limits or EnvironmentLimits()
        self._until = 0.0
        self._unknown = False

    @property
    def alive(self) -> bool:
        """Whether a new episode can begin in it."""
        return not self._unknown and self._environment.alive

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        """Begin a new episode, whose time runs from now on."""
        self._until = asyncio.get_running_loop().time() + self._limits.episode_seconds
        observation = await self._limited("reset", lambda: self._environment.reset(task), self._limits.reset_seconds)
        self._unknown = False
        _count("resets")
        return observation

    async def step(self, action: Mapping[str, Any]) -> StepResult:
        """Act, and return the consequences. Fails after a timeout or a cancellation, until the next `reset`."""
        if self._unknown:
            raise Disconnected("step: the state is unknown after a timeout or a cancellation; call reset first")
        result = await self._limited("step", lambda: self._environment.step(action), self._limits.step_seconds)
        _count("steps")
        return result

    async def close(self) -> None:
        """Close the environment."""
        await self._environment.close()

    async def _limited(self, what: str, call: Callable[[], Coroutine[Any, Any, T]], seconds: float) -> T:
        left = self._until - asyncio.get_running_loop().time()
        kind, limit = ("episode", self._limits.episode_seconds) if left < seconds else (what, seconds)
        try:
            if left <= 0:
                raise TimeoutError
            async with asyncio.timeout(min(left, seconds)):
                return await self._retried(call)
        except TimeoutError:
            self._unknown = True  # environments-3
            _count("timeouts")
            raise EnvironmentTimeout(f"{what}: exceeded {kind}_seconds={limit:g}") from None
        except asyncio.CancelledError:
            self._unknown = True
            _count("cancelled")
            raise
        except EnvironmentFailed as error:
            _count(_cause(error))
            raise

    async def _retried(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        for retry in range(self._limits.retries):
            try:
                return await call()
            except Unsent:  # environments-2
                _count("retries")
                await asyncio.sleep(_FIRST_PAUSE_SECONDS * 2**retry)
        return await call()


def _count(what: str) -> None:
    count(f"environment/{what}")


def _cause(error: EnvironmentFailed) -> str:
    match error:
        case ActionRefused():
            return "refused"
        case EnvironmentTimeout():
            return "timeouts"
        case EnvironmentDied():
            return "deaths"
    return "errors"
