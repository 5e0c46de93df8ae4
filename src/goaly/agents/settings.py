"""The settings of the agent that a run trains."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from goaly.config.settings import Section, Settings
from goaly.dotted_path import function_at


class AgentSettings(Settings):
    """The agent that a run trains."""

    function: str
    """The agent, as `package.module:function`: a coroutine function `agent(messages, *, base_url, api_key)`, which asks
    this address of an OpenAI API, and returns its final answer as a text; or an episode of a script,
    `episode(prompt, context)`. It runs in the rollout workers."""

    @property
    def called(self) -> Callable[..., Any]:
        """The function."""
        return function_at(self.function)

    @property
    def is_episode(self) -> bool:
        """Whether it is an episode, which asks the policy through its context."""
        return not _takes(self.called, [], base_url="", api_key="")

    def _problems(self, at: Section) -> Iterator[str]:
        try:
            called = self.called
        except Exception as error:  # whatever a user's module raises when it is imported
            why = f"cannot be used ({type(error).__name__}: {error})"
        else:
            if inspect.iscoroutinefunction(called) and (not self.is_episode or _takes(called, None, None)):
                return
            why = "is another kind of function"
        yield (
            f"{at.function}: {why}, must name an `async def` as package.module:function, either "
            "agent(messages, *, base_url, api_key) or episode(prompt, context)"
        )


def _takes(called: Callable[..., Any], *arguments: Any, **named: Any) -> bool:
    try:
        inspect.signature(called).bind(*arguments, **named)
    except TypeError:
        return False
    return True
