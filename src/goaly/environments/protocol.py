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
