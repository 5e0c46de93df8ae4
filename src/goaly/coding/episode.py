"""One attempt at a coding task: a sandbox, the agent's work in it, its patch, and the grade in a sandbox of its own.

What the machines do wrong never becomes a reward: a sandbox that died or did not start, and a patch that could not be
judged, end the episode, which begins again (`rollout.episode_retries`) or fails with the reason.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from goaly.base.telemetry.metrics import count
from goaly.coding.agent import End, by_text, by_tools
from goaly.coding.calls import Calls
from goaly.coding.changes import FileChanges
from goaly.coding.grading import grade
from goaly.coding.held_sandbox import HeldSandbox, packed, unpacked
from goaly.coding.program_agent import by_program, seconds_since_start
from goaly.coding.settings import CodingSettings
from goaly.coding.task_files import task_of
from goaly.coding.tools import Tools
from goaly.coding.workspace import Workspaces
from goaly.grading.patch_reader import PatchProblem
from goaly.grading.task import CodingTask, Grade
from goaly.prompts.prompt import Prompt
from goaly.rollout.episode import EpisodeContext, resumable
from goaly.rollout.running_episodes import EpisodeTimeout
from goaly.sandboxes.contract import Entry
from goaly.sandboxes.open_host import open_host
from goaly.sandboxes.settings import SandboxSettings
from goaly.trajectory import Trajectory

if TYPE_CHECKING:
    from goaly.agents.chat import Chat


LEFT: Final = "left"
"""The mark of an attempt whose agent has ended."""

GRADE: Final = "grade"
"""The kind of the note of a grade."""


@dataclass(frozen=True, slots=True)
class WorkLeft:
    """The work of an agent, as it left it in its sandbox."""

    end: End
    patch: str
    refused: str | None
    """Why the patch is not tried; None if it is."""
    artifacts: Sequence[Entry]


@resumable
class CodingEpisode:
    """The episode of a coding agent, as `apps.coding.main` runs it. The first one opens the host of sandboxes.

    One that goes on in another worker adopts its sandbox (coding-3): the workers of a host share its server.
    """

    def __init__(self, settings: CodingSettings, sandboxes: SandboxSettings) -> None:
        self.settings = settings
        self._sandboxes = sandboxes
        self.run = f"run-{secrets.token_hex(8)}"
        """The workers of a run that are on one host share a server of sandboxes by this name."""
        self._opening: asyncio.Task[Workspaces] | None = None

    async def __call__(self, prompt: Prompt, context: EpisodeContext) -> list[Trajectory]:
        """Attempt the task of this prompt, and reward what was left."""
        task, chat = task_of(prompt, self.settings.tasks), context.chat
        workspaces = await self._workspaces()
        labels = {"task": task.id, "episode": f"{prompt.id}/{context.sample_index}"}
        if (kept := chat.marks.get(LEFT)) is None:
            left = await self._left(workspaces, task, prompt, context, labels)
            chat.mark(LEFT, packed(left))
        else:  # an earlier worker died while it was graded
            left = unpacked(kept)
        _note_once(chat, {"kind": "end", "how": str(left.end)})
        _note_once(chat, {"kind": "patch", "patch": left.patch})
        if (noted := _noted(chat, GRADE)) is not None:  # before an earlier worker died
            found = grade_of(noted)
        elif left.refused is None:
            found = await self.grade(workspaces, task, left)
        else:
            found = Grade(score=0.0, resolved=False, refused=left.refused)
        _note_once(chat, {"kind": GRADE, **graded(found)})
        counted(left.end, found)
        chat.rewarded(found.score)
        return chat.finish()

    async def grade(self, workspaces: Workspaces, task: CodingTask, left: WorkLeft) -> Grade:
        """The grade of what an agent left. A subclass may give another one."""
        return await grade(workspaces, task, left.patch, left.artifacts)

    async def _left(
        self,
        workspaces: Workspaces,
        task: CodingTask,
        prompt: Prompt,
        context: EpisodeContext,
        labels: Mapping[str, str],
    ) -> WorkLeft:
        """Let the agent work until it submits or a limit ends it."""
        settings = self.settings
        seconds = settings.agent_seconds if settings.agent_seconds is not None else task.seconds.agent
        async with HeldSandbox(workspaces, task, context.chat, labels) as held:
            try:
                used = max(held.used_before, seconds_since_start(context.chat))
                async with asyncio.timeout(seconds - used) as limit:
                    end = await self.work(workspaces, task, prompt, context, held)
            except TimeoutError:
                if not limit.expired():
                    raise
                if held.behind is not None:  # its files are not the agent's
                    raise held.behind from None
                end = End.SECONDS
            if end is not End.SUBMITTED and settings.cut_off == "reward":
                raise EpisodeTimeout(f"the attempt at {task.id} ended by its limit: {end}")
            try:
                patch = await workspaces.patch(task, held.sandbox)
                return WorkLeft(end, patch, None, await workspaces.artifacts(task, held.sandbox))
            except PatchProblem as error:  # the agent's fault
                return WorkLeft(end, "", str(error), [])

    async def work(
        self, workspaces: Workspaces, task: CodingTask, prompt: Prompt, context: EpisodeContext, held: HeldSandbox
    ) -> End:
        """The agent's work in this sandbox."""
        settings, chat, workdir = self.settings, context.chat, task.workdir
        if settings.agent == "program":
            return await by_program(prompt, context.endpoint, held, workdir, settings, chat)
        async with workspaces.clean(task) as clean:
            changes = FileChanges(held.sandbox, workdir, clean.tree) if settings.changes else None
            agent = by_tools if settings.agent == "tools" else by_text
            async with Tools(held.sandbox, workdir, settings, chat.note, changes) as tools:
                calls = Calls(tools, held, chat, settings.snapshot_every)
                end = await agent(prompt.messages, chat, calls, settings, workdir)
                await calls.catch_up()
                return end

    async def _workspaces(self) -> Workspaces:
        died = self._opening if self._opening is not None and _has_died(self._opening) else None
        if self._opening is None or died is not None:
            self._opening = asyncio.create_task(self._open())
        if died is not None:
            await _close(died.result())
        opening = self._opening
        try:
            return await asyncio.shield(opening)
        except Exception:
            if self._opening is opening:
                self._opening = None  # the next episode tries again
            raise

    async def _open(self) -> Workspaces:
        host = await open_host(self._sandboxes, shared=self.run)
        settings = self.settings
        return Workspaces(host, self._sandboxes, kept=settings.kept_tasks, user=settings.user, files=settings.files)

    async def close(self) -> None:
        """End all sandboxes."""
        if self._opening is not None:
            opening, self._opening = self._opening, None
            await _close(await opening)


