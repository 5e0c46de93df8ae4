"""The settings of the agent that a run trains."""

import inspect
from collections.abc import Iterator

from goaly.config.settings import Section, Settings
from goaly.dotted_path import function_at


class AgentSettings(Settings):
    """The agent that a run trains."""

    function: str
    """The agent, as `package.module:function`: a coroutine function `agent(messages, *, base_url, api_key)`, which asks
    this address of an OpenAI API, and returns its final answer as a text. It runs in the rollout workers."""

    def _problems(self, at: Section) -> Iterator[str]:
        try:
            agent = function_at(self.function)
            inspect.signature(agent).bind([], base_url="", api_key="")
        except Exception as error:  # whatever a user's module raises when it is imported
            yield (
                f"{at.function}: cannot be used ({type(error).__name__}: {error}), must name a function "
                "agent(messages, *, base_url, api_key) as package.module:function"
            )
        else:
            if not inspect.iscoroutinefunction(agent):
                yield f"{at.function}: must be an `async def`"
