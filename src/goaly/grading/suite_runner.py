"""Runs a suite in a sandbox: `python -I -B suite_runner.py < job`, for Python 3.6 and newer. It is never imported here.

pytest runs the suite, or `django_runner.py` or `sympy_runner.py`, which lie beside this file.
Its lines on the standard output begin with the job's nonce; what tests print goes to the standard error. What it needs
for its report is imported and bound before the first line of the graded repository runs.
"""

import builtins
import gc
import json
import operator
import os
import sys

FUNCTION = type(json.loads)
TYPES = (type, FUNCTION, type(len))
IS, CODE = operator.is_, operator.attrgetter("__code__")


class PathAfterTheStandardLibrary(list):
    """`sys.path` in which nothing comes before Python's own modules: a `json.py` in the repository replaces none.

    What code puts at its beginning stands behind them, and is also what the code takes away from its beginning."""

    def __init__(self, entries, first):
        super().__init__(entries)
        self.first = first

    def insert(self, index, entry):
        super().insert(self.behind(index), entry)

    def pop(self, index=-1):
        return super().pop(self.behind(index))

    def __delitem__(self, index):
        super().__delitem__(index if isinstance(index, slice) else self.behind(index))

    def behind(self, index):
        return max(index, self.first) if index >= 0 else index


class Machinery:
    """The functions and classes with which tests are judged, as they were before code of the repository ran."""

    def __init__(self, repository, own_files):
        self.repository = repository.rstrip("/") + "/"
        self.own_files = own_files
        self.kept = []
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] in ("_pytest", "pytest", "pluggy", "unittest"):
                self.keep(name, vars(module))
        errors = {name: value for name, value in vars(builtins).items() if isinstance(value, type)}
        self.hold("builtins", vars(builtins), errors)

    def keep(self, label, holder):
        parts = {name: value for name, value in holder.items() if isinstance(value, TYPES)}
        self.hold(label, holder, parts)
        for name, value in parts.items():
            if isinstance(value, type) and value.__module__ == label:
                kinds = (FUNCTION, property, classmethod, staticmethod)
                inner = {one: part for one, part in vars(value).items() if isinstance(part, kinds)}
                self.hold(label + "." + name, vars(value), inner)

    def hold(self, label, holder, parts):
        functions = [part for part in parts.values() if isinstance(part, FUNCTION)]
        codes = [one.__code__ for one in functions]
        self.kept.append((label, holder, list(parts), list(parts.values()), functions, codes))

    def is_foreign(self, value):
        """Whether a replacement comes from the repository, or from nobody knows where."""
        code = getattr(value, "__code__", None)
        if code is not None:
            return self.is_of_repository(code.co_filename)
        module = sys.modules.get(value.__module__) if isinstance(value, type) else None
        return module is None or self.is_of_repository(getattr(module, "__file__", None) or "")

    def is_of_repository(self, path):
        path = os.path.join(self.repository, path)
        return path.startswith(self.repository) and path not in self.own_files

    def changed(self, plugins):
        """The name of something that code of the repository has replaced; None if there is nothing."""
        for label, holder, names, values, functions, codes in self.kept:
            if not all(map(IS, map(holder.get, names), values)):
                for n, name in enumerate(names):
                    now = holder.get(name)
                    if now is not values[n] and (now is None or self.is_foreign(now)):
                        return label + "." + name
            if not all(map(IS, map(CODE, functions), codes)):
                for n, function in enumerate(functions):
                    if function.__code__ is not codes[n] and self.is_foreign(function):
                        return label + "." + function.__name__
        for plugin in plugins:
            module = plugin if hasattr(plugin, "__file__") else sys.modules.get(type(plugin).__module__)
            name = getattr(module, "__file__", None)
            if name and self.is_of_repository(name):
                return "plugin " + name
        return None


