"""Judges a patch in a fresh sandbox: only the patch goes over the clean files; tests and their settings are the task's.

grading-2: what could not be judged raises GradingFailed. It is never a grade of 0.
"""

from __future__ import annotations

import errno
import json
import math
import secrets
import shlex
from collections.abc import Mapping, Sequence
from random import Random, SystemRandom
from typing import Final

from goaly.grading.file_tree import LINK, PLAIN, File
from goaly.grading.patch_reader import PatchProblem
from goaly.grading.preparation import CleanState
from goaly.grading.published_ids import DJANGO_TESTS
from goaly.grading.python_with_pytest import RUNNER
from goaly.grading.suite_files import suite_files
from goaly.grading.suite_report import SuiteRun, judged, read_report
from goaly.grading.task import CodingTask, Grade, GradingFailed, Runner, TestScript, TestSuite
from goaly.sandboxes.contract import CommandResult, Entry
from goaly.sandboxes.sandbox import Sandbox

LOG_BYTES: Final = 65_536
REPORT_BYTES: Final = 1 << 22
NO_PLACE_FOR_A_FILE: Final = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG)
SUITE_ENVIRONMENT: Final = {
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
}


class Grader:
    """One sandbox in the clean state of a task, in which a patch is judged; it serves once."""

    def __init__(self, sandbox: Sandbox, task: CodingTask, clean: CleanState, tester: int) -> None:
        """`tester` is the user of hidden tests that are a suite."""
        self.sandbox = sandbox
        self.task = task
        self.clean = clean
        self.tester = tester

    async def grade(self, changed: Mapping[str, File | None], artifacts: Sequence[Entry] = ()) -> Grade:
        """How the task's tests end over these changes of the clean files; None is a deleted file."""
        await self.sandbox.upload(artifacts, "/", user=self.clean.spec.user)
        if isinstance(self.task.tests, TestSuite):
            return await self.suite(self.task.tests, changed)
        return await self.script(self.task.tests, changed)

    async def lay(self, changes: Mapping[str, File | None]) -> None:
        """Bring the changed files over the clean ones."""
        tree, user, workdir = self.clean.tree, self.clean.spec.user, self.task.workdir
        gone = {path for path, file in changes.items() if path in tree and (file is None or _is_link(file, tree[path]))}
        if gone:
            left = {path for path in {*tree, *changes} if path not in changes or changes[path] is not None}
            folders = {"/".join(path.split("/")[:n]) for path in left for n in range(1, path.count("/") + 1)}
            above = {"/".join(path.split("/")[:n]) for path in gone for n in range(1, path.count("/") + 1)}
            gone |= above - folders
            names = "\0".join(sorted(gone)).encode(errors="surrogateescape")
            removed = await self.sandbox.run(["xargs", "-0", "rm", "-rf", "--"], stdin=names, cwd=workdir, user=user)
            if not removed.ok:
                raise GradingFailed(f"task {self.task.id}: removing files: {removed.stderr.text()}")
        entries = [file.entry(path) for path, file in changes.items() if file is not None]
        try:
            await self.sandbox.upload(entries, workdir, user=user)
        except OSError as error:
            if error.errno in NO_PLACE_FOR_A_FILE:
                raise PatchProblem(f"a file cannot be written where the patch has it: {error.strerror}") from None
            raise

    async def suite(self, suite: TestSuite, changed: Mapping[str, File | None]) -> Grade:
        """Run the suite as another user than the owner of the files."""
        tools, workdir = self.clean.tools, self.task.workdir
        python = tools.python if suite.runner == "pytest" else tools.own_python
        if python is None:
            raise GradingFailed(f"task {self.task.id}: its sandbox has no Python")
        files = suite_files(self.clean.tree, changed, suite, Random(SystemRandom().getrandbits(64)))
        settings = f".pytest-{secrets.token_hex(8)}.ini"
        await self.lay({**files.changes, settings: File(PLAIN, files.settings.encode())})
        run = SuiteRun(ids=files.ids, canaries=files.canaries, runner=suite.runner)
        environment = {**self.clean.spec.environment, **SUITE_ENVIRONMENT}
        job = run.job(
            workdir=workdir,
            files=files.test_files,
            own_files=files.own_files,
            settings=settings,
            paths=_paths(suite.runner, workdir, environment.get("PYTHONPATH", "")),
            plugins=tools.plugins,
            pytest_settings=files.settings,
        )
        result = await self.run([python, "-I", "-B", RUNNER], job, environment, self.tester)
        report = read_report(run, result)
        outcomes, resolved = judged(suite, run, report)
        return Grade(
            score=float(resolved),
            resolved=resolved,
            outcomes=outcomes,
            cheated=report.cheated,
            log=_log(result),
        )

    async def script(self, tests: TestScript, changed: Mapping[str, File | None]) -> Grade:
        """Run the script and read its reward."""
        await self.lay(changed)
        rewards = shlex.quote(tests.rewards)
        await self.sandbox.run(f"rm -rf {rewards}", cwd="/")  # what the agent left belongs to its user
        made = await self.sandbox.run(f"rm -rf {rewards} && mkdir -p {rewards}", cwd="/", user=0)
        if not made.ok:
            raise GradingFailed(f"task {self.task.id}: making {tests.rewards}: {made.stderr.text()}")
        entries = [Entry(path=path, contents=contents, mode=0o755) for path, contents in tests.files.items()]
        await self.sandbox.upload(entries, tests.folder, user=0)
        environment = {**self.clean.spec.environment, **tests.environment}
        result = await self.run(["/bin/sh", "-c", tests.command], b"", environment, 0)
        if result.limit is not None:
            return Grade(score=0.0, resolved=False, log=_log(result))
        found = await self._rewards(tests.rewards)
        score = found.get("reward", next(iter(found.values())) if len(found) == 1 else None)
        if score is None:
            raise GradingFailed(f"task {self.task.id}: reward.json has {sorted(found)}: must have `reward`")
        return Grade(score=score, resolved=score >= 1.0, rewards=found, log=_log(result))

    async def run(self, words: Sequence[str], stdin: bytes, environment: Mapping[str, str], user: int) -> CommandResult:
        return await self.sandbox.run(
            words,
            stdin=stdin,
            cwd=self.task.workdir,
            env=environment,
            user=user,
            seconds=self.task.seconds.grading,
            output_bytes=REPORT_BYTES,
        )

    async def _rewards(self, folder: str) -> dict[str, float]:
        for name in ("reward.json", "reward.txt"):
            try:
                text = (await self.sandbox.read(f"{folder}/{name}", most_bytes=1 << 20)).decode()
                found = json.loads(text) if name == "reward.json" else {"reward": float(text)}
            except FileNotFoundError:
                continue
            except (ValueError, IsADirectoryError) as error:
                raise GradingFailed(f"task {self.task.id}: {folder}/{name} cannot be read: {error}") from None
            if not isinstance(found, dict) or not found or not all(map(_is_number, found.values())):
                raise GradingFailed(f"task {self.task.id}: {folder}/{name} is {text!r}: must be finite numbers")
            return {key: float(value) for key, value in found.items()}
        raise GradingFailed(f"task {self.task.id}: its tests wrote neither reward.json nor reward.txt to {folder}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_link(new: File, old: File) -> bool:
    """Whether a file replaces a link, or a link a file: neither is written over the other."""
    return LINK in (new.mode, old.mode)


def _paths(runner: Runner, workdir: str, python_path: str) -> list[str]:
    """Folders of modules, as `python -m pytest` or the script of a suite has them."""
    given = [one if one.startswith("/") else f"{workdir}/{one}" for one in python_path.split(":") if one]
    return [*([f"{workdir}/{DJANGO_TESTS}"] if runner == "django" else []), *given, workdir]


def _log(result: CommandResult) -> str:
    limit = f"\n[the tests exceeded their limit of {result.limit}]" if result.limit else ""
    text = result.stderr.text()
    if len(text) > LOG_BYTES:
        text = f"{text[: LOG_BYTES // 2]}\n[... cut ...]\n{text[-LOG_BYTES // 2 :]}"
    return text + limit
