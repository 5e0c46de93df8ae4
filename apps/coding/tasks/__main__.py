"""Checks coding tasks, lists them, and grades the patches of any agent.

    python -m apps.coding.tasks validate PATH [--jobs N] [--times N] [--json FILE] [--keep FILE] [--write]
    python -m apps.coding.tasks list PATH [--keep FILE]
    python -m apps.coding.tasks grade PATH PREDICTIONS [--jobs N] [--json FILE]

PATH is a JSONL or Parquet file of SWE-bench's form, a task's folder of Harbor's form or of our own, or a folder of such
folders. `validate` tries the known solution and no change three times each: a task can be used if the one scores 1.0
and the other 0.0 every time. `list` only reads the tasks. `--keep` writes a file of the tasks that can be used, which
is a PATH again. `grade` reads predictions in SWE-bench's form. Settings of a run follow as KEY=VALUE, such as
`sandbox.backend=containers` and `coding.tasks.swe.image=...`.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from goaly.base.atomic_files import put_file, writing
from goaly.base.config import load as load_config
from goaly.base.config.settings import Settings
from goaly.base.errors import ConfigError
from goaly.coding.predictions import PredictionProblem, read_predictions
from goaly.coding.task_files import TaskFile, TaskSettings, kept_lines, load
from goaly.grading.harbor_format import CONFIG, is_harbor
from goaly.grading.task import CodingTask, GradingFailed, TaskProblem, TestScript
from goaly.grading.task_folder import read_task
from goaly.sandboxes.contract import SandboxError
from goaly.sandboxes.settings import SandboxSettings

if TYPE_CHECKING:
    from apps.coding.tasks.validation import Grader, Verdict
    from goaly.coding.workspace import Workspaces

TIMES = 3
PROG = "python -m apps.coding.tasks"


class TasksSection(Settings):
    """Of the section `coding` of a run, what is about tasks."""

    tasks: TaskSettings = field(default_factory=TaskSettings)
    """Where the repositories of tasks come from."""


class TasksConfig(Settings):
    """The settings of these commands, which a run has, too."""

    coding: TasksSection = field(default_factory=TasksSection)
    """The tasks."""
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    """The sandboxes in which tasks are tried."""


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    head, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(prog=PROG, description=head, epilog=rest.rpartition("\n\n")[2], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="validate|list|grade")
    path = argparse.ArgumentParser(add_help=False)
    path.add_argument("path", metavar="PATH", help="a file or a folder of tasks")
    keep = argparse.ArgumentParser(add_help=False)
    keep.add_argument("--keep", type=Path, metavar="FILE", help="write the tasks that can be used to this JSONL file")
    tried = argparse.ArgumentParser(add_help=False)
    tried.add_argument("--jobs", type=_count, default=2, metavar="N", help="tasks that are tried at once (2)")
    tried.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    validate = commands.add_parser("validate", parents=[path, tried, keep], help="try the solution, and no change")
    validate.add_argument("--times", type=_count, default=TIMES, metavar="N", help=f"attempts of each kind ({TIMES})")
    validate.add_argument("--write", action="store_true", help="of our own folders: write the test ids into task.toml")
    commands.add_parser("list", parents=[path, keep], help="a line for each task")
    grade = commands.add_parser("grade", parents=[path, tried], help="grade the patches of any agent")
    grade.add_argument("predictions", type=Path, metavar="PREDICTIONS", help="a JSONL file of SWE-bench's form")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of at least 1")
    return int(text)


def main(argv: Sequence[str]) -> int:
    """The exit code: 1 if a task cannot be used or could not be graded, 2 if the command cannot run."""
    parser = arguments()
    line, overrides = parser.parse_known_args(argv)
    if unknown := [word for word in overrides if word.startswith("-") or "=" not in word]:
        parser.error(f"{unknown[0]}: no such option; settings are KEY=VALUE")
    try:
        config = load_config(TasksConfig, overrides, prog=PROG, description="").config
        tasks = load(line.path, config.coding.tasks)
        if line.command == "list":
            return list_tasks(tasks, line.keep)
        if line.command == "grade":
            return asyncio.run(grade_predictions(tasks, line, config))
        return asyncio.run(validate_tasks(tasks, line, config))
    except (TaskProblem, PredictionProblem, ConfigError, SandboxError) as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 2


def list_tasks(tasks: TaskFile, keep: Path | None) -> int:
    """Print a line for each task; 1 if one cannot be used."""
    good = []
    for id in tasks.places:
        try:
            print(_line(tasks.task(id)))
            good.append(id)
        except TaskProblem as problem:
            print(f"{id}  cannot be used: {problem}")
    print(f"{len(good)} of {len(tasks)} tasks can be used")
    _keep(tasks, good, keep)
    return 0 if len(good) == len(tasks) else 1


def _line(task: CodingTask) -> str:
    if isinstance(task.tests, TestScript):
        tests = "a script"
    else:
        tests = f"{len(task.tests.fail_to_pass)} tests to pass, {len(task.tests.pass_to_pass)} to keep"
    where = task.image or task.root or "sandbox.root"
    return f"{task.id}  {tests}; in {where}{'' if task.solution is not None else '; no solution'}"


async def validate_tasks(tasks: TaskFile, line: argparse.Namespace, config: TasksConfig) -> int:
    """Try each task, print its verdict, and write what the options ask for."""
    from apps.coding.tasks.validation import validate

    def show(verdict: "Verdict") -> None:
        said = "can be used" if verdict.wrong is None else f"left out: {verdict.wrong}"
        print(f"{verdict.id}  {said}  ({verdict.seconds:.1f} s)", flush=True)

    if line.write:
        async with _grading(config) as (workspaces, _):
            await write_ids(tasks, workspaces, line.times)
    async with _grading(config) as (workspaces, grade):
        verdicts = await validate(tasks, workspaces, grade, jobs=line.jobs, times=line.times, report=show)
    good = [verdict.id for verdict in verdicts if verdict.wrong is None]
    print(f"{len(good)} of {len(tasks)} tasks can be used")
    _keep(tasks, good, line.keep)
    _write_json(line.json, {verdict.id: {"wrong": verdict.wrong, "seconds": verdict.seconds} for verdict in verdicts})
    return 0 if len(good) == len(tasks) else 1


async def write_ids(tasks: TaskFile, workspaces: "Workspaces", times: int) -> None:
    """Write the ids of the tests that each task's solution makes pass, and of those that it keeps, into its folder."""
    from apps.coding.tasks.observed_tests import observed_tests, with_ids

    for id, place in tasks.places.items():
        folder = Path(place.path)
        if place.row is not None or is_harbor(folder):
            raise TaskProblem(f"{place}: --write is for tasks of our own form; {id} names its tests already")
        found = await observed_tests(read_task(folder, without_ids=True), workspaces, times)
        file = folder / CONFIG
        file.write_text(with_ids(file.read_text(encoding="utf-8"), *found), encoding="utf-8")
        print(f"{id}  {len(found[0])} tests to pass, {len(found[1])} to keep, written to {file}", flush=True)


