"""A task can be used if its solution scores 1.0 and no change scores 0.0, each time."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from apps.coding.tasks.validation import Attempt, SolutionFailed, Verdict, solution_of, validate
from goaly.coding.task_files import TaskFile, TaskSettings, load
from goaly.coding.workspace import Workspaces
from goaly.grading.task import CodingTask, Grade, GradingFailed
from goaly.sandboxes.contract import SandboxDied
from tests.unit.grading.harbor_folders import CONFIG, write_harbor
from tests.unit.grading.own_folders import SOLUTION, write_own


def score(value: float, **more: object) -> Grade:
    return Grade(score=value, resolved=value == 1.0, **more)  # type: ignore[arg-type]


async def verdict(workspaces: Workspaces, tasks: TaskFile, judged: Callable[[int, Attempt], Grade]) -> str | None:
    """What is wrong with the only task, if its attempts get these grades; the first argument counts like attempts."""
    seen: Counter[bool] = Counter()

    async def grade(task: CodingTask, attempt: Attempt) -> Grade:
        seen[bool(attempt.patch)] += 1
        return judged(seen[bool(attempt.patch)], attempt)

    (found,) = await validate(tasks, workspaces, grade, jobs=2, times=3)
    if found.wrong is None:
        assert seen == {True: 3, False: 3}
    return found.wrong


async def test_each_way_to_be_wrong_is_one_sentence(workspaces: Workspaces, tmp_path: Path) -> None:
    def good(number: int, attempt: Attempt) -> Grade:
        return score(1.0 if attempt.patch == SOLUTION else 0.0)

    def without(number: int, attempt: Attempt) -> Grade:
        return score(1.0 if attempt.patch or number == 2 else 0.0)

    def flaky(number: int, attempt: Attempt) -> Grade:
        failed = {f"test_{n}": "failed" for n in range(5)}
        return score(0.5, outcomes=failed) if attempt.patch and number == 3 else good(number, attempt)

    def dead(number: int, attempt: Attempt) -> Grade:
        raise SandboxDied("its server ended")

    def ungraded(number: int, attempt: Attempt) -> Grade:
        raise GradingFailed("no report")

    def cheats(number: int, attempt: Attempt) -> Grade:
        return score(0.0, cheated="a canary passed")

    tasks = load(write_own(tmp_path / "own"))
    assert await verdict(workspaces, tasks, good) is None
    assert await verdict(workspaces, tasks, without) == "no change scores 1, must be 0 (time 2 of 3)"
    more = "test_0 failed, test_1 failed, test_2 failed and 2 more"
    assert await verdict(workspaces, tasks, flaky) == f"the solution scores 0.5, must be 1 (time 3 of 3): {more}"
    assert await verdict(workspaces, tasks, dead) == "could not be graded: its server ended"
    assert await verdict(workspaces, tasks, ungraded) == "could not be graded: no report"
    assert "it counts as cheated: a canary passed" in str(await verdict(workspaces, tasks, cheats))
    (tmp_path / "own/solution.patch").unlink()
    assert "has no solution" in str(await verdict(workspaces, tasks, good))
    (tmp_path / "own/problem.md").write_text("twice")
    assert "give the problem once" in str(await verdict(workspaces, tasks, good))


async def test_verdicts_come_in_the_order_of_the_tasks_and_each_is_reported(
    workspaces: Workspaces, tmp_path: Path
) -> None:
    for name in ("b", "a", "c"):
        write_own(tmp_path / name)
    reported: list[Verdict] = []

    async def grade(task: CodingTask, attempt: Attempt) -> Grade:
        return score(1.0 if attempt.patch and task.id != "b" else 0.0)

    found = await validate(load(tmp_path), workspaces, grade, jobs=3, times=1, report=reported.append)
    assert [(one.id, one.wrong is None) for one in found] == [("a", True), ("b", False), ("c", True)]
    assert sorted(one.id for one in reported) == ["a", "b", "c"]


async def test_the_solution_of_a_script_is_what_it_changes(workspaces: Workspaces, tmp_path: Path) -> None:
    config = CONFIG.replace('["/var/out", { source = "notes.txt" }]', '["/tmp/out"]')
    script = '#!/bin/sh\ncp /solution/notes.md /tmp/out && echo "$ANSWER" > answer.txt\n'
    write_harbor(tmp_path, task_toml=config, solution__solve_sh=script)
    attempt = await solution_of(load(tmp_path, TaskSettings(root="/"))[0], workspaces)
    assert "+++ b/answer.txt" in attempt.patch
    assert "+it's 3" in attempt.patch
    assert [(entry.path, entry.contents) for entry in attempt.artifacts] == [("tmp/out", b"count\n")]


async def test_a_script_that_fails_is_named_with_what_it_said(workspaces: Workspaces, tmp_path: Path) -> None:
    write_harbor(tmp_path, solution__solve_sh="echo no way >&2; exit 3\n")
    with pytest.raises(SolutionFailed, match="the script of its solution ended with 3: no way"):
        await solution_of(load(tmp_path, TaskSettings(root="/"))[0], workspaces)
