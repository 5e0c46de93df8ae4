"""Whether tasks can be used: the known solution scores 1.0 each time, and no change scores 0.0 each time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from goaly.coding.task_files import TaskFile
from goaly.coding.workspace import Workspaces
from goaly.grading.patch_reader import PatchProblem
from goaly.grading.task import CodingTask, Grade, GradingFailed, TaskProblem, TestScript
from goaly.sandboxes.contract import Entry, SandboxError

T = TypeVar("T")

SHOWN_TESTS = 3
SHOWN_CHARACTERS = 300
SOLUTION = "/solution"


@dataclass(frozen=True, slots=True)
class Attempt:
    """The patch and the artifacts that go over to grading."""

    patch: str
    artifacts: Sequence[Entry] = ()


NO_CHANGE = Attempt("")
Grader = Callable[[CodingTask, Attempt], Awaitable[Grade]]


class SolutionFailed(RuntimeError):
    """The known solution of a task could not be made; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a task can be used."""

    id: str
    wrong: str | None
    """Why it cannot be used; None if it can."""
    seconds: float


async def validate(
    tasks: TaskFile,
    workspaces: Workspaces,
    grade: Grader,
    *,
    jobs: int,
    times: int,
    report: Callable[[Verdict], object] = lambda verdict: None,
) -> list[Verdict]:
    """The verdicts on all tasks, in their order, with `jobs` tasks at once. `report` gets each when it is known."""
    found: dict[str, Verdict] = {}

    async def one(id: str) -> None:
        start = time.monotonic()
        wrong = await why_unusable(tasks, id, workspaces, grade, times)
        found[id] = Verdict(id=id, wrong=wrong, seconds=time.monotonic() - start)
        report(found[id])

    await at_once(tasks.places, one, jobs)
    return [found[id] for id in tasks.places]


async def at_once(values: Iterable[T], work: Callable[[T], Awaitable[None]], jobs: int) -> None:
    """Do the work on each value, on `jobs` of them at once."""
    left = iter(values)

    async def worker() -> None:
        for value in left:
            await work(value)

    async with asyncio.TaskGroup() as group:
        for _ in range(jobs):
            group.create_task(worker())


async def why_unusable(tasks: TaskFile, id: str, workspaces: Workspaces, grade: Grader, times: int) -> str | None:
    """Why a task cannot be used, in one sentence; None if it can."""
    try:
        task = await asyncio.to_thread(tasks.task, id)
        if task.solution is None:
            return "has no solution, so nothing shows that it can be solved"
        for number in range(1, times + 1):
            without = await grade(task, NO_CHANGE)
            if without.score != 0.0:
                return f"no change scores {without.score:g}, must be 0 (time {number} of {times})"
            solved = await grade(task, await solution_of(task, workspaces))
            if solved.score != 1.0:
                why = reason_of(solved)
                return f"the solution scores {solved.score:g}, must be 1 (time {number} of {times}): {why}"
    except (TaskProblem, SolutionFailed, PatchProblem) as error:
        return _short(error)
    except (GradingFailed, SandboxError) as error:
        return f"could not be graded: {_short(error)}"
    return None


async def solution_of(task: CodingTask, workspaces: Workspaces) -> Attempt:
    """The known solution: its patch, or what its script does in a sandbox."""
    if task.solution is None:
        raise SolutionFailed("has no solution")
    if not isinstance(task.tests, TestScript):
        return Attempt(task.solution)
    files = {**task.solution_files, "solve.sh": task.solution.encode()}
    sandbox = await workspaces.start(task)
    try:
        entries = [Entry(path=path, contents=contents, mode=0o755) for path, contents in files.items()]
        await sandbox.upload(entries, SOLUTION, user=0)
        result = await sandbox.run(["bash", f"{SOLUTION}/solve.sh"], cwd=task.workdir, seconds=task.seconds.agent)
        if not result.ok:
            ended = f"reached its limit of {result.limit}" if result.limit else f"ended with {result.exit_code}"
            said = (result.stderr.text() or result.stdout.text()).strip()
            raise SolutionFailed(f"the script of its solution {ended}: {said[-SHOWN_CHARACTERS:]}")
        return Attempt(await workspaces.patch(task, sandbox), await workspaces.artifacts(task, sandbox))
    finally:
        await sandbox.stop()


def reason_of(grade: Grade) -> str:
    """Why a grade is below 1, in a few words."""
    if grade.cheated is not None:
        return f"it counts as cheated: {grade.cheated}"
    if grade.refused is not None:
        return f"its patch was refused: {grade.refused}"
    failed = [f"{test} {outcome}" for test, outcome in grade.outcomes.items() if outcome != "passed"]
    if failed and set(grade.outcomes.values()) != {"missing"}:
        more = f" and {len(failed) - SHOWN_TESTS} more" if len(failed) > SHOWN_TESTS else ""
        return ", ".join(failed[:SHOWN_TESTS]) + more
    return f"no test ran: {_short(grade.log)}" if failed else _short(grade.log) or "its tests say no more"


def _short(text: object) -> str:
    """The end of a text in one line."""
    words = " ".join(str(text).split())
    return words if len(words) <= SHOWN_CHARACTERS else f"... {words[-SHOWN_CHARACTERS:]}"
