"""Makes mutants of modules with mutmut, and runs the tests that reach each of them: a plugin of pytest.

mutmut writes all mutants of a function beside it, and calls the one that the environment names. Its own runner starts a
pytest for each mutant, in a process in which all tests have run before. Here pytest collects the tests once and runs
none of them: a forked child runs each test without a mutant, and notes what it reaches and how long it takes. Then a
forked child for each mutant runs the tests that reach its function until one fails: the quickest first, but for those
that have noticed another mutant of the function. The processes that a test starts import the mutants too.

A function that runs while modules are imported, such as one that registers others, ran unchanged before the fork: a
mutant of it that survives is imported anew, by a pytest of its own, which runs the quickest tests of its module first.
Caches of functions are emptied before each test and each mutant: they would hide which tests reach a function.

No mutant changes only a string literal: most are wording, and tests should not depend on it. mutmut changes no function
with a decorator; `undecorated` calls the decorators below it instead.
"""

import ast
import contextlib
import fnmatch
import functools
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

from bench.mutant_child import Child, become_child
from bench.mutant_files import MUTANTS, VERDICTS, file_of, verdicts_of
from goaly.reward.child import die_with

COPIED = ("src", "tests", "apps", "bench", "configs", "docs", "README.md", "pyproject.toml")
SURVIVED, FAILED, NO_TESTS, HUNG = 0, 1, 33, 36
"""The exit codes of a mutant, as mutmut counts them."""
PYTEST = [sys.executable, "-m", "pytest", "-q", "--tb=no", "--rootdir=.", "-p", "no:cacheprovider"]
PYTEST += ["-p", "bench.mutation"]
EXAMPLES = 12
"""hypothesis runs a test on at most so many examples."""
IMPORT_SECONDS = 60
"""More than a pytest of its own needs of the processor before the first test runs."""
CACHED = type(functools.cache(len))

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
    parser.addoption("--in-order", help="run the tests that this file lists, in its order")
    parser.addoption("--seconds", type=float, default=float("inf"), help="start no mutant after this time")


def pytest_configure(config: pytest.Config) -> None:
    """Note which functions run while modules are imported."""
    if config.getoption("--mutants"):
        set_mutant_under_test("stats")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Have hypothesis try the same few examples each time, and shrink none; run what was asked for, in that order."""
    if asked := config.getoption("--in-order"):
        place = {name: number for number, name in enumerate(json.loads(Path(asked).read_text()))}
        items[:] = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])
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
    end_when_told()
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


def forget() -> None:
    """Empty the caches of mutated modules' functions."""
    for name, module in list(sys.modules.items()):
        if name.startswith("goaly.") and any("__mutmut_" in one for one in vars(module)):
            for one in vars(module).values():
                if isinstance(one, CACHED):
                    one.cache_clear()


def trial(items: Sequence[pytest.Item]) -> tuple[list[Tried], list[str]]:
    """Run each test once without a mutant, in a child; also the modules that the tests have imported there."""
    file = Path("trial.jsonl")
    imported, parent = set(sys.modules), os.getpid()
    if (pid := os.fork()) == 0:
        become_child(parent)
        with file.open("w") as out:
            for item, following in zip(items, [*items[1:], None], strict=True):
                state()._stats.clear()
                failures.clear()
                forget()
                started = time.monotonic()
                run_test(item, following)
                seconds = time.monotonic() - started
                out.write(json.dumps([item.nodeid, seconds, bool(failures), sorted(state()._stats)]) + "\n")
                out.flush()
            out.write(json.dumps([name for name in sys.modules if name not in imported]) + "\n")
        os._exit(0)
    trying = Child(mutant="", pid=pid, anew=False)
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    finally:
        trying.end()
        os.waitpid(pid, 0)
    *found, modules = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(found) == len(items), f"the trial ended at {items[len(found) + 1].nodeid}"
    tests = [
        Tried(item=item, seconds=seconds, failed=failed, reached=frozenset(reached))
        for item, (_, seconds, failed, reached) in zip(items, found, strict=True)
    ]
    return tests, modules


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
                child.end()

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
        limit = int(10 + IMPORT_SECONDS * bool(command) + 5 * sum(test.seconds for test in tests))
        parent = os.getpid()
        if (pid := os.fork()) == 0:
            become_child(parent)
            resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + limit, resource.RLIM_INFINITY))
            if command:
                os.execve(command[0], command, {**os.environ, "MUTANT_UNDER_TEST": mutant})
            os._exit(outcome(mutant, tests))
        self.running[os.pidfd_open(pid)] = Child(mutant=mutant, pid=pid, anew=bool(command))

    def fork_anew(self, mutant: str) -> None:
        """Have a child import everything with the mutant, and then run the tests of its module."""
        module = mutant.rpartition(".")[0]
        reaching = [test for test in self.tests if any(name.rpartition(".")[0] == module for name in test.reached)]
        if not reaching:
            return self.judge(mutant, NO_TESTS)
        files = sorted({file_in(test) for test in reaching})
        others = [test for test in self.tests if not test.reached and file_in(test) in files]  # in processes of theirs
        tests = sorted([*reaching, *others], key=lambda test: test.seconds)
        order = Path(f"{module}.order")
        order.write_text(json.dumps([test.item.nodeid for test in tests]))
        self.fork(mutant, tests, [*PYTEST, "-x", f"--in-order={order}", *files])

    def collect(self) -> None:
        """Wait for a child to end or for a second, and kill those that hang."""
        for ended in select.select(list(self.running), [], [], 1.0)[0]:
            child = self.running.pop(ended)
            os.close(ended)
            child.end()
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
                child.end()
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
    forget()
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


def file_in(test: Tried) -> str:
    """The file that a test is in."""
    return test.item.nodeid.partition("::")[0]


def noticed_by(pid: int) -> Path:
    """The file in which a child leaves the name of the test that noticed its mutant."""
    return Path(f"noticed-{pid}").resolve()


def function_of(mutant: str) -> str:
    """mutmut's name of the function that a mutant changes."""
    return mutant.partition("__mutmut_")[0]


def end_when_told() -> None:
    """Have SIGTERM end this process as an exception does: with what it started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def judge(patterns: Sequence[str], tests: Sequence[str], children: int, seconds: float) -> int:
    """Judge the mutants that these patterns name by these tests, in a process of their own; its exit code."""
    command = [*PYTEST, "-s", "--timeout=0", f"--children={children}", f"--seconds={seconds}"]
    command += [f"--mutants={pattern}" for pattern in patterns]
    paths: Mapping[str, Any] = {"PYTHONPATH": f"{(MUTANTS / 'src').resolve()}:{MUTANTS.resolve()}"}
    end_when_told()
    together = functools.partial(die_with, os.getpid())
    with subprocess.Popen([*command, *tests], cwd=MUTANTS, env={**os.environ, **paths}, preexec_fn=together) as judging:
        try:
            return judging.wait()
        finally:
            judging.terminate()
