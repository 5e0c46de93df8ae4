"""The protocol of environments, in the shape of OpenEnv: `reset`, `step`, `close`; and what ends an episode in one.

Tasks, actions and observations are JSON: an environment may be another program.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from goaly.base.errors import EpisodeError


class EnvironmentFailed(EpisodeError):
    """The episode cannot go on, because of its environment."""


class ActionRefused(EnvironmentFailed):
    """The environment refused this action; its episode goes on, and the script may answer the policy."""


class Unsent(EnvironmentFailed):
    """The request had no effect, or has the same effect again: `LimitedEnvironment` retries it."""


class Disconnected(EnvironmentFailed):
    """The connection to the environment broke."""


class EnvironmentTimeout(EnvironmentFailed):
    """A call or an episode exceeded its time limit."""


class EnvironmentDied(EnvironmentFailed):
    """The environment's process ended; says how, and what its log says at the end."""


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
