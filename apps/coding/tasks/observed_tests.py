"""Which tests a task's solution makes pass, and which pass without it, too: the ids for our own form's `task.toml`.

All tests of the repository run, with the hidden ones laid over it. Nothing is hidden from the tests here and nothing is
guarded: a task's author runs their own code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Final

from goaly.coding.workspace import Workspaces
from goaly.grading.patch_apply import apply_patch
from goaly.grading.patch_reader import read_patch
from goaly.grading.task import CodingTask, TaskProblem, TestSuite
from goaly.sandboxes.contract import Entry

FOLDER: Final = "/tmp/goaly_observed"
PLUGIN: Final = "goaly_observed"
PLUGIN_SOURCE: Final = f"""
import json

seen = {{}}

def pytest_runtest_logreport(report):
    if report.outcome != "passed" or report.when == "call":
        if seen.get(report.nodeid, "passed") == "passed":
            seen[report.nodeid] = report.outcome

def pytest_sessionfinish():
    with open("{FOLDER}/seen.json", "w") as file:
        json.dump(seen, file)
"""
SHOWN_CHARACTERS: Final = 300
KEYS: Final = ("fail_to_pass", "pass_to_pass")
_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'|#[^\n]*|.', re.DOTALL)
"""A string, a comment, or one character of TOML."""


async def observed_tests(task: CodingTask, workspaces: Workspaces, times: int) -> tuple[tuple[str, ...], ...]:
    """The ids that fail without the solution and pass with it, and those that pass in both: each of `times` times."""
    if task.solution is None or not isinstance(task.tests, TestSuite):
        raise TaskProblem(f"task {task.id}: test ids are found by its solution.patch, which it lacks")
    with_it = [await _outcomes(task, workspaces, task.solution) for _ in range(times)]
    without = [await _outcomes(task, workspaces, "") for _ in range(times)]
    passing = [test for test in with_it[0] if all(run.get(test) == "passed" for run in with_it)]
    fail_to_pass = tuple(test for test in passing if all(run.get(test) != "passed" for run in without))
    pass_to_pass = tuple(test for test in passing if all(run.get(test) == "passed" for run in without))
    if not fail_to_pass:
        raise TaskProblem(f"task {task.id}: no test fails without its solution and passes with it")
    return fail_to_pass, pass_to_pass


async def _outcomes(task: CodingTask, workspaces: Workspaces, patch: str) -> Mapping[str, str]:
    """How each test ends with this patch, by its id."""
    assert isinstance(task.tests, TestSuite)
    async with workspaces.clean(task) as clean:
        changed = apply_patch(clean.tree, read_patch(patch)) if patch else {}
        python = clean.tools.python
    entries = [file.entry(path) for path, file in changed.items() if file is not None]
    entries += [Entry(path=path, contents=contents) for path, contents in task.tests.files.items()]
    sandbox = await workspaces.start(task)
    try:
        if gone := [path for path, file in changed.items() if file is None]:
            await sandbox.run(["rm", "-f", "--", *gone])
        await sandbox.upload(entries, task.workdir)
        await sandbox.upload([Entry(path=f"{PLUGIN}.py", contents=PLUGIN_SOURCE.encode())], FOLDER)
        result = await sandbox.run(
            [python or "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", PLUGIN],
            env={"PYTHONPATH": FOLDER, "PYTHONDONTWRITEBYTECODE": "1"},
            seconds=task.seconds.grading,
        )
        try:
            return json.loads(await sandbox.read(f"{FOLDER}/seen.json"))
        except FileNotFoundError:
            said = " ".join((result.stderr.text() or result.stdout.text()).split())[-SHOWN_CHARACTERS:]
            raise TaskProblem(f"task {task.id}: its tests did not run to their end: {said}") from None
    finally:
        await sandbox.stop()


def with_ids(toml: str, fail_to_pass: Sequence[str], pass_to_pass: Sequence[str]) -> str:
    """The text of a `task.toml` with these ids in place of those that it has; the rest stays as it is."""
    for key, ids in zip(KEYS, (fail_to_pass, pass_to_pass), strict=True):
        listed = "".join(f"  {json.dumps(one, ensure_ascii=False)},\n" for one in ids)
        line = f"{key} = [\n{listed}]" if ids else f"{key} = []"
        if (old := re.search(rf"^{key}\s*=\s*", toml, re.MULTILINE)) is not None:
            toml = toml[: old.start()] + line + toml[_end_of_list(toml, old.end()) :]
        else:
            head = re.search(r"^\[task\][^\n]*\n", f"{toml}\n", re.MULTILINE)
            at = head.end() if head is not None else 0
            toml = f"{toml[:at]}{line}\n{toml[at:]}" if head is not None else f"[task]\n{line}\n{toml}"
    return toml


def _end_of_list(toml: str, start: int) -> int:
    """The place behind the list that begins here."""
    depth = 0
    for token in _TOKEN.finditer(toml, start):
        depth += {"[": 1, "]": -1}.get(token[0], 0)
        if depth == 0:
            return token.end()
    return len(toml)
