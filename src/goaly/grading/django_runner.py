"""Runs Django's suite inside of a sandbox, as a part of `suite_runner.py`, for Python 3.6 and newer.

`tests/runtests.py` runs as it is, on SQLite and in one process. Only unittest's runner is another one: it runs the
wanted tests alone, and sends how each ended. A test's id is `FILE::CLASS::METHOD`, and the first line of its
description, too.
"""

import os
import runpy
import sys
import unittest

BEST_FIRST = ("passed", "xfailed", "skipped", "failed", "error")


def tests_of(suite):
    """The tests of a suite, in order."""
    for one in suite:
        if isinstance(one, unittest.BaseTestSuite):
            yield from tests_of(one)
        else:
            yield one


class DjangoRun:
    """One run; it has to be made before the classes of unittest are watched."""

    version = "unittest of Python {}.{}".format(*sys.version_info)

    def __init__(self, job, send):
        self.repository = job["workdir"].rstrip("/") + "/"
        self.files = job["files"]
        self.wanted = frozenset(job["wanted"])
        self.send = send
        self.machinery = None
        unittest.TextTestRunner = unittest.runner.TextTestRunner = runner_of(self, result_of(self))

    def names_of(self, test):
        """The wanted ids that this test has."""
        kind = type(test)
        path = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
        names = []
        if path.startswith(self.repository):
            method = getattr(test, "_testMethodName", "")
            names.append("::".join((path[len(self.repository) :], kind.__qualname__, method)))
        names.append(test.shortDescription() or "")
        return [one for one in names if one in self.wanted]

    def ended(self, test, outcome):
        changed = self.machinery.changed(())
        if changed:
            self.send("tampered", changed)
        for name in self.names_of(test):
            self.send(outcome, name)

    def run(self, machinery):
        """Run the tests of the files; the exit code."""
        self.machinery = machinery
        script = os.path.join(self.repository, "tests", "runtests.py")
        with open(script, "rb") as source:
            in_one_process = ["--parallel", "1"] if b"--parallel" in source.read() else []
        labels = [one[len("tests/") : -len(".py")].replace("/", ".") for one in self.files]
        labels = [one[: -len(".__init__")] if one.endswith(".__init__") else one for one in labels]
        sys.argv = [script, "--verbosity", "1", "--settings", "test_sqlite", *in_one_process, *labels]
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            return int(end.code) if isinstance(end.code, int) else int(end.code is not None)
        return 0


def result_of(run):
    """The class of results that sends the outcome of each test to its run."""

    class Result(unittest.TextTestResult):
        outcome = None

        def note(self, outcome):
            self.outcome = max(outcome, self.outcome or outcome, key=BEST_FIRST.index)

        def startTest(self, test):
            self.outcome = None
            super().startTest(test)

        def addSuccess(self, test):
            self.note("passed")
            super().addSuccess(test)

        def addError(self, test, err):
            self.note("error")
            super().addError(test, err)

        def addFailure(self, test, err):
            self.note("failed")
            super().addFailure(test, err)

        def addSkip(self, test, reason):
            self.note("skipped")
            super().addSkip(test, reason)

        def addExpectedFailure(self, test, err):
            self.note("xfailed")
            super().addExpectedFailure(test, err)

        def addUnexpectedSuccess(self, test):
            self.note("failed")
            super().addUnexpectedSuccess(test)

        def addSubTest(self, test, subtest, err):
            if err is not None:
                self.note("failed")
            super().addSubTest(test, subtest, err)

        def stopTest(self, test):
            super().stopTest(test)
            run.ended(test, self.outcome or "error")

    return Result


def runner_of(run, result):
    """The class of runners that keeps the wanted tests of a suite."""

    class Runner(unittest.TextTestRunner):
        def _makeResult(self):
            return result(self.stream, self.descriptions, self.verbosity)

        def run(self, test):
            return super().run(unittest.TestSuite(one for one in tests_of(test) if run.names_of(one)))

    return Runner
