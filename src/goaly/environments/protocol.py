"""The protocol of environments, in the shape of OpenEnv: `reset`, `step`, `close`; and what ends an episode in one.

Tasks, actions and observations are JSON: an environment may be another program.

    EnvironmentFailed      an EpisodeError: the episode cannot go on
    ├── ActionRefused      the environment refused this action, and goes on: the script may answer the policy
    ├── Unsent             the request had no effect, or may be made again: `LimitedEnvironment` retries it
    ├── Disconnected       the connection broke
    ├── EnvironmentTimeout a call, or the whole episode, exceeded its time limit
    └── EnvironmentDied    its process ended; says how, and what its log says at the end
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from goaly.base.errors import EpisodeError
from goaly.base.json_text import bounded_json

SHOWN = 200
"""Characters of a reply in an error."""
MOST_REWARD = 3.4028234663852886e38
"""The largest number of float32, in which rewards are trained."""


class EnvironmentFailed(EpisodeError):
    """An environment could not answer."""


class ActionRefused(EnvironmentFailed):
    """The environment refused this action; its episode goes on."""


class Unsent(EnvironmentFailed):
    """The request had no effect, or has the same effect again: it may be retried."""


class Disconnected(EnvironmentFailed):
    """The connection to the environment broke."""


class EnvironmentTimeout(EnvironmentFailed):
    """A call or an episode exceeded its time limit."""


class EnvironmentDied(EnvironmentFailed):
    """The environment's process ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The environment as the policy sees it at the start of an episode."""

    content: Any
    """Any JSON value."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Other values for the script, which the policy does not see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The consequences of one action."""

    observation: Any
    """Any JSON value."""
    reward: float | None
    """The reward of this action; None if the environment gives none."""
    done: bool
    """Whether the episode is over."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Other values for the script, which the policy does not see."""


class Environment(Protocol):
    """One episode at a time. A call that is cancelled ends the environment's session, not only the waiting."""

    @property
    def alive(self) -> bool:
        """Whether a new episode can begin in it."""
        ...

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        """Begin a new episode with this task, such as a seed."""
        ...

    async def step(self, action: Mapping[str, Any]) -> StepResult:
        """Act, and return the consequences."""
        ...

    async def close(self) -> None:
        """End the session, and what belongs to it. Does nothing the second time."""
        ...


def read(text: str | bytes, who: str) -> Any:
    """The JSON of an environment's reply; EnvironmentFailed if it is none."""
    try:
        return bounded_json(text)
    except ValueError as error:
        raise EnvironmentFailed(f"{who}: the reply must be JSON, is {text[:SHOWN]!r}: {error}") from error


def observed(reply: Any, who: str) -> Observation:
    """The observation of an environment's reply; EnvironmentFailed if it is none."""
    body = _body(reply, who)
    return Observation(content=body["observation"], metadata=body.get("metadata") or {})


def stepped(reply: Any, who: str) -> StepResult:
    """The step result of an environment's reply; EnvironmentFailed if it is none."""
    body = _body(reply, who)
    reward, done = body.get("reward"), body.get("done", False)
    if reward is not None and not (isinstance(reward, int | float) and abs(reward) <= MOST_REWARD):
        raise EnvironmentFailed(f"{who}: reward={reward!r}: must be a number of at most {MOST_REWARD:.2g}, or null")
    if not isinstance(done, bool):
        raise EnvironmentFailed(f"{who}: done={done!r}: must be true or false")
    return StepResult(
        observation=body["observation"],
        reward=None if reward is None else float(reward),
        done=done,
        metadata=body.get("metadata") or {},
    )


def _body(reply: Any, who: str) -> Mapping[str, Any]:
    if not isinstance(reply, Mapping) or "observation" not in reply:
        raise EnvironmentFailed(f"{who}: the reply must be an object with `observation`, is {str(reply)[:SHOWN]}")
    if not isinstance(reply.get("metadata") or {}, Mapping):
        raise EnvironmentFailed(f"{who}: metadata={str(reply['metadata'])[:SHOWN]}: must be an object")
    return reply
