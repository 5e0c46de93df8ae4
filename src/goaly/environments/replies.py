"""Replies of environments that are other programs: their JSON, read as an observation or as the result of a step."""

from collections.abc import Mapping
from typing import Any

from goaly.base.json_text import bounded_json
from goaly.environments.protocol import EnvironmentFailed, Observation, StepResult

SHOWN = 200
"""Characters of a reply in an error."""
MOST_REWARD = 3.4028234663852886e38
"""The largest number of float32, in which rewards are trained."""


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
