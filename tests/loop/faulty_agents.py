"""GRPO of agents under which everything dies: their own process, their environment, their tools, and their worker.

`FAULTS` says what happens in which episode. All other episodes are those of `agent_over_http`.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import openai

from apps.grpo.main import grpo
from goaly.agents.gateway import Endpoint
from goaly.base.config import Loaded, run_cli
from goaly.environments.http_function import HttpFunction
from goaly.environments.mcp_tools import McpTools
from goaly.environments.protocol import EnvironmentDied
from goaly.environments.server_process import Command, Server, ServerProcess
from goaly.generate.policy import Completion, Policy
from goaly.generate.request import Sampling
from goaly.plan.run_config import RunConfig
from goaly.prompts.prompt import Message, Prompt
from goaly.rollout.episode import EpisodeContext
from goaly.run.launch import launch
from goaly.trajectory import Trajectory
from tests.loop.agent_over_http import agent

SERVERS = Path(__file__).parents[1] / "unit/environments/servers"
GOING_ON = "going-on"
"""The folder of an agent that lives on under the death of its worker."""
STREAMING = "streaming"
"""The file that says that a client has the beginning of a stream, and waits."""


async def agent_dies(folder: Path, question: str, endpoint: Endpoint, *, times: int = 9) -> str:
    """The answer of an agent in a process of its own, which dies so many times in the middle of its second answer."""
    arguments = [sys.executable, str(Path(__file__).with_name("agent_process.py")), question]
    variables = {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": endpoint.api_key}
    dies = ["dies"] if times else []
    process = await ServerProcess.start(
        Command(arguments=arguments + dies, variables=variables, log=folder / "logs" / "agents.log")
    )
    try:
        return (await process.unless_dead(_line(process))).decode().strip()
    finally:
        await process.stop()


async def _line(process: ServerProcess) -> bytes:
    line = await process.stdout.readline()
    return line or await asyncio.Event().wait()  # its end is told by the process


async def agent_dies_once(folder: Path, question: str, endpoint: Endpoint) -> str:
    """The answer of an agent that is started again after its death."""
    try:
        return await agent_dies(folder, question, endpoint)
    except EnvironmentDied:
        return await agent_dies(folder, question, endpoint, times=0)


async def environment_dies(folder: Path, question: str, endpoint: Endpoint) -> str:
    """Fails: the process of its environment is killed in the middle of the episode."""
    arguments = [sys.executable, str(SERVERS / "counting.py"), "{port}"]
    async with Server(Command(arguments=arguments, log=folder / "logs" / "environment.log")) as server:
        game = HttpFunction(server, "/play")
        seen = await game.reset({})
        answer = await agent(endpoint.base_url, endpoint.api_key, question)
        os.kill(seen.metadata["process"], signal.SIGKILL)
        await game.step({"number": 1})
    return answer


async def tool_server_hangs(folder: Path, question: str, endpoint: Endpoint) -> str:
    """The answer of an agent whose MCP server was stopped: it is told that the tool has not answered."""
    command = Command(arguments=[sys.executable, str(SERVERS / "tools.py")], log=folder / "logs" / "tools.log")
    tools = await McpTools.start(command, call_seconds=1.0)
    try:
        call = {"id": "1", "function": {"name": "stop", "arguments": "{}"}}
        (told,) = await tools.answer(Message(role="assistant", content="", tool_calls=(call,)))
        assert told.content == "Error: stop has not answered within 1 s"
        return await agent(endpoint.base_url, endpoint.api_key, question + str(len(told.content)))
    finally:
        await tools.close()


async def worker_dies(folder: Path, question: str, endpoint: Endpoint) -> str:
    """The answer of an agent whose worker is killed while it reads a stream, before the answer has ended."""
    if not (folder / STREAMING).exists():  # in the first worker
        Policy.sample = _endless(endpoint.session_id, Policy.sample)
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        said: list[Any] = [{"role": "user", "content": question}]
        answer = ""
        async for part in await client.chat.completions.create(model="m", messages=said, stream=True):
            if part.choices[0].delta.content and not (folder / STREAMING).exists():
                (folder / STREAMING).touch()
                await asyncio.Event().wait()  # for the end of this process
            answer += part.choices[0].delta.content or ""
        return answer


def _endless(episode: str, sample: Callable[..., Awaitable[Completion]]) -> Any:
    """`Policy.sample` that gives the parts of the episode's answers, and never their ends. An answer has some text."""

    async def sampled(policy: Policy, prompt: Sequence[int], sampling: Sampling, **facts: Any) -> Completion:
        if policy.name != episode:
            return await sample(policy, prompt, sampling, **facts)
        await sample(policy, prompt, replace(sampling, min_tokens=4), **{**facts, "trained": False})
        return await asyncio.Event().wait()  # for the end of this process

    return sampled


async def worker_dies_under_an_agent_that_goes_on(folder: Path, question: str, endpoint: Endpoint) -> str:
    """The answer of an agent that lives on while its worker is replaced, and asks the next one."""
    agent = folder / GOING_ON
    if not agent.exists():  # in the first worker
        agent.mkdir()
        arguments = [sys.executable, str(Path(__file__).with_name("agent_process.py")), question, "goes-on", str(agent)]
        variables = {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": endpoint.api_key}
        with (folder / "logs" / "going-on.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *arguments, env=os.environ | variables, stdout=log, stderr=log, start_new_session=True
            )
        (agent / "process").write_text(str(process.pid))
    await _end_of(int((agent / "process").read_text()))
    return (agent / "answer").read_text()


async def _end_of(process: int) -> None:
    ended = asyncio.Event()
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return
    asyncio.get_running_loop().add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)


FAULTS: dict[str, Callable[[Path, str, Endpoint], Awaitable[str]]] = {
    "1.0": agent_dies,
    "1.0.retry1": agent_dies,
    "2.0": agent_dies_once,
    "3.0": environment_dies,
    "3.0.retry1": environment_dies,
    "4.0": tool_server_hangs,
    "5.0": worker_dies_under_an_agent_that_goes_on,
    "6.0": worker_dies,
    "7.0": environment_dies,
}
"""By the name of their attempt: ticket, sample, and the number of the retry."""


async def episode(folder: Path, prompt: Prompt, context: EpisodeContext) -> list[Trajectory]:
    """Let an agent answer, or try to."""
    endpoint, question = context.endpoint, prompt.messages[0].content
    fault = FAULTS.get(endpoint.session_id)
    if fault is not None:
        answer = await fault(folder, question, endpoint)
    else:
        answer = await agent(endpoint.base_url, endpoint.api_key, question)
    return context.chat.finish(await context.reward(prompt, answer))


def main(loaded: Loaded[RunConfig]) -> int:
    """Train them."""
    return launch(loaded, partial(episode, Path(loaded.config.run_dir or "")), grpo)


if __name__ == "__main__":
    run_cli(main, RunConfig, prog="python -m tests.loop.faulty_agents", description="GRPO of agents that die.")
