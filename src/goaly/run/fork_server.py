"""Starts processes as forks of a server, a process that has imported what they need.

Importing torch and vLLM takes a process up to ten seconds of CPU; a fork of one that has them takes 20 ms. Monarch
starts each process by a command. Here the command is this file as a program, the launcher: it hands its streams,
environment, folder and cores to the server, waits until the fork ends, and ends as the fork did.

A process starts once: as a fork, after its launcher has told it to run, or else without the server, if that is gone,
computes with other threads, or has not answered for `ANSWER_SECONDS`. A fork is killed when its launcher or its server
ends. A server ends with the process that started it. A server has one thread when it forks. If an import starts another
thread, the server logs that and ends.
"""

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    from pathlib import Path

    from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand

PROGRAM = "monarch._src.actor.bootstrap_main"
"""The module that Monarch runs as the program of each of its processes."""
ANSWER_SECONDS = 120.0
"""Time for imports on a busy machine."""
REQUEST_SECONDS = 5.0
"""A launcher that connects sends its request at once."""
REQUEST_BYTES = 1 << 18
LAUNCHER = ("-IS", __file__, "launch")
"""Makes a Python a launcher. Server, parent, threads, program and imports follow."""
SHARED = "GOALY_FORK_SERVER"
"""Environment variable: the name of a fork server that this run uses instead of one of its own."""

TRAINED = (
    "goaly.train.train_engine",
    "goaly.train.optimizer",
    "goaly.train.parallel_model",
    "goaly.numerics.bitwise_layers",
    "goaly.models.hf",
)
ROLLOUT = ("goaly.backlog.batch", "goaly.prompts.template", "goaly.prompts.tokenizer")
FORKED = {
    "hub": ("goaly.backlog.group_queue", "goaly.journal.run_log"),
    "trainer": (*TRAINED, "goaly.losses.objective"),
    "reference": TRAINED,
    "critic": (*TRAINED, "goaly.train.value_head"),
    "generator": (
        "goaly.generate.vllm_engine",
        "goaly.generate.vllm_model",
        "vllm.v1.worker.cpu_worker",
    ),
    "rollout": ROLLOUT,
    "endpoint": (*ROLLOUT, "goaly.agents.routes"),
}
"""The modules that a fork server imports for a process of each role, and for a rollout worker with an endpoint. None
imports Monarch, which starts threads."""


class ForkServer:
    """A fork server whose forks compute with `threads` threads. It ends with this process, at the latest."""

    def __init__(self, threads: int, log: "Path"):
        import subprocess  # the launcher does without these

        from goaly.base.atomic_files import open_lines

        self.name = f"goaly-{os.urandom(8).hex()}"
        output = os.fdopen(open_lines(log, cut=False), "ab")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, output:
            listener.bind(f"\0{self.name}")
            listener.listen(128)  # launchers may come before the server is up
            count = {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": "1"}  # NumPy's starts threads
            self._process = subprocess.Popen(
                [sys.executable, "-m", "goaly.run.fork_server", "serve", str(listener.fileno())],
                stdin=subprocess.PIPE,  # it ends when this process closes it, ends or becomes another program
                stdout=output,
                stderr=output,
                pass_fds=[listener.fileno()],
                env={**os.environ, **count},  # read once, when the libraries are imported
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the server, whose group its forks are in."""
        return self._process.pid

    def close(self) -> None:
        """End the server and all its forks."""
        self._process.kill()
        self._process.communicate()


def fork_command(server: str, role: str, threads: int = 1) -> "BootstrapCommand":
    """The command by which this process's Monarch starts one of this role as a fork of the server with this name."""
    from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand

    arguments = [*LAUNCHER, server, str(os.getpid()), str(threads), PROGRAM, *FORKED[role]]
    return BootstrapCommand(sys.executable, None, arguments, env={})


class _Fork(NamedTuple):
    pid: int
    end: int
    """A descriptor that the kernel makes readable when the process ends."""
    launcher: socket.socket

    def kill(self) -> None:
        """The launcher ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.end, signal.SIGKILL)

    def report_end(self) -> None:
        """Tell the launcher the exit code, or the signal as a negative number."""
        _, status = os.waitpid(self.pid, 0)
        with suppress(OSError):  # the launcher ended too
            self.launcher.send(str(os.waitstatus_to_exitcode(status)).encode())
        self.close()

    def close(self) -> None:
        os.close(self.end)
        self.launcher.close()


def launch(server: str, parent: str, threads: str, program: str, modules: Sequence[str]) -> NoReturn:
    """Let a fork of the server, with these modules, run the program in this one's place, or run it here."""
    _set_stop_signals(signal.SIG_IGN)
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not _runs_as_fork(line, server, threads, program, modules):
        line.close()
        _set_stop_signals(signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, "-m", program])
    # Not a signal at the parent's death: the kernel sends it at the end of the parent's thread that started this one.
    parent_end = os.pidfd_open(int(parent))
    if os.getppid() == int(parent) and line in select.select([line, parent_end], [], [])[0]:
        _end_with(int(line.recv(16) or -signal.SIGKILL))
    os._exit(1)


def _runs_as_fork(line: socket.socket, server: str, threads: str, program: str, modules: Sequence[str]) -> bool:
    request = {
        "threads": threads,
        "program": program,
        "modules": modules,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "cores": sorted(os.sched_getaffinity(0)),
    }
    line.settimeout(ANSWER_SECONDS)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES)
    try:
        line.connect(f"\0{server}")
        socket.send_fds(line, [json.dumps(request).encode()], [0, 1, 2])
        return line.recv(8) == b"ready" and line.send(b"run") > 0
    except OSError:
        return False