async def grade_predictions(tasks: TaskFile, line: argparse.Namespace, config: TasksConfig) -> int:
    """Grade each prediction, print what became of it, and write a report in SWE-bench's form."""
    from apps.coding.tasks.validation import Attempt, at_once, reason_of

    predictions = read_predictions(line.predictions)
    if unknown := [id for id in predictions if id not in tasks.places]:
        raise TaskProblem(f"{line.predictions}: {unknown[0]} is no task of {line.path}")
    ids: dict[str, list[str]] = {name: [] for name in ("resolved", "unresolved", "empty_patch", "error")}

    async with _grading(config) as (_, grade):

        async def one(id: str) -> None:
            patch = predictions[id].model_patch
            try:
                found = None if not patch.strip() else await grade(tasks.task(id), Attempt(patch))
            except (TaskProblem, GradingFailed, SandboxError) as error:
                kind, said = "error", f"error: {error}"
            else:
                kind = "empty_patch" if found is None else "resolved" if found.resolved else "unresolved"
                said = {"empty_patch": "empty patch"}.get(kind, kind)
                said += f": {reason_of(found)}" if found is not None and not found.resolved else ""
            ids[kind].append(id)
            print(f"{id}  {said}", flush=True)

        await at_once(predictions, one, line.jobs)
    report = swe_bench_report(list(tasks.places), list(predictions), ids)
    for name, count in report.items():
        if isinstance(count, int) and name.endswith("_instances"):
            print(f"{name.removesuffix('_instances').replace('_', ' ')}: {count}")
    _write_json(line.json, report)
    return 1 if ids["error"] else 0


def swe_bench_report(
    tasks: Sequence[str], submitted: Sequence[str], ids: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """The report of a whole file of predictions, with the keys of SWE-bench's own."""
    completed = [*ids["resolved"], *ids["unresolved"]]
    parts = {
        "submitted": submitted,
        "completed": completed,
        **{name: ids[name] for name in ("resolved", "unresolved", "empty_patch", "error")},
        "incomplete": [id for id in tasks if id not in submitted],
    }
    counts = {f"{name}_instances": len(part) for name, part in parts.items() if name != "incomplete"}
    return {
        "total_instances": len(tasks),
        **counts,
        **{f"{name}_ids": sorted(part) for name, part in parts.items()},
        "schema_version": 2,
    }


@asynccontextmanager
async def _grading(config: TasksConfig) -> AsyncIterator[tuple["Workspaces", "Grader"]]:
    """Workspaces at the host of the settings, and the function that grades there."""
    from goaly.coding.grading import grade
    from goaly.coding.workspace import Workspaces
    from goaly.sandboxes.open_host import open_host

    host = await open_host(config.sandbox)
    try:
        workspaces = Workspaces(host, config.sandbox)
        try:
            yield workspaces, lambda task, attempt: grade(workspaces, task, attempt.patch, attempt.artifacts)
        finally:
            await workspaces.close()
    finally:
        await host.close()


def _keep(tasks: TaskFile, good: Sequence[str], file: Path | None) -> None:
    if file is not None:
        with writing("--keep"):
            put_file(file, kept_lines(tasks, good, file.parent).encode())


def _write_json(file: Path | None, content: Any) -> None:
    if file is not None:
        with writing("--json"):
            put_file(file, f"{json.dumps(content, indent=1)}\n".encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
