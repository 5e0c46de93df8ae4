"""GRPO of an agent that knows nothing of goaly: it asks OpenAI's API twice, and sends its own reward."""

import httpx
import openai

from apps.grpo.main import grpo
from goaly.base.config import Loaded, run_cli
from goaly.plan.run_config import RunConfig
from goaly.prompts.prompt import Prompt
from goaly.rollout.episode import EpisodeContext
from goaly.run.launch import launch
from goaly.trajectory import Trajectory


async def agent(base_url: str, api_key: str, question: str) -> str:
    """Ask, and ask for a second opinion."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        said = [{"role": "user", "content": question}]
        first = await client.chat.completions.create(model="gpt-4o", messages=said, temperature=0.3)
        said += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": question}]
        parts = await client.chat.completions.create(model="gpt-4o", messages=said, stream=True)
        return "".join([part.choices[0].delta.content or "" async for part in parts])


async def episode(prompt: Prompt, context: EpisodeContext) -> list[Trajectory]:
    """Let the agent answer."""
    endpoint = context.endpoint
    answer = await agent(endpoint.base_url, endpoint.api_key, prompt.messages[0].content)
    score = await context.reward(prompt, answer)
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {endpoint.api_key}"}) as client:
        url = f"{endpoint.root_url}/sessions/{endpoint.session_id}/reward"
        (await client.post(url, json={"reward": score})).raise_for_status()
    return context.chat.finish()


def main(loaded: Loaded[RunConfig]) -> int:
    """Train it."""
    return launch(loaded, episode, grpo)


if __name__ == "__main__":
    run_cli(main, RunConfig, prog="python -m tests.loop.agent_over_http", description="GRPO of an agent.")
