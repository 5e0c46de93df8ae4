"""An agent of your own: environment, tools and reward in one file.

python -m apps.agent.own --config configs/agent/calculator.yaml agent=null
"""

from apps.grpo.main import grpo
from goaly.base.config import run_cli
from goaly.base.json_text import bounded_json
from goaly.plan.run_config import RunConfig
from goaly.prompts.prompt import Message
from goaly.run.launch import launch

TURNS = 4


class Till:
    """The environment: it adds its arguments, and counts the calls."""

    def __init__(self):
        self.used = 0

    def add(self, a: int, b: int) -> str:
        """Add two whole numbers."""
        self.used += 1
        return str(a + b)


NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": NUMBERS}}}]


def reward(answer: str, right: str | None, till: Till) -> float:
    """1 for the right answer, less for each use of the till after the first."""
    return float(answer == right) - 0.1 * max(0, till.used - 1)


async def episode(prompt, context):
    """Let the policy use the till until it answers."""
    till, said = Till(), list(prompt.messages)
    for _ in range(TURNS):
        answer = await context.chat.say(said, TOOLS)
        said.append(answer)
        if not answer.tool_calls:
            break
        for call in answer.tool_calls:
            try:
                result = till.add(**bounded_json(call["function"]["arguments"]))
            except (TypeError, ValueError) as error:  # whatever the policy wrote
                result = str(error)
            said.append(Message(role="tool", content=result, tool_call_id=call["id"]))
    return context.chat.finish(reward(answer.content or "", prompt.answer, till))


def main(loaded):
    return launch(loaded, episode, grpo)


if __name__ == "__main__":
    run_cli(main, RunConfig, prog="python -m apps.agent.own", description="GRPO of an agent of your own.")
