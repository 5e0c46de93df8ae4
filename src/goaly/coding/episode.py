"""One attempt at a coding task: a sandbox, the agent's work in it, its patch, and the grade in a sandbox of its own.

What the machines do wrong never becomes a reward: a sandbox that died or did not start, and a patch that could not be
judged, end the episode, which begins again (`rollout.episode_retries`) or fails with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from goaly.coding.agent import End, by_text, by_tools
from goaly.coding.changes import FileChanges
from goaly.coding.grading import grade
from goaly.coding.patch_reader import PatchProblem
from goaly.coding.program_agent import by_program
from goaly.coding.settings import CodingSettings
from goaly.coding.task import CodingTask, Grade
from goaly.coding.task_files import task_of
from goaly.coding.tools import Tools
from goaly.coding.workspace import Workspaces
from goaly.prompts.prompt import Prompt
from goaly.rollout.episode import EpisodeContext
from goaly.rollout.running_episodes import EpisodeTimeout
from goaly.sandboxes.opening import open_host
from goaly.sandboxes.sandbox import Sandbox
from goaly.sandboxes.settings import SandboxSettings
from goaly.trajectory import Trajectory


class CodingEpisode:
    """The episode of a coding agent, as `apps.coding.main` runs it. The first one opens the host of sandboxes."""

    def __init__(self, settings: CodingSettings, sandboxes: SandboxSettings) -> None:
        self.settings = settings
        self._sandboxes = sandboxes
        self._opening: asyncio.Task[Workspaces] | None = None

    async def __call__(self, prompt: Prompt, context: EpisodeContext) -> list[Trajectory]:
        """Attempt the task of this prompt, and reward what was left."""
        task, chat = task_of(prompt, self.settings.tasks), context.chat
        workspaces = await self._workspaces()
        labels = {"task": task.id, "episode": f"{prompt.id}/{context.sample_index}"}
        refused, artifacts = None, []
        sandbox = await workspaces.start(task, labels)
        try:
            end = await self._work(workspaces, task, prompt, context, sandbox)
            chat.note({"kind": "end", "how": str(end)})
            if end is not End.SUBMITTED and self.settings.cut_off == "reward":
                raise EpisodeTimeout(f"the attempt at {task.id} ended by its limit: {end}")
            try:
                patch = await workspaces.patch(task, sandbox)
                artifacts = await workspaces.artifacts(task, sandbox)
            except PatchProblem as error:  # the agent's fault
                patch, refused = "", str(error)
        finally:
            await sandbox.stop()
        chat.note({"kind": "patch", "patch": patch})
        if refused is None:
            found = await grade(workspaces, task, patch, artifacts)
        else:
            found = Grade(score=0.0, resolved=False, refused=refused)
        chat.note({"kind": "grade", **graded(found)})
        chat.rewarded(found.score)
        return chat.finish()

    async def _work(
        self, workspaces: Workspaces, task: CodingTask, prompt: Prompt, context: EpisodeContext, sandbox: Sandbox
    ) -> End:
        """Let the agent work until it submits or a limit ends it."""
        settings, chat = self.settings, context.chat
        seconds = settings.agent_seconds if settings.agent_seconds is not None else task.seconds.agent
        try:
            async with asyncio.timeout(seconds) as limit:
                if settings.agent == "program":
                    return await by_program(prompt, context.endpoint, sandbox, task.workdir, settings, chat)
                async with workspaces.clean(task) as clean:
                    changes = FileChanges(sandbox, task.workdir, clean.tree) if settings.changes else None
                    agent = by_tools if settings.agent == "tools" else by_text
                    async with Tools(sandbox, task.workdir, settings, chat.note, changes) as tools:
                        return await agent(prompt.messages, chat, tools, settings, task.workdir)
        except TimeoutError:
            if not limit.expired():
                raise
            return End.SECONDS

    async def _workspaces(self) -> Workspaces:
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
        opening = self._opening
        try:
            return await asyncio.shield(opening)
        except Exception:
            if self._opening is opening:
                self._opening = None  # the next episode tries again
            raise

    async def _open(self) -> Workspaces:
        host = await open_host(self._sandboxes)
        return Workspaces(host, self._sandboxes, kept=self.settings.kept_tasks, user=self.settings.user)

    async def close(self) -> None:
        """End all sandboxes."""
        if self._opening is not None:
            opening, self._opening = self._opening, None
            workspaces = await opening
            await workspaces.close()
            await workspaces.host.close()


def graded(found: Grade) -> Mapping[str, Any]:
    """A grade as JSON, without what is absent."""
    return {key: value for key, value in asdict(found).items() if value not in (None, "", {})}
