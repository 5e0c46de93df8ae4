"""The report of a suite: the job for the process in the sandbox, and what its lines mean on this side.

grading-1: a test counts as passed only if its line has the run's nonce, every canary of its file failed, and the
process ended as a run with failed tests does.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from goaly.grading.task import GradingFailed, Runner, TestSuite
from goaly.sandboxes.contract import CommandResult

TESTS_FAILED: Final = 1
INTERRUPTED: Final = 2
"""pytest's exit codes if tests failed, as the canaries must, or if the run was ended."""
SELDOM_NEEDED: Final = (
    *("pastebin", "junitxml", "doctest", "faulthandler", "stepwise", "setuponly", "setupplan"),
    *("unraisableexception", "threadexception"),
)
"""pytest's own plugins that cost a quarter of its start; they are loaded if the settings name them."""
BEST_FIRST: Final = ("passed", "xfailed", "skipped", "missing", "failed", "error")
ENOUGH_TO_FIX: Final = ("passed", "xfailed")
ENOUGH_TO_KEEP: Final = ("passed", "xfailed", "skipped")


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRun:
    """One run of a suite: what the process gets to know, and which of its tests must fail."""

    ids: Mapping[str, Sequence[str]]
    """The ids in the report of each expected test, by its published id."""
    canaries: Mapping[str, str]
    """The id of a canary by its file."""
    runner: Runner = "pytest"
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))

    def job(
        self,
        *,
        workdir: str,
        files: Sequence[str],
        own_files: Sequence[str],
        settings: str,
        paths: Sequence[str],
        plugins: Sequence[str],
        pytest_settings: str,
    ) -> bytes:
        """The runner's input, without a clue which tests are canaries."""
        wanted = {*(one for found in self.ids.values() for one in found), *self.canaries.values()}
        job: dict[str, Any] = {
            "runner": self.runner,
            "nonce": self.nonce,
            "workdir": workdir,
            "wanted": sorted(wanted),
            "own_files": list(own_files),
            "paths": list(paths),
            "files": list(files),
        }
        if self.runner == "pytest":
            arguments = ["-c", settings, f"--rootdir={workdir}", f"--confcutdir={workdir}", "-p", "no:cacheprovider"]
            arguments += ["--continue-on-collection-errors", "--maxfail=0", "-q", "--tb=short", "--color=no"]
            for plugin in plugins:
                arguments += ["-p", plugin]
            for plugin in SELDOM_NEEDED:
                arguments += [] if plugin[:8] in pytest_settings.lower() else ["-p", f"no:{plugin}"]
            job |= {"wanted": sorted(set(map(_base, wanted))), "arguments": [*arguments, "--", *files]}
        return json.dumps(job).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteReport:
    """The outcome of each test."""

    outcomes: Mapping[str, str]
    cheated: str | None
    complete: bool
    """Whether the run came to its end."""


def read_report(run: SuiteRun, result: CommandResult) -> SuiteReport:
    """The report of a run that has ended; GradingFailed if it could not begin."""
    outcomes: dict[str, str] = {}
    notes: dict[str, str] = {}
    head = f"{run.nonce} "
    for line in result.stdout.text().split("\n"):
        word, _, text = line.removeprefix(head).partition(" ")
        if not line.startswith(head):
            continue
        if word in BEST_FIRST:
            outcomes[text] = max(word, outcomes.get(text, "passed"), key=BEST_FIRST.index)
        else:
            notes.setdefault(word, text)
    if "begin" not in notes:
        raise GradingFailed(f"the tests could not begin: exit code {result.exit_code}: {result.stderr.text()[-2000:]}")
    complete = notes.get("end") == str(result.exit_code) and not result.stdout.omitted
    return SuiteReport(outcomes=outcomes, cheated=_cheat(run, result, outcomes, notes), complete=complete)


def _cheat(run: SuiteRun, result: CommandResult, outcomes: Mapping[str, str], notes: Mapping[str, str]) -> str | None:
    if "tampered" in notes:
        return f"code of the repository replaced {notes['tampered']} while the tests ran"
    ended = {file: [outcomes[one] for one in outcomes if _base(one) == name] for file, name in run.canaries.items()}
    for file, found in ended.items():
        if good := [one for one in found if one in ENOUGH_TO_KEEP]:
            return f"a test of {file} that must fail ended as {good[0]}"
        passed = [one for one in outcomes if one.startswith(f"{file}::") and outcomes[one] in ENOUGH_TO_KEEP]
        if not found and passed and "end" in notes:
            return f"a test of {file} that must fail was not run"
    if "end" in notes and any(ended.values()) and result.exit_code not in (TESTS_FAILED, INTERRUPTED):
        return f"the run ended with exit code {result.exit_code} although tests failed"
    return None


def _base(test: str) -> str:
    """The id without parameters."""
    return test.partition("[")[0]


def judged(suite: TestSuite, run: SuiteRun, report: SuiteReport) -> tuple[dict[str, str], bool]:
    """The outcome of each expected test, and whether all are as they must be."""
    found = {}
    for one in (*suite.fail_to_pass, *suite.pass_to_pass):
        ended = [outcome for id in run.ids[one] if (outcome := _outcome(id, report.outcomes)) != "missing"]
        found[one] = max(ended, key=BEST_FIRST.index, default="missing")
    fixed = all(found[one] in ENOUGH_TO_FIX for one in suite.fail_to_pass)
    enough = ENOUGH_TO_KEEP if suite.runner == "pytest" else ENOUGH_TO_FIX  # who skips a test is not seen there
    kept = all(found[one] in enough for one in suite.pass_to_pass)
    shown = {one: "passed" if outcome == "xfailed" else outcome for one, outcome in found.items()}
    return shown, fixed and kept and report.complete and report.cheated is None


def _outcome(wanted: str, outcomes: Mapping[str, str]) -> str:
    """The worst of the tests that an id means."""
    if "[" in wanted and not wanted.endswith("]"):
        found = [outcome for one, outcome in outcomes.items() if one.startswith(wanted)]
        return max(found, key=BEST_FIRST.index, default="missing")
    return outcomes.get(wanted, "missing")
