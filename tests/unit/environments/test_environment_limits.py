"""Time limits, retries and counts, over an environment that does as it is told."""

import asyncio
import pickle

import pytest

from goaly.base.telemetry.metrics import count, counting
from goaly.environments.limits import EnvironmentLimits, LimitedEnvironment
from goaly.environments.protocol import (
    ActionRefused,
    Disconnected,
    EnvironmentDied,
    EnvironmentFailed,
    EnvironmentTimeout,
    Observation,
    StepResult,
    Unsent,
)
from goaly.environments.replies import stepped


class Scripted:
    """Raises each of these errors in turn, then answers; waits without end where one is None."""

    alive = True

    def __init__(self, *failures: Exception | None):
        self.failures = list(failures)
        self.calls = 0

    async def reset(self, task):
        return Observation(content=dict(task))

    async def step(self, action):
        self.calls += 1
        if self.failures:
            if (failure := self.failures.pop(0)) is None:
                await asyncio.Event().wait()
            raise failure
        return StepResult(observation=dict(action), reward=None, done=False)

    async def close(self):
        self.alive = False


async def begun(*failures: Exception | None, **limits) -> LimitedEnvironment:
    environment = LimitedEnvironment(Scripted(*failures), EnvironmentLimits(**limits))
    await environment.reset({"seed": 1})
    return environment


async def test_only_what_may_be_sent_again_is_retried_and_only_so_often():
    """environments-2."""
    with counting() as counts:
        environment = await begun(Unsent("full"), Unsent("full"))
        assert (await environment.step({"a": 1})).observation == {"a": 1}
        environment = await begun(*[Unsent("full")] * 9, retries=2)
        with pytest.raises(Unsent):
            await environment.step({})
        for failure in (EnvironmentFailed("broken"), EnvironmentDied("gone"), ActionRefused("no")):
            environment = await begun(failure)
            with pytest.raises(type(failure)):
                await environment.step({})
    assert counts == {
        "environment/resets": 5,
        "environment/steps": 1,
        "environment/retries": 4,
        "environment/refused": 1,
        "environment/deaths": 1,
        "environment/errors": 2,
    }


async def test_a_step_and_an_episode_have_limits_and_retries_do_not_extend_them():
    """environments-2, environments-3."""
    environment = await begun(None, step_seconds=0.01)
    with pytest.raises(EnvironmentTimeout, match=r"step: exceeded step_seconds=0.01"):
        await environment.step({})
    assert not environment.alive
    environment = await begun(None, episode_seconds=0.01)
    with pytest.raises(EnvironmentTimeout, match=r"step: exceeded episode_seconds=0.01"):
        await environment.step({})
    with pytest.raises(Disconnected, match="call reset first"):
        await environment.step({})
    await environment.reset({})
    assert (await environment.step({"a": 2})).observation == {"a": 2}
    environment = await begun(*[Unsent("full")] * 99, step_seconds=0.1, retries=90)
    with counting() as counts, pytest.raises(EnvironmentTimeout):
        await environment.step({})
    assert counts.pop("environment/retries") > 1
    assert counts == {"environment/timeouts": 1}


async def test_an_environment_whose_step_was_cancelled_is_not_used_again():
    """environments-3."""
    environment = await begun(None)
    with counting() as counts:
        step = asyncio.create_task(environment.step({}))
        await asyncio.sleep(0)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
    assert not environment.alive
    assert counts == {"environment/cancelled": 1}, "also in a task of the episode"


def test_what_is_counted_outside_of_an_episode_is_of_no_episode():
    count("game/moves")
    with counting() as outer:
        with counting() as inner:
            count("game/moves", 2)
        count("game/moves")
    assert (inner, outer) == ({"game/moves": 2}, {"game/moves": 1})


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ([], "must be an object"),
        ({"reward": 1}, "`observation`"),
        ({"observation": 1, "reward": float("nan")}, "reward=nan"),
        ({"observation": 1, "reward": "1"}, "reward='1'"),
        ({"observation": 1, "done": "no"}, "done='no'"),
    ],
)
def test_a_reply_that_is_no_step_result_is_an_error(reply, why):
    with pytest.raises(EnvironmentFailed, match=f"game: .*{why}"):
        stepped(reply, "game")
    assert stepped({"observation": 1, "reward": True}, "game").reward == 1.0


def test_errors_cross_actor_boundaries():
    error = pickle.loads(pickle.dumps(EnvironmentDied("exit code 3")))
    assert isinstance(error, EnvironmentDied)
    assert str(error) == "exit code 3"
