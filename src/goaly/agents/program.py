"""An agent that is a program: each episode starts it, with the address and the key of the policy in its environment.

    printf '{"messages": [{"role": "user", "content": "2+3="}]}' | OPENAI_BASE_URL=... OPENAI_API_KEY=... my-agent

Standard input has the prompt as a JSON object, standard output is the final answer. Standard error is for people: its
end is part of the error of a program that fails. The program works in a folder of its own (`episode_folder.py`).

An answer is all of the standard output of a program that exited with 0; any other end fails its episode.

Invariants
    agents-9: When its episode ends in any way, or its worker does, no process that the program
        started is left (environments-1).
"""

import asyncio
import json
import os
from asyncio.subprocess import PIPE
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from goaly.agents.episode_folder import OTHER_HOMES, PROMPT_FILE, EpisodeFolder
from goaly.base.errors import EpisodeError
from goaly.environments.server_process import end_of, guarded, stopped
from goaly.prompts.prompt import Prompt

if TYPE_CHECKING:
    from goaly.agents.gateway import Endpoint

OTHER_CREDENTIALS = ("ANTHROPIC_AUTH_TOKEN",)
"""Variables of a user's own that clients would send instead of the key."""
MOST_ANSWER_BYTES = 1 << 24
MOST_ERROR_BYTES = 1 << 12
"""Of the end of its standard error, in the error of a program that fails."""
_PART_BYTES = 1 << 16


class ProgramFailed(EpisodeError):
    """An agent's program ended with an exit code other than 0, or wrote too much."""


async def answer_of_program(
    command: Sequence[str], folder: EpisodeFolder, prompt: Prompt, endpoint: "Endpoint", *, hidden: Sequence[str] = ()
) -> str:
    """The final answer of this program, without white space at both ends; ProgramFailed if it fails. It does not get
    the `hidden` keys of the prompt's metadata."""
    question = asked(prompt, hidden)
    (folder.home / PROMPT_FILE).write_bytes(question)
    process = await guarded(
        from_elsewhere(command),
        "" if folder.is_kept else folder.path,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        cwd=folder.work,
        env={**_variables(endpoint), **folder.variables},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    ended = asyncio.ensure_future(process.wait())
    try:
        async with asyncio.TaskGroup() as streams:
            streams.create_task(_write(process.stdin, question))
            answer = streams.create_task(_whole(process.stdout, command[0]))
            errors = streams.create_task(_end(process.stderr))
        code = await ended  # unblocked by the program, or the time limit of the episode
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        unread = asyncio.gather(_end(process.stdout), _end(process.stderr))  # asyncio sees no end behind a full pipe
        await stopped(process, ended)  # agents-9
        await unread
    if code != 0:
        said = errors.result().decode(errors="replace").strip()
        told = f"its standard error ends with:\n{said}" if said else "its standard error is empty"
        raise ProgramFailed(f"the agent {command[0]} ended with {end_of(code)}; {told}")
    return answer.result().decode(errors="replace").strip()


def asked(prompt: Prompt, hidden: Sequence[str] = ()) -> bytes:
    """The standard input of an agent's program, as one JSON object: a request of OpenAI's chats but for the model.
    It has the prompt's metadata without the `hidden` keys."""
    question: dict[str, object] = {"messages": [message.as_dict() for message in prompt.messages]}
    if prompt.tools:
        question["tools"] = list(prompt.tools)
    if shown := {key: value for key, value in prompt.metadata.items() if key not in hidden}:
        question["metadata"] = shown
    return json.dumps(question).encode()


def from_elsewhere(command: Sequence[str]) -> list[str]:
    """The command with absolute paths for the files here that it names, as it starts in another folder."""
    program, *arguments = command
    own = os.path.abspath(program) if os.sep in program else program
    return [own, *(os.path.abspath(argument) if os.path.isfile(argument) else argument for argument in arguments)]


def _variables(endpoint: "Endpoint") -> Mapping[str, str]:
    dropped = (*OTHER_CREDENTIALS, *OTHER_HOMES)
    own = {name: value for name, value in os.environ.items() if name not in dropped}
    return {
        **own,
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "ANTHROPIC_BASE_URL": endpoint.root_url,
        "ANTHROPIC_API_KEY": endpoint.api_key,
    }


async def _write(stdin: asyncio.StreamWriter, question: bytes) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # a program need not read it
        stdin.write(question)
        await stdin.drain()
        stdin.close()
        await stdin.wait_closed()


async def _whole(stdout: asyncio.StreamReader, program: str) -> bytes:
    written = bytearray()
    while part := await stdout.read(_PART_BYTES):
        written += part
        if len(written) > MOST_ANSWER_BYTES:
            raise ProgramFailed(f"the agent {program} wrote more than {MOST_ANSWER_BYTES} bytes to its standard output")
    return bytes(written)


async def _end(stderr: asyncio.StreamReader) -> bytes:
    end = b""
    while part := await stderr.read(_PART_BYTES):
        end = (end + part)[-MOST_ERROR_BYTES:]
    return end