def _end_with(code: int) -> NoReturn:
    if code < 0:
        with suppress(OSError):  # the action of SIGKILL cannot be set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _set_stop_signals(action: signal.Handlers) -> None:
    """Ignored by launchers and fork servers: only the controller ends a run's processes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, action)


def serve(listener: socket.socket) -> None:
    """Be a fork server until standard input ends."""
    from goaly.base.process import die_with, show_as

    _set_stop_signals(signal.SIG_IGN)
    die_with(os.getppid())
    show_as("goaly fork-server")  # also prepares its forks, whose environment lies elsewhere
    events = select.epoll()
    events.register(0, select.EPOLLHUP)
    events.register(listener, select.EPOLLIN)
    forks: dict[int, _Fork] = {}
    environment = dict(os.environ)
    while True:
        ((descriptor, _),) = events.poll(maxevents=1)  # a second one might be of a descriptor that this one closes
        if descriptor == 0:
            return
        if descriptor == listener.fileno():
            launcher, _ = listener.accept()
            request, streams = _requested(launcher)
            if request is None:
                launcher.close()
            else:
                _import(request["modules"])
                request["environment"] |= dict(os.environ.items() - environment.items())  # what imports have set
                server = os.getpid()
                if (pid := os.fork()) == 0:
                    for inherited in (listener, events, *set(forks.values())):
                        inherited.close()
                    _run(server, launcher, request, streams)
                fork = _Fork(pid, os.pidfd_open(pid), launcher)
                forks[fork.end] = forks[launcher.fileno()] = fork
                events.register(fork.end, select.EPOLLIN)
                events.register(launcher, select.EPOLLRDHUP)
            for stream in streams:
                os.close(stream)
        elif descriptor == forks[descriptor].end:
            fork = forks[descriptor]
            for one in {descriptor, fork.launcher.fileno()} & forks.keys():
                events.unregister(one)  # closing does not, while a fork that has just begun has a copy
                del forks[one]
            fork.report_end()
        else:
            events.unregister(descriptor)
            forks.pop(descriptor).kill()


def _requested(launcher: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """A launcher's request and its streams; None if this server cannot fork for it."""
    from goaly.base.process import is_own_user

    launcher.settimeout(REQUEST_SECONDS)
    try:
        sent, streams, _, _ = socket.recv_fds(launcher, REQUEST_BYTES, 3)
    except OSError:
        return None, []
    request = json.loads(sent or b"null") if is_own_user(launcher) else None
    is_served = request is not None and request["threads"] == os.environ["OMP_NUM_THREADS"]
    return request if is_served else None, streams


def _import(modules: Sequence[str]) -> None:
    from goaly.base.process import give_up, import_ahead

    import_ahead(modules)
    if len(os.listdir("/proc/self/task")) > 1:
        give_up(f"a fork would lack the threads that one of {', '.join(modules)} started")


def _run(server: int, launcher: socket.socket, request: dict[str, Any], streams: Sequence[int]) -> NoReturn:
    """Be the process that the launcher stands for."""
    import runpy
    import traceback

    from goaly.base.process import die_with, exit_quickly

    die_with(server)
    launcher.settimeout(ANSWER_SECONDS)
    try:
        launcher.send(b"ready")
        if launcher.recv(8) != b"run":
            os._exit(1)
    except OSError:  # the launcher ended, or started alone
        os._exit(1)
    launcher.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    _set_stop_signals(signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[0] = request["folder"]  # as `python -m` has it
    os.sched_setaffinity(0, request["cores"])
    sys.argv = [request["program"]]
    try:
        runpy.run_module(request["program"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    exit_quickly(code)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(socket.socket(fileno=int(sys.argv[2])))
    else:
        launch(*sys.argv[2:6], modules=sys.argv[6:])
