"""The grade of a patch: it is judged in a fresh sandbox of its task's clean state, never in the agent's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from goaly.coding.workspace import Workspaces
from goaly.grading.file_tree import File
from goaly.grading.grader import Grader
from goaly.grading.patch_apply import apply_patch
from goaly.grading.patch_reader import PatchProblem, read_patch
from goaly.grading.task import CodingTask, Grade, GradingFailed
from goaly.sandboxes.contract import Entry, SandboxError, SnapshotLost

MOST_PATCH_BYTES: Final = 1 << 20


async def grade(workspaces: Workspaces, task: CodingTask, patch: str, artifacts: Sequence[Entry] = ()) -> Grade:
    """How the tests of a task end with a patch; GradingFailed if that could not be found out."""
    began = time.monotonic()
    try:
        try:
            found = await _graded(workspaces, task, patch, artifacts)
        except SnapshotLost:  # the server of the clean state has ended: it is prepared again
            found = await _graded(workspaces, task, patch, artifacts)
    except PatchProblem as error:
        return Grade(score=0.0, resolved=False, refused=str(error), seconds=time.monotonic() - began)
    except (SandboxError, OSError) as error:
        raise GradingFailed(f"task {task.id}: {error}") from error
    return replace(found, seconds=time.monotonic() - began)


async def _graded(workspaces: Workspaces, task: CodingTask, patch: str, artifacts: Sequence[Entry]) -> Grade:
    async with workspaces.clean(task) as clean:
        changed = await asyncio.to_thread(_changed, clean.tree, patch)
        sandbox = await workspaces.host.start(clean.spec, origin=clean.snapshot)
        try:
            return await Grader(sandbox, task, clean, workspaces.tester).grade(changed, artifacts)
        finally:
            await sandbox.stop()


def _changed(tree: Mapping[str, File], patch: str) -> dict[str, File | None]:
    return apply_patch(tree, read_patch(patch, most_bytes=MOST_PATCH_BYTES))
