"""Environments of a real OpenEnv server, `servers/guessing.py`, which runs in a virtual environment of its own."""

import asyncio
import os
import signal

import pytest
from broken_replies import BROKEN
from websockets.asyncio.server import serve

from goaly.base.telemetry.metrics import counting
from goaly.environments.limits import EnvironmentLimits, LimitedEnvironment
from goaly.environments.openenv import OpenEnvironment
from goaly.environments.protocol import (
    ActionRefused,
    Disconnected,
    EnvironmentDied,
    EnvironmentFailed,
    EnvironmentTimeout,
    Unsent,
)
from goaly.environments.server_process import Server

OBSERVED = '{"type": "observation", "data": {"observation": {"text": "go on"}}}'
NO_OBSERVATIONS = {
    **{f"a reply of {what}": BROKEN[what] or " " for what in ("no JSON", "nothing", "a list", "null", "deep")},
    "no data": '{"type": "observation"}',
    "data that are a list": '{"type": "error", "data": [1]}',
    "an error without a code": '{"type": "error", "data": {"message": ' + f'"{"x" * 3000}"' + "}}",
    "a code that is a list": '{"type": "error", "data": {"code": [1]}}',
}
WAIT_FOREVER, END, RAISE = {"number": -1}, {"number": -2}, {"number": -3}


async def test_sessions_of_an_openenv_server_are_played_refused_cancelled_and_replaced(game):
    async with Server(game) as server:
        environment = OpenEnvironment(server)
        begun = await environment.reset({"seed": 3, "most": 10})
        assert begun.content == {"text": "Guess a number from 1 to 10."}
        assert begun.metadata.keys() == {"process"}
        results = [await environment.step({"number": number}) for number in (1, 2, 3, 4)]
        assert [result.reward for result in results] == [0.07, 0.01, 0.01, 1.0], "the number is 4"
        assert [result.done for result in results] == [False, False, False, True]
        assert results[-1].observation == {"text": "Right."}

        await environment.reset({"seed": 3})
        for action in ({"number": "many"}, {"guess": 1}, RAISE):
            with pytest.raises(ActionRefused):
                await environment.step(action)
        assert (await environment.step({"number": 1})).observation == {"text": "higher"}, "the session went on"

        idle = LimitedEnvironment(environment)
        assert environment._connection is not None
        environment._connection.transport.abort()  # such as by a proxy
        assert (await idle.reset({"seed": 3, "most": 10})).content == begun.content

        other = OpenEnvironment(server)
        await other.reset({"seed": 4})
        third = LimitedEnvironment(OpenEnvironment(server), EnvironmentLimits(retries=1))
        with counting() as counts, pytest.raises(Unsent, match="at capacity"):
            await third.reset({})
        assert counts["environment/retries"] == 1
        await other.close()

        step = asyncio.create_task(environment.step(WAIT_FOREVER))
        await asyncio.sleep(0)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert not environment.alive, "its answer would be taken for that of the next step"
        with pytest.raises(Disconnected, match="call reset first"):
            await environment.step({"number": 1})

        limited = LimitedEnvironment(OpenEnvironment(server), EnvironmentLimits(step_seconds=0.2))
        process = (await limited.reset({})).metadata["process"]
        os.kill(process, signal.SIGSTOP)
        with pytest.raises(EnvironmentTimeout, match=r"step_seconds=0.2"):
            await limited.step({"number": 1})
        assert not limited.alive
        os.kill(process, signal.SIGCONT)


@pytest.mark.usefixtures("at_most_4000_characters")
@pytest.mark.parametrize("what", [*BROKEN, *NO_OBSERVATIONS])
async def test_an_episode_in_a_broken_server_fails_by_its_environment_and_the_next_one_begins(what):
    reply = NO_OBSERVATIONS.get(what) or '{"type": "observation", "data": %s}' % (BROKEN[what] or "{}")
    replies = [OBSERVED, reply, OBSERVED]

    async def answer(connection):
        async for _ in connection:
            await connection.send(replies.pop(0))

    async with serve(answer, "127.0.0.1", 0) as server:
        environment = LimitedEnvironment(OpenEnvironment(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        await environment.reset({})
        with counting() as counts, pytest.raises(EnvironmentFailed) as failed:
            await environment.step({})
        assert not isinstance(failed.value, ActionRefused | Unsent)
        assert counts == {"environment/errors": 1}
        assert len(str(failed.value)) < 1000
        assert (await environment.reset({})).content == {"text": "go on"}
        await environment.close()


async def test_a_server_killed_mid_step_fails_the_step_and_starts_again_for_the_next_session(game):
    async with Server(game) as server:
        environment = OpenEnvironment(server, owns_server=True)
        process = (await environment.reset({})).metadata["process"]
        step = asyncio.create_task(environment.step(WAIT_FOREVER))
        await asyncio.sleep(0)
        os.kill(process, signal.SIGKILL)
        with pytest.raises(EnvironmentDied, match="signal SIGKILL"):
            await step
        assert not environment.alive
        assert (await environment.reset({})).metadata["process"] != process
        with pytest.raises(EnvironmentDied, match="exit code 7"):
            await environment.step(END)
        await environment.close()
