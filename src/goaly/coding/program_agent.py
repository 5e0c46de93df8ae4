"""A program of its own as the agent: it runs inside the sandbox, and reaches nothing but the policy.

The episode's endpoint is at 127.0.0.1 inside, with the episode's key. The program is started once, whatever happens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from goaly.agents.episode_folder import PROMPT_FILE
from goaly.agents.program import ProgramFailed, asked, from_elsewhere
from goaly.coding.agent import End
from goaly.coding.held_sandbox import HeldSandbox
from goaly.coding.settings import CodingSettings
from goaly.coding.task_files import PLACE
from goaly.prompts.prompt import Prompt
from goaly.sandboxes.command import Process
from goaly.sandboxes.contract import CommandResult, Entry, Limit, SandboxDied
from goaly.sandboxes.network import forward
from goaly.sandboxes.sandbox import Sandbox

if TYPE_CHECKING:
    from goaly.agents.chat import Chat
    from goaly.agents.gateway import Endpoint

PORT: Final = 8080
"""Of the policy's address inside."""
STARTED: Final = "program"
"""The mark of an attempt whose program may have been started, and when."""
HOME: Final = "/tmp/agent"
"""HOME of the program."""
FROM_FILE: Final = f'exec "$@" < {HOME}/{PROMPT_FILE}'
"""Its input ends where the file does: a pipe that is kept for a worker that takes over never ends."""
MOST_KEPT_BYTES: Final = 1 << 16
"""Of each of the program's outputs: the first and the last of them."""


async def by_program(
    prompt: Prompt, endpoint: Endpoint, held: HeldSandbox, workdir: str, settings: CodingSettings, chat: Chat
) -> End:
    """Let the program work on the prompt's problem until it exits. ProgramFailed if its exit code is not 0, unless a
    limit of the session or the sandbox's memory has ended it."""
    sandbox, outside = held.sandbox, urlsplit(endpoint.base_url)
    assert outside.hostname is not None
    way = await forward(sandbox, PORT, outside.hostname, outside.port or 80)
    try:
        if chat.marks.get(STARTED):
            process = sandbox.kept()
            if process is None:
                raise SandboxDied("the agent's program was started by a worker that died; how it ended is not known")
        else:
            held.behind = None  # nothing has been done in any sandbox
            chat.mark(STARTED, time.time())  # before: a worker that takes over must not start it again
            process = await _started(sandbox, asked(prompt, [PLACE]), endpoint, workdir, settings)
        result = await process.communicate()  # unblocked by its end, or the time limit of the attempt
    finally:
        way.close()
    chat.note(_record(settings, result))
    if result.ok:
        return End.SUBMITTED
    if chat.was_exhausted:
        return End.TURNS
    if result.limit is Limit.MEMORY:
        return End.MEMORY
    said = result.stderr.text().strip()[-4096:]
    told = f"its standard error ends with:\n{said}" if said else "its standard error is empty"
    raise ProgramFailed(f"the agent {settings.command[0]} ended with exit code {result.exit_code}; {told}")


def seconds_since_start(chat: Chat) -> float:
    """How long the program has been running, in all workers; 0 if it was not started."""
    started = chat.marks.get(STARTED)
    return 0.0 if started is None else time.time() - started


async def _started(
    sandbox: Sandbox, question: bytes, endpoint: Endpoint, workdir: str, settings: CodingSettings
) -> Process:
    entries = [Entry(path="tmp", kind="folder", mode=0o755), Entry(path=PROMPT_FILE, contents=question)]
    await sandbox.upload(entries, HOME)
    process = await sandbox.start(
        ["/bin/sh", "-c", FROM_FILE, "sh", *_command(settings, sandbox)],
        cwd=workdir,
        env=_variables(endpoint, workdir),
        output_bytes=MOST_KEPT_BYTES,
    )
    await sandbox.keep(process)
    return process


def _command(settings: CodingSettings, sandbox: Sandbox) -> list[str]:
    """The command; with this machine's files as the sandbox's root, paths from the run's folder name the same files."""
    is_here = sandbox.spec.image is None and sandbox.spec.root == Path("/")
    return from_elsewhere(settings.command) if is_here else list(settings.command)


def _variables(endpoint: Endpoint, workdir: str) -> Mapping[str, str]:
    address = f"http://127.0.0.1:{PORT}"
    return {
        "OPENAI_BASE_URL": f"{address}{urlsplit(endpoint.base_url).path}",
        "OPENAI_API_KEY": endpoint.api_key,
        "ANTHROPIC_BASE_URL": f"{address}{urlsplit(endpoint.root_url).path}",
        "ANTHROPIC_API_KEY": endpoint.api_key,
        "HOME": HOME,
        "TMPDIR": f"{HOME}/tmp",
        "PWD": workdir,
    }


def _record(settings: CodingSettings, result: CommandResult) -> Mapping[str, Any]:
    return {
        "kind": "program",
        "command": " ".join(settings.command),
        "output": result.stdout.text(),
        "errors": result.stderr.text(),
        "exit_code": result.exit_code,
        "seconds": round(result.seconds, 4),
        **({} if result.limit is None else {"limit": str(result.limit)}),
    }
