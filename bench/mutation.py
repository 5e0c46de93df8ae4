"""Makes mutants of modules with mutmut, and runs the tests that reach each of them: a plugin of pytest.

mutmut writes all mutants of a function beside it, and calls the one that the environment names. Its own runner starts a
pytest for each mutant, in a process in which all tests have run before. Here pytest collects the tests once and runs
none of them: a forked child runs each test without a mutant, and notes what it reaches and how long it takes. Then a
forked child for each mutant runs the tests that reach its function until one fails: the quickest first, but for those
that have noticed another mutant of the function. The processes that a test starts import the mutants too.

A function that runs while modules are imported, such as one that registers others, ran unchanged before the fork: a
mutant of it that survives is imported anew, by a pytest of its own.

No mutant changes only a string literal: most are wording, and tests should not depend on it. mutmut changes no function
with a decorator; `undecorated` calls the decorators below it instead.
"""

import ast
import contextlib
import fnmatch
import gc
import importlib
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from mutmut.mutation import file_mutation, mutators
from mutmut.mutation.data import MutantLineSpans
from mutmut.mutation.trampoline import set_mutant_under_test
from mutmut.state import state

from bench.mutant_files import MUTANTS, VERDICTS, file_of, verdicts_of

COPIED = ("src", "tests", "apps", "bench", "configs", "docs", "README.md", "pyproject.toml")
SURVIVED, FAILED, NO_TESTS, HUNG = 0, 1, 33, 36
"""The exit codes of a mutant, as mutmut counts them."""
IDLE_SECONDS = 8.0
"""A child that sleeps so long without using the processor hangs."""
QUIETLY = ("-q", "--tb=no", "--rootdir=.", "-p", "no:cacheprovider")
"""Options of every pytest."""
EXAMPLES = 12
"""hypothesis runs a test on at most so many examples."""

failures: list[str] = []
"""The tests that have failed in this process."""


