"""A coding task, its hidden tests, and the grade of an attempt, whatever format they came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from goaly.environments.protocol import EnvironmentFailed
from goaly.sandboxes.contract import Limits

Runner = Literal["pytest", "django", "sympy"]
"""The program of a suite: pytest, Django's `tests/runtests.py`, or SymPy's, which calls functions."""


class TaskProblem(ValueError):
    """A task that cannot be used; the message names the task, the field and what would be right."""


class GradingFailed(EnvironmentFailed):
    """A patch could not be judged: the sandbox died, or the tests could not begin. It is never a grade of 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSeconds:
    """Time limits of a task, each of its own."""

    setup: float = 600.0
    agent: float = 1800.0
    grading: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """Where the files of a repository come from, and the state in which the agent finds them."""

    path: Path | None = None
    """A folder, or an archive (tar, zip). None: the image has the repository already, at the task's `workdir`."""
    base_commit: str | None = None
    """The commit that is checked out. None: the files as they are, which become the first commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestSuite:
    """Hidden tests with ids: each id has to end as expected."""

    __test__: ClassVar[bool] = False
    """Not a class of tests for pytest."""

    fail_to_pass: tuple[str, ...]
    """Ids that fail before the change and must pass after it, as `tests/test_x.py::test_y`, relative to the workdir. An
    id of pytest that ends inside of its `[`, as SWE-bench cuts them at a blank, means each test that begins with it."""
    pass_to_pass: tuple[str, ...] = ()
    """Ids that must still pass."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Test files and test configuration by their paths, which replace what the agent left there."""
    patch: str = ""
    """A patch that brings test files, as SWE-bench publishes them; its files replace the agent's, too."""
    protected: tuple[str, ...] = ()
    """Other files of tests and their configuration that are put back to the base commit's."""
    runner: Runner = "pytest"
    test_files: tuple[str, ...] = ()
    """The files whose tests run, where ids don't begin with one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestScript:
    """Hidden tests that are a script: it writes its reward to a file, as Harbor's do."""

    __test__: ClassVar[bool] = False
    """Not a class of tests for pytest."""

    files: Mapping[str, bytes]
    """Files that are laid into `folder`, by relative path."""
    folder: str = "/tests"
    command: str = "bash /tests/test.sh"
    rewards: str = "/logs/verifier"
    """The folder in which it leaves `reward.json` or `reward.txt`."""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingTask:
    """One task."""

    id: str
    problem: str
    """The agent's assignment."""
    tests: TestSuite | TestScript
    repository: Repository = Repository()
    workdir: str = "/repository"
    """The repository's folder in the sandbox, in which commands start."""
    root: Path | None = None
    """The folder that is the sandbox's root; None: the one of the run's settings."""
    image: str | None = None
    """A container image by name, a tar of one, or a folder with a Dockerfile; None: `root`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    """Commands that prepare the workdir before the agent starts."""
    setup_hosts: tuple[str, ...] = ()
    """Hosts that `setup` may reach; the agent reaches none."""
    artifacts: tuple[str, ...] = ()
    """Paths outside of the workdir that go over to grading beside the patch."""
    solution: str | None = None
    """A patch that solves it, or for a `TestScript` a script that does, run in the workdir as `/solution/solve.sh`."""
    solution_files: Mapping[str, bytes] = field(default_factory=dict)
    """Files beside a solution that is a script, by their paths below `/solution`."""
    limits: Limits | None = None
    """None: those of the run's settings."""
    seconds: TaskSeconds = TaskSeconds()
    safe_to_repeat: bool = False
    """Whether commands of the agent may run again after a crash; nothing outside of the sandbox sees them."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Published fields that are kept for reports, such as `repo` and `version`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """How a patch did."""

    score: float
    """1 for resolved; a `TestScript` may give parts."""
    resolved: bool
    outcomes: Mapping[str, str] = field(default_factory=dict)
    """`passed`, `failed`, `skipped`, `error` or `missing` by test id."""
    cheated: str | None = None
    """Why the attempt counts as cheated; None if it does not."""
    refused: str | None = None
    """Why the patch was not tried, such as its size."""
    log: str = ""
    """The output of the tests, cut in the middle."""
    seconds: float = 0.0
    rewards: Mapping[str, float] = field(default_factory=dict)
    """All numbers of a `TestScript`."""
