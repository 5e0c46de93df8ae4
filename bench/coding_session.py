"""A run whose agents are scripts: real sandboxes, commands, patches and grading, with a policy that is not listened to.

Started by `bench.coding`. Half of the agents solve their task. An agent's commands count themselves in a file, so that
one that ran twice is seen: `bench/repeated_commands`.
"""

import json

from apps.grpo.main import grpo
from bench.tail import drawn
from goaly.base.config import Loaded, run_cli
from goaly.base.telemetry.metrics import count
from goaly.coding.agent import End
from goaly.coding.calls import Calls
from goaly.coding.episode import CodingEpisode
from goaly.coding.held_sandbox import HeldSandbox
from goaly.coding.tools import BASH, SUBMIT, Tools
from goaly.coding.workspace import Workspaces
from goaly.grading.task import CodingTask
from goaly.plan.run_config import RunConfig
from goaly.prompts.prompt import Message, Prompt
from goaly.rollout.episode import EpisodeContext

TURNS = 4
SECONDS = 1.5
"""The longest that a command works."""


class ScriptedEpisode(CodingEpisode):
    """An attempt with an agent that does the same whatever the policy says."""

    async def work(
        self, workspaces: Workspaces, task: CodingTask, prompt: Prompt, context: EpisodeContext, held: HeldSandbox
    ) -> End:
        key, chat, said = f"{prompt.id} {context.sample_index}", context.chat, list(prompt.messages)
        async with Tools(held.sandbox, task.workdir, self.settings, chat.note) as tools:
            calls = Calls(tools, held, chat, self.settings.snapshot_every)
            for turn in range(TURNS):
                said.append(await chat.say(said, stop_token_ids=()))
                command = f"echo {turn} >> /tmp/ran; sleep {SECONDS * drawn(f'{key} {turn}'):.2f}"
                if turn == 1 and drawn(key) < 0.5:
                    command += "; sed -i 's/a \\* b/a + b/' adder.py"
                if turn == TURNS - 1:
                    command += "; sort /tmp/ran | uniq -d | wc -l"
                seen = await calls.call(BASH, json.dumps({"command": command}))
                said.append(Message(role="user", content=f"{turn}"))
            last = seen.split("\n")[-2:-1] or seen.split("\n")
            count("bench/repeated_commands", int(last[0]) if last[0].isdigit() else 0)
            await calls.call(SUBMIT, "{}")
            return End.SUBMITTED


def main(loaded: Loaded[RunConfig]) -> int:
    """Train on what the scripts did."""
    from goaly.run.launch import launch

    assert loaded.config.coding is not None
    return launch(loaded, ScriptedEpisode(loaded.config.coding, loaded.config.sandbox), grpo, coding=True)


if __name__ == "__main__":
    run_cli(main, RunConfig, prog="python -m bench.coding_session", description="A run of scripted coding agents.")
