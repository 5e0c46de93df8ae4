"""The settings of the agent that a run trains."""

import inspect
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from goaly.base.config.settings import Section, Settings
from goaly.base.dotted_path import function_at
from goaly.prompts.settings import ChatSettings


class AgentSettings(Settings):
    """The agent that a run trains."""

    function: str | None = None
    """The agent, as `package.module:function`: a coroutine function `agent(messages, *, base_url, api_key)`, which asks
    this address of an OpenAI API, and returns its final answer as a text; or an episode of a script,
    `episode(prompt, context)`. It runs in the rollout workers."""
    command: tuple[str, ...] = ()
    """The agent's program and its arguments, instead of `function`. Each episode starts it on the host of its rollout
    worker, in a folder of its own, with the prompt as JSON on standard input, and `OPENAI_BASE_URL`, `OPENAI_API_KEY`,
    `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY` in its environment. Its standard output is its final answer; it must
    exit with 0. `[python3, apps/agent/cli.py, codex]` runs Codex; see docs/cli_agents.md."""
    hidden: tuple[str, ...] = ()
    """Keys of the prompts' metadata that `command` does not get, only the verifier: hidden tests, a solution."""
    keep_folders: str | None = None
    """A folder in which each episode of `command` leaves its own, to look at it; null uses temporary ones."""

    @property
    def called(self) -> Callable[..., Any]:
        """The function."""
        assert self.function is not None, "it is a program"
        return function_at(self.function)

    @property
    def is_episode(self) -> bool:
        """Whether it is an episode, which asks the policy through its context."""
        return self.function is not None and not _takes(self.called, [], base_url="", api_key="")

    def warning(self, chat: ChatSettings) -> str | None:
        """A warning if these parsers keep the agent from using tools; None if it can, or asks through its context."""
        if chat.tool_parser is not None or self.problems("") or self.is_episode:
            return None
        return "chat.tool_parser is null: requests of the agent that have tools will be refused"

    def _problems(self, at: Section) -> Iterator[str]:
        if (self.function is None) == (not self.command):
            yield f"{at.function}: set either function, a coroutine function, or command, a program"
        elif self.command:
            if shutil.which(self.command[0]) is None:
                yield f"{at.command}: there is no program {self.command[0]!r} that can be started"
        elif why := self._why_not_called():
            yield (
                f"{at.function}: {why}, must name an `async def` as package.module:function, either "
                "agent(messages, *, base_url, api_key) or episode(prompt, context)"
            )
        if not self.command:
            yield from at.idle(f"{at}command is empty", "hidden", "keep_folders")

    def _why_not_called(self) -> str | None:
        try:
            called = self.called
        except Exception as error:  # whatever a user's module raises when it is imported
            return f"cannot be used ({type(error).__name__}: {error})"
        if inspect.iscoroutinefunction(called) and (not self.is_episode or _takes(called, None, None)):
            return None
        return "is another kind of function"


def _takes(called: Callable[..., Any], *arguments: Any, **named: Any) -> bool:
    try:
        inspect.signature(called).bind(*arguments, **named)
    except TypeError:
        return False
    return True