def _has_died(opening: asyncio.Task[Workspaces]) -> bool:
    """Whether a host was open, and its server has ended."""
    return opening.done() and not opening.cancelled() and not opening.exception() and not opening.result().host.alive()


async def _close(workspaces: Workspaces) -> None:
    await workspaces.close()
    await workspaces.host.close()


def _note_once(chat: Chat, note: Mapping[str, Any]) -> None:
    """Note what an earlier worker may have noted already."""
    if _noted(chat, note["kind"]) is None:
        chat.note(note)


def _noted(chat: Chat, kind: str) -> Mapping[str, Any] | None:
    """The note of this kind; None if there is none."""
    return next((one for one in chat.notes if one.get("kind") == kind), None)


def counted(end: End, found: Grade) -> None:
    """Count how the attempt ended, in the run's metrics."""
    count(f"coding/ended_by_{end}")
    count("coding/resolved", int(found.resolved))
    count("coding/cheated", int(found.cheated is not None))
    count("coding/refused_patches", int(found.refused is not None))


def graded(found: Grade) -> Mapping[str, Any]:
    """A grade as JSON, without what is absent."""
    return {key: value for key, value in asdict(found).items() if value not in (None, "", {})}


def grade_of(note: Mapping[str, Any]) -> Grade:
    """The grade of its note."""
    return Grade(**{one.name: note[one.name] for one in fields(Grade) if one.name in note})