def make(modules: Sequence[str]) -> None:
    """Write a copy of the project with the mutants of these modules, none of them judged."""
    shutil.rmtree(MUTANTS, ignore_errors=True)
    for name in COPIED:
        if Path(name).is_dir():
            shutil.copytree(name, MUTANTS / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(name, MUTANTS / name)
    file_mutation.mutation_operators = [
        (node, operator) for node, operator in mutators.mutation_operators if operator is not mutators.operator_string
    ]
    for module in modules:
        file = file_of(module)
        mutated = file_mutation.mutate_file_contents(str(file), undecorated(file.read_text()))
        (MUTANTS / file).write_text(mutated.code)
        MutantLineSpans(path=file, span_by_function_name=mutated.line_span_by_function_name).save()
        codes = {f"{module}.{name}": None for name in mutated.mutant_names}
        verdicts_of(module).write_text(json.dumps({"exit_code_by_key": codes}))


KEPT_DECORATORS = ("staticmethod", "classmethod", "concurrent_endpoint")
"""mutmut knows the first two; an endpoint is no function."""


def undecorated(source: str) -> str:
    """The same module with `name = decorator(name)` below each decorated function: mutmut changes none that has one."""
    lines = source.splitlines()
    tree = ast.parse(source)
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    functions = [node for body in bodies for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for function in sorted(functions, key=lambda node: -node.lineno):
        decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
        if decorators and not set(decorators) & set(KEPT_DECORATORS):
            first, name = function.decorator_list[0].lineno - 1, function.name
            indent = " " * function.col_offset
            assert function.end_lineno is not None
            applied = [f"{indent}{name} = {decorator}({name})" for decorator in reversed(decorators)]
            lines[function.end_lineno : function.end_lineno] = applied
            del lines[first : function.lineno - 1]
    return "\n".join(lines) + "\n"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Patterns of mutants, and how to run them."""
    parser.addoption("--mutants", action="append", default=[], help="mutants to judge, such as 'goaly.losses.kl.*'")
    parser.addoption("--children", type=int, default=2)
    parser.addoption("--seconds", type=float, default=float("inf"), help="start no mutant after this time")


def pytest_configure(config: pytest.Config) -> None:
    """Note which functions run while modules are imported."""
    if config.getoption("--mutants"):
        set_mutant_under_test("stats")


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Have hypothesis try the same few examples each time, and shrink none."""
    for item in items:
        function: Any = getattr(item, "obj", None)
        machine: Any = getattr(item, "cls", None)
        if hasattr(machine, "runTest") and isinstance(getattr(machine, "settings", None), settings):
            machine.settings = quick(machine.settings)
        elif getattr(function, "is_hypothesis_test", False):
            given = getattr(function, "_hypothesis_internal_use_settings", None)
            function._hypothesis_internal_use_settings = quick(given or settings())


def quick(given: settings) -> settings:
    """The same settings with fewer examples, always the same ones."""
    phases = (Phase.explicit, Phase.generate)
    return settings(
        given, max_examples=min(given.max_examples, EXAMPLES), phases=phases, derandomize=True, database=None
    )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a failure."""
    if report.failed:
        failures.append(report.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Judge the mutants instead of running the tests."""
    patterns = session.config.getoption("--mutants")
    if not patterns or session.testsfailed:
        return None
    started = time.monotonic()
    tests, modules = trial(session.items)
    for module in modules:  # else each child would import them
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    gc.freeze()
    at_import = set(state()._stats)
    set_mutant_under_test("")
    if broken := [test.item.nodeid for test in tests if test.failed]:
        print(f"left out, because they fail without a mutant in a forked process: {', '.join(broken)}", flush=True)
    tests = [test for test in tests if not test.failed]
    lane = Lane(tests=tests, at_import=at_import, children=session.config.getoption("--children"))
    lane.run(patterns, started + session.config.getoption("--seconds"))
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A test that ran once without a mutant."""

    item: pytest.Item
    seconds: float
    failed: bool
    reached: frozenset[str]


def run_test(item: pytest.Item, following: pytest.Item | None) -> None:
    """Run a test with its fixtures, and keep those that the following test needs too."""
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


def become_child() -> None:
    """Have a group of processes of its own and no output."""
    os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)


def trial(items: Sequence[pytest.Item]) -> tuple[list[Tried], list[str]]:
    """Run each test once without a mutant, in a child; also the modules that the tests have imported there."""
    file = Path("trial.jsonl")
    imported = set(sys.modules)
    if (pid := os.fork()) == 0:
        become_child()
        with file.open("w") as out:
            for item, following in zip(items, [*items[1:], None], strict=True):
                state()._stats.clear()
                failures.clear()
                started = time.monotonic()
                run_test(item, following)
                seconds = time.monotonic() - started
                out.write(json.dumps([item.nodeid, seconds, bool(failures), sorted(state()._stats)]) + "\n")
                out.flush()
            out.write(json.dumps([name for name in sys.modules if name not in imported]) + "\n")
        os._exit(0)
    os.waitpid(pid, 0)
    *found, modules = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(found) == len(items), f"the trial ended at {items[len(found) + 1].nodeid}"
    tests = [
        Tried(item=item, seconds=seconds, failed=failed, reached=frozenset(reached))
        for item, (_, seconds, failed, reached) in zip(items, found, strict=True)
    ]
    return tests, modules


@dataclass(slots=True, kw_only=True)
class Child:
    """A process that runs the tests of a mutant."""

    mutant: str
    pid: int
    anew: bool
    """Whether it imports all modules with the mutant."""
    used_seconds: float = 0.0
    active: float = field(default_factory=time.monotonic)
    """When it was last seen to use the processor."""

    def hangs(self) -> bool:
        """Whether it has slept for long."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        used = float(fields[11]) + float(fields[12]) + float(fields[13]) + float(fields[14])
        if used != self.used_seconds or fields[0] != "S":
            self.used_seconds, self.active = used, time.monotonic()
        return time.monotonic() - self.active > IDLE_SECONDS


@dataclass(slots=True, kw_only=True)
class Lane:
    """Judges mutants, several at a time."""

    tests: Sequence[Tried]
    at_import: set[str]
    children: int
    running: dict[int, Child] = field(default_factory=dict)
    """By the file descriptor that tells when the process has ended."""
    codes: dict[Path, dict[str, int | None]] = field(default_factory=dict)
    by_function: dict[str, list[Tried]] = field(default_factory=lambda: defaultdict(list))
    """The tests that reach each function, in the order in which they run."""

    def run(self, patterns: Sequence[str], until: float) -> None:
        """Judge the mutants that these patterns name, those with quick tests first."""
        self.codes = {
            file: json.loads(file.read_text())["exit_code_by_key"] for file in Path().rglob(f"*.py{VERDICTS}")
        }
        asked = [
            name
            for codes in self.codes.values()
            for name in codes
            if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
        ]
        by_function = self.by_function
        for test in sorted(self.tests, key=lambda test: test.seconds):
            for function in test.reached:
                by_function[function].append(test)
        seconds = {function: sum(test.seconds for test in tests) for function, tests in by_function.items()}
        asked.sort(key=lambda name: (function_of(name) in self.at_import, seconds.get(function_of(name), 0.0)))
        try:
            for number, name in enumerate(asked):
                if time.monotonic() > until:
                    break
                while len(self.running) >= self.children:
                    self.collect()
                self.start(name, by_function[function_of(name)])
                if number % 20 == 0:
                    print(f"{number}/{len(asked)} {name}", flush=True)
            while self.running:
                self.collect()
        finally:
            for child in self.running.values():
                os.killpg(child.pid, signal.SIGKILL)

    def start(self, mutant: str, tests: Sequence[Tried]) -> None:
        """Have a child run these tests with the mutant."""
        if tests:
            self.fork(mutant, tests)
        elif function_of(mutant) in self.at_import:
            self.fork_anew(mutant)
        else:
            self.judge(mutant, NO_TESTS)

    def fork(self, mutant: str, tests: Sequence[Tried], command: Sequence[str] = ()) -> None:
        """Have a child run these tests, by this command if there is one."""
        limit = int(10 + 5 * sum(test.seconds for test in tests))
        if (pid := os.fork()) == 0:
            become_child()
            resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + limit, resource.RLIM_INFINITY))
            if command:
                os.execve(command[0], command, {**os.environ, "MUTANT_UNDER_TEST": mutant})
            os._exit(outcome(mutant, tests))
        self.running[os.pidfd_open(pid)] = Child(mutant=mutant, pid=pid, anew=bool(command))

    def fork_anew(self, mutant: str) -> None:
        """Have a child import everything with the mutant, and then run the tests of its module."""
        module = mutant.rpartition(".")[0]
        tests = [test for test in self.tests if any(function.rpartition(".")[0] == module for function in test.reached)]
        if not tests:
            return self.judge(mutant, NO_TESTS)
        files = sorted({test.item.nodeid.partition("::")[0] for test in tests})
        command = [sys.executable, "-m", "pytest", *QUIETLY, "-x", *files]
        self.fork(mutant, tests, command)

    def collect(self) -> None:
        """Wait for a child to end or for a second, and kill those that hang."""
        for ended in select.select(list(self.running), [], [], 1.0)[0]:
            child = self.running.pop(ended)
            os.close(ended)
            code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
            if child.anew and code > 0:  # pytest has a code of its own for modules that it cannot import
                code = FAILED
            if code == SURVIVED and not child.anew and function_of(child.mutant) in self.at_import:
                self.fork_anew(child.mutant)
            else:
                self.judge(child.mutant, code)
            noticed = noticed_by(child.pid)
            if noticed.exists():
                tests = self.by_function[function_of(child.mutant)]
                first = next(test for test in tests if test.item.nodeid == noticed.read_text())
                tests.remove(first)
                tests.insert(0, first)
                noticed.unlink()
        for one, child in list(self.running.items()):
            if child.hangs():
                os.killpg(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, 0)
                os.close(one)
                del self.running[one]
                self.judge(child.mutant, HUNG)

    def judge(self, mutant: str, code: int) -> None:
        """Keep a verdict."""
        for file, codes in self.codes.items():
            if mutant in codes:
                codes[mutant] = code
                file.write_text(json.dumps({"exit_code_by_key": codes}))


