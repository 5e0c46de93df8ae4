"""The settings of the agent that a run trains, of its sessions, and of the endpoint that it sends requests to."""

import inspect
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from fnmatch import fnmatchcase
from typing import Annotated, Any

from annotated_types import Ge, Le

from goaly.base.config.settings import NonNegativeFloat, PositiveInt, Section, Settings
from goaly.base.registry import function_at
from goaly.prompts.settings import ChatSettings

LAST_PORT = 65535


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
                yield f"{at.command}: must begin with a program in PATH, or its path; {self.command[0]!r} is none"
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


class SessionSettings(Settings):
    """Limits of the agents of one episode; null is no limit."""

    turns: PositiveInt | None = None
    """Most answers of the policy in the whole episode."""
    tokens: PositiveInt | None = None
    """Most tokens that the policy writes in the whole episode. The answer that reaches it ends there."""
    parallel: PositiveInt | None = None
    """Most answers that are sampled at the same time; a request above it gets status 429, and clients repeat it."""
    malformed_penalty: NonNegativeFloat = 0.0
    """Subtracted from the reward of a turn for each malformed tool call: one that cannot be read, names an unknown
    tool, or has arguments that are no JSON object."""


class UntrainedSettings(Settings):
    """Requests of agents that are answered and recorded, but not trained: those to which one of these patterns applies.
    In a pattern `*` is any text, `?` any character."""

    models: tuple[str, ...] = ()
    """Patterns of the model that a request names, such as `*haiku*` for the small model of Claude Code."""
    headers: dict[str, str] = field(default_factory=dict)
    """Patterns of the values of HTTP headers, by their names."""
    metadata: dict[str, str] = field(default_factory=dict)
    """Patterns of the values in a request's `metadata`, by their keys."""

    def apply_to(self, model: str | None, headers: Mapping[str, str], metadata: Any) -> bool:
        """Whether a request with this model, headers and metadata is not trained."""
        given = metadata if isinstance(metadata, Mapping) else {}
        named = [(model, pattern) for pattern in self.models]
        named += [(headers.get(name.lower()), pattern) for name, pattern in self.headers.items()]
        named += [(given.get(key), pattern) for key, pattern in self.metadata.items()]
        return any(isinstance(value, str) and fnmatchcase(value, pattern) for value, pattern in named)

    def _problems(self, at: Section) -> Iterator[str]:
        if not all(self.models):
            yield f"{at.models}: must be names or patterns, not empty; '*' is any model"
        if not all(_HEADER.fullmatch(name) for name in self.headers):
            yield f"{at.headers}: must have names of HTTP headers, without spaces and colons, as keys"
        if not all(self.metadata):
            yield f"{at.metadata}: must have keys of a request's metadata as keys"


_HEADER = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)


class EndpointSettings(Settings):
    """The HTTP endpoint of each rollout worker, with the APIs of OpenAI and Anthropic."""

    host: str = "127.0.0.1"
    """Address that it listens on. Keep loopback unless agents run on other machines: traffic is not encrypted."""
    port: Annotated[int, Ge(0), Le(LAST_PORT)] = 0
    """Port of the first worker, the next worker has the next one; 0 lets the system choose."""
    untrained: UntrainedSettings = field(default_factory=UntrainedSettings)
    """Requests that are not trained, such as those for titles and summaries; the default trains all."""
