"""The settings of a coding agent: its kind, its tools, its limits, and how an attempt counts that a limit ended."""

import posixpath
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge

from goaly.base.config.settings import NonNegativeInt, PositiveFloat, PositiveInt, Section, Settings
from goaly.coding.task_files import TaskSettings
from goaly.prompts.settings import ChatSettings

LEAST_SHOWN = 256


class CodingSettings(Settings):
    """The coding agent that works on tasks in sandboxes."""

    agent: Literal["tools", "text", "program"] = "tools"
    """The agent. `tools` calls `bash`, `edit` and `submit` by the model's own tool calls (`chat.tool_parser`); `text`
    writes one fenced block of shell commands in each answer; `program` is `command`."""
    command: tuple[str, ...] = ()
    """The agent's program and its arguments, if `agent` is program. It runs inside the sandbox, in the repository, with
    the problem as JSON on standard input, and reaches nothing but the policy: `OPENAI_BASE_URL`, `OPENAI_API_KEY`,
    `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY` are in its environment. Needs `rollout.endpoint`."""
    files: dict[str, str] = field(default_factory=dict)
    """Files and folders of the rollout worker's host that an agent finds in its sandbox, by their absolute paths there,
    such as `{/opt/agent: agents/own}`: its program and what that needs, where neither the image nor the root has them.
    They are copied once for each image or root. The backend `namespaces` keeps them in memory; with the root `/` it
    shows the host's own programs."""
    instructions: str | None = None
    """The system message; null is the agent's own, and an empty text is none. `{workdir}` becomes the repository's
    folder."""
    turns: PositiveInt = 100
    """Most answers of the policy in one attempt. `rollout.session.turns` limits programs."""
    reminders: NonNegativeInt = 3
    """Answers in a row without a tool call, or without one fenced block, that are answered with a reminder. One more
    ends the attempt."""
    observation_bytes: Annotated[int, Ge(LEAST_SHOWN)] = 16_384
    """Most bytes of a command's output that the policy sees: the first half and the last half of them, with a mark in
    between."""
    command_seconds: PositiveFloat = 60.0
    """Time limit of one command. A command that takes longer is ended, and the shell stays."""
    agent_seconds: PositiveFloat | None = None
    """Time limit of an attempt, from the first request to the policy to its last command; null is the task's own.
    Setup and grading have limits of their own, which the task names."""
    cut_off: Literal["grade", "reward"] = "grade"
    """Treatment of an attempt that ended without `submit`, because of a limit or of answers without calls. `grade`:
    the files are graded as they stand, and the score counts. `reward`: nothing is graded, and the attempt has the
    reward of `rollout.cut_off_reward`."""
    user: NonNegativeInt = 1000
    """The user of the agent's commands, if the files of its task do not belong to another one."""
    tasks: TaskSettings = field(default_factory=TaskSettings)
    """Where the repositories of tasks come from. `prompts.files` names the tasks, and `prompts.reader` is
    `goaly.coding.task_files:read_prompts`."""
    kept_tasks: PositiveInt = 256
    """Tasks whose prepared state stays at the host of sandboxes: those that were used last. It is files in memory
    with the backend `namespaces`. Raise it if tasks come back before that and their setup takes long."""
    snapshot_every: PositiveInt | None = None
    """Keep the files after every N-th tool call: if the sandbox dies, another one begins there and repeats the calls
    since then, for tasks that say that this is safe (`safe_to_repeat`). Null repeats all of the attempt's, as does a
    sandbox that another worker has taken over. Attempts at other tasks begin again (`rollout.episode_retries`)."""
    changes: bool = True
    """Record which files each turn changed, and how many lines. Each command takes a little longer."""

    def _problems(self, at: Section) -> Iterator[str]:
        if self.agent == "program":
            if not self.command:
                yield f"{at.command}: must name a program where {at}agent is program"
            yield from at.idle(f"{at}agent is program", "instructions", "turns", "reminders", "observation_bytes")
            yield from at.idle(f"{at}agent is program", "command_seconds", "changes", "snapshot_every")
        else:
            yield from at.idle(f"{at}agent is {self.agent}", "command")
        for inside, outside in self.files.items():
            if posixpath.normpath(inside) != inside or not inside.startswith("/") or inside == "/":
                yield f"{at}files: {inside} must be an absolute path in the sandbox, without '..' and '/' at its end"
            if not Path(outside).exists():
                yield f"{at}files.{inside}={outside}: does not exist here"

    def problems_beside(self, at: Section, chat: ChatSettings, chat_key: str, has_endpoint: bool) -> Iterator[str]:
        """One line for each setting that cannot work with these of the chat, and with an endpoint or without."""
        if self.agent == "tools" and chat.tool_parser is None:
            yield f"{chat_key}tool_parser=null: must name vLLM's parser of the model's calls where {at.agent}"
        if self.agent == "program" and not has_endpoint:
            yield f"rollout.endpoint=null: must be a section, because {at.command} asks there; `{{}}` has the defaults"