def outcome(mutant: str, tests: Sequence[Tried]) -> int:
    """Run these tests with the mutant until one fails."""
    set_mutant_under_test(mutant)
    failures.clear()
    items = [test.item for test in tests]
    try:
        for item, following in zip(items, [*items[1:], None], strict=True):
            run_test(item, following)
            if failures:
                noticed_by(os.getpid()).write_text(item.nodeid)
                return FAILED
    except BaseException:  # a test that ends the process has noticed the mutant too
        return FAILED
    return SURVIVED


def noticed_by(pid: int) -> Path:
    """The file in which a child leaves the name of the test that noticed its mutant."""
    return Path(f"noticed-{pid}").resolve()


def function_of(mutant: str) -> str:
    """mutmut's name of the function that a mutant changes."""
    return mutant.partition("__mutmut_")[0]


def judge(patterns: Sequence[str], tests: Sequence[str], children: int, seconds: float) -> int:
    """Judge the mutants that these patterns name by these tests, in a process of their own; its exit code."""
    command = [sys.executable, "-m", "pytest", *QUIETLY, "-s", "--timeout=0", "-p", "bench.mutation"]
    command += [f"--children={children}", f"--seconds={seconds}"]
    command += [f"--mutants={pattern}" for pattern in patterns]
    paths: Mapping[str, Any] = {"PYTHONPATH": f"{(MUTANTS / 'src').resolve()}:{MUTANTS.resolve()}"}
    return subprocess.run([*command, *tests], cwd=MUTANTS, env={**os.environ, **paths}).returncode
