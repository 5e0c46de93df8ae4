"""Runs SymPy's tests inside of a sandbox, as a part of `suite_runner.py`, for Python 3.6 and newer.

As `bin/test -C` does, it calls the functions of each file in their order, without SymPy's cache. SymPy's own runner is
not used, because it is a part of what is graded. A test's id is `FILE::FUNCTION`.
"""

import importlib
import inspect
import os
import random
import sys
import traceback
import warnings

NOT_TRIED = ("Skipped", "XFail")
"""Exceptions of SymPy's for a test that was skipped, or failed as expected."""


class SymPyRun:
    """One run of the files."""

    version = "functions of Python {}.{}".format(*sys.version_info)

    def __init__(self, job, send):
        self.files = job["files"]
        self.wanted = frozenset(job["wanted"])
        self.send = send
        os.environ["SYMPY_USE_CACHE"] = "no"
        for kind in (UserWarning, SyntaxWarning):
            warnings.filterwarnings("ignore", category=kind)

    def run(self, machinery):
        """Run the wanted tests of the files; the exit code."""
        failed = False
        for path in self.files:
            try:
                module = importlib.import_module(path[: -len(".py")].replace("/", "."))
            except Exception:
                traceback.print_exc()
                failed = True
                continue
            if getattr(module, "disabled", False):
                continue
            for name, function in list(vars(module).items()):
                if path + "::" + name in self.wanted and inspect.isfunction(function):
                    outcome = outcome_of(function)
                    changed = machinery.changed(())
                    if changed:
                        self.send("tampered", changed)
                    self.send(outcome, path + "::" + name)
                    failed = failed or outcome == "failed"
        return int(failed)


def outcome_of(function):
    """How a test ends."""
    sys.stderr.write(f"{function.__name__}\n")
    random.seed(0)
    try:
        found = function()
        for one in found if inspect.isgenerator(found) else ():  # tests of old versions yield a function and arguments
            one[0](*one[1:])
    except Exception as error:
        if type(error).__name__ in NOT_TRIED:
            return "skipped"
        traceback.print_exc()
        return "failed"
    return "passed"