class Reporter:
    """A plugin that reports how each wanted test ended, from what pytest's hooks say and from the exceptions."""

    def __init__(self, send, wanted, machinery, gentle):
        self.send = send
        self.wanted = frozenset(wanted)
        self.machinery = machinery
        self.gentle = gentle
        self.outcome = None

    def check(self, config):
        changed = self.machinery.changed(config.pluginmanager.get_plugins())
        if changed:
            self.send("tampered", changed)

    def came_from_the_repository(self, excinfo):
        """Whether a skip or an expected failure was raised by graded code, not by a test or a fixture."""
        if not isinstance(excinfo.value, self.gentle):
            return False
        last = ""
        traceback = excinfo.tb
        while traceback is not None:
            name = traceback.tb_frame.f_code.co_filename
            if "/_pytest/" not in name and "/unittest/" not in name:
                last = name
            traceback = traceback.tb_next
        return bool(last) and self.machinery.is_of_repository(last)

    def judge(self, report, call):
        """How one phase of a test ended; None if it may go on."""
        excinfo = call.excinfo
        if report.outcome == "passed" and excinfo is None:
            return "passed" if call.when == "call" else None
        if report.outcome == "passed" and hasattr(report, "wasxfail") and call.when == "call":
            return "passed"
        if report.outcome == "skipped" and call.when != "teardown":
            if excinfo is not None and self.came_from_the_repository(excinfo):
                return "failed"
            return "xfailed" if hasattr(report, "wasxfail") else "skipped"
        return "failed" if call.when == "call" else "error"


def hooks_of(reporter, hookimpl):
    """The hooks of the reporter, as a plugin."""

    class Plugin:
        @hookimpl(hookwrapper=True, trylast=True)
        def pytest_collection_modifyitems(self, config, items):
            yield
            items[:] = [one for one in items if one.nodeid.partition("[")[0] in reporter.wanted]
            reporter.check(config)

        @hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_runtest_protocol(self, item):
            reporter.outcome = None
            yield
            reporter.check(item.config)
            reporter.send(reporter.outcome or "error", item.nodeid)

        @hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_runtest_makereport(self, item, call):
            made = yield
            outcome = reporter.judge(made.get_result(), call)
            if outcome and reporter.outcome in (None, "passed", "skipped", "xfailed"):
                reporter.outcome = outcome

    return Plugin()


def sender(nonce):
    """A function that writes one line of the report. The standard output is the standard error from then on."""
    import fcntl

    write, to, head = os.write, fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 64), nonce.encode()
    os.dup2(2, 1)

    def send(word, text):
        told = text.encode("utf-8", "backslashreplace").replace(b"\n", b"\\n")
        line = head + b" " + word.encode() + b" " + told + b"\n"
        while line:
            line = line[write(to, line) :]

    return send


class PytestRun:
    """A run of pytest."""

    def __init__(self, job, send):
        import unittest

        import pytest

        self.main, self.hookimpl, self.version = pytest.main, pytest.hookimpl, pytest.__version__
        self.gentle = (pytest.skip.Exception, pytest.xfail.Exception, unittest.SkipTest)
        self.job, self.send = job, send

    def run(self, machinery):
        """The exit code."""
        sys.argv = ["pytest"]
        reporter = Reporter(self.send, self.job["wanted"], machinery, self.gentle)
        return int(self.main(self.job["arguments"], plugins=[hooks_of(reporter, self.hookimpl)]))


def run_of(job, send):
    """The run of another runner, whose module is beside this one."""
    from importlib.util import module_from_spec, spec_from_file_location

    name, kind = {"django": ("django_runner", "DjangoRun"), "sympy": ("sympy_runner", "SymPyRun")}[job["runner"]]
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name + ".py")
    spec = spec_from_file_location(name, path)
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, kind)(job, send)


def main():
    job = json.loads(sys.stdin.buffer.read().decode())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    send, leave = sender(job.pop("nonce")), os._exit
    gc.disable()  # nothing of what is imported here ends before the process
    run = PytestRun(job, send) if job["runner"] == "pytest" else run_of(job, send)
    repository = job["workdir"]
    first = next((n for n, one in enumerate(sys.path) if one.endswith("-packages")), len(sys.path))
    sys.path = PathAfterTheStandardLibrary(sys.path[:first] + job["paths"] + sys.path[first:], first)
    own_files = frozenset(os.path.join(repository, one) for one in job["own_files"])
    machinery = Machinery(repository, own_files)
    if hasattr(gc, "freeze"):
        gc.freeze()
    gc.enable()
    os.chdir(repository)
    send("begin", run.version)
    status = run.run(machinery)
    send("end", str(status))
    sys.stdout.flush()
    sys.stderr.flush()
    leave(status)


if __name__ == "__main__":
    main()
