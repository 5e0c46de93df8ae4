"""Programs as users start them, `python -m MODULE ARGUMENTS`, which need not import the libraries.

Each is a process of its own, a fork of multiprocessing's fork server, which has imported them (`imported_once.py`).
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import forkserver, process, resource_tracker
from pathlib import Path

from goaly.base.process import die_with

SEMAPHORES = "program-"
"""Semaphores of a program, and of its children by multiprocessing, have names that begin so, and with its pid."""


class Program:
    """A program that runs. It ends with this process, at the latest."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        output: Path,
        errors: Path | None = None,
        variables: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ):
        """Its standard output and error go to files, or both to one. `variables` are all that it has."""
        streams = (str(output), str(errors or output))
        environment = dict(os.environ if variables is None else variables)
        begin = (module, arguments, streams, environment, folder or Path.cwd())
        for stream in streams:
            Path(stream).write_bytes(b"")
        self._process = multiprocessing.get_context("forkserver").Process(target=_run, args=begin, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """The exit code, or the signal as a negative number; None while it runs."""
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        """The exit code, once it has ended; TimeoutExpired if it has not by then."""
        self._process.join(seconds)
        if (code := self.poll()) is None:
            assert seconds is not None
            raise subprocess.TimeoutExpired(str(self._process), seconds)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


def ended(module: str, *arguments: str, below: Path, seconds: float) -> subprocess.CompletedProcess[str]:
    """What a program wrote, and its exit code, once it has ended."""
    output, errors = below / f"{module}.out", below / f"{module}.err"
    program = Program(module, *arguments, output=output, errors=errors)
    try:
        code = program.wait(seconds)
    finally:
        program.kill()
    return subprocess.CompletedProcess(arguments, code, output.read_text(), errors.read_text())


def _run(
    module: str,
    arguments: tuple[str, ...],
    streams: tuple[str, str],
    environment: dict[str, str],
    folder: Path,
) -> None:
    """Be the program."""
    die_with(os.getppid())
    files = [os.open(name, os.O_WRONLY | os.O_APPEND) for name in streams]
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    os.environ.clear()
    os.environ.update(getattr(sys.modules.get("imported_once"), "SET", {}))
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.argv = [module, *arguments]
    sys.orig_argv = [sys.executable, "-m", *sys.argv]
    server = forkserver._forkserver
    os.close(server._forkserver_alive_fd)  # the server ends with the test's process, whatever this one does
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None
    multiprocessing.set_start_method(None, force=True)  # as in a process that multiprocessing has not started
    process._parent_process = None
    process.current_process()._config["daemon"] = False
    process.current_process()._config["semprefix"] = f"/{SEMAPHORES}{os.getpid()}-"
    process.current_process().name = "MainProcess"
    resource_tracker._resource_tracker._fd = resource_tracker._resource_tracker._pid = None
    runpy.run_module(module, run_name="__main__", alter_sys=True)
