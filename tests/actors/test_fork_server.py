"""Processes that start as forks of a fork server, and the deaths of all that take part."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from monarch.actor import Actor, endpoint
from spawned import spawn

from goaly.base.process import import_ahead
from goaly.plan.placement import IMPORTS
from goaly.run.fork_server import FORKED, LAUNCHER, ForkServer
from tests.actors.forked_program import ENDS
from tests.loop.launched import alive, children, gone_within

HERE = Path(__file__).parent
PROGRAM = "forked_program"
OWNER = """
import os, sys, time
from pathlib import Path
from goaly.run.fork_server import ForkServer
print(ForkServer(1, Path(sys.argv[1])).name, flush=True)
input()
os.execv("/bin/sleep", ["sleep", "1000"])
"""
PARENT = f"""
import os, subprocess, sys
from goaly.run.fork_server import LAUNCHER
subprocess.Popen([sys.executable, *LAUNCHER, sys.argv[1], str(os.getpid()), "1", "{PROGRAM}"]).wait()
"""
Launch = Callable[..., "subprocess.Popen[str]"]
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def finds_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes that a test starts find the modules beside this one."""
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{os.environ.get('PYTHONPATH', '')}")


@pytest.fixture
def server(tmp_path: Path, finds_the_program: None) -> Iterator[ForkServer]:
    one = ForkServer(1, tmp_path / "fork_server.log")
    yield one
    one.close()


@pytest.fixture
def launch(finds_the_program: None) -> Iterator[Launch]:
    """Start a launcher of the program; all are killed at the end."""
    launched = []

    def start(name: str, *modules: str, threads: int = 1, ends: str = "never", **given: Any) -> "subprocess.Popen[str]":
        environment = {**os.environ, "ENDS": ends}
        command = [sys.executable, *LAUNCHER, name, str(os.getpid()), str(threads), PROGRAM, *modules]
        launched.append(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **given
            )
        )
        return launched[-1]

    yield start
    for one in launched:
        one.kill()
        one.communicate()


def said(launcher: "subprocess.Popen[str]") -> dict[str, Any]:
    """What the program has found."""
    assert launcher.stdout is not None
    return json.loads(launcher.stdout.readline())


def process_of(server: ForkServer) -> int:
    """The server's process."""
    return server._process.pid


def test_a_fork_has_what_its_launcher_was_given_and_the_imports_of_the_server(
    server: ForkServer, launch: Launch, tmp_path: Path
) -> None:
    core = min(os.sched_getaffinity(0))
    launcher = launch(server.name, "fractions", cwd=tmp_path, preexec_fn=lambda: os.sched_setaffinity(0, {core}))
    found = said(launcher)
    assert os.path.samefile(f"/proc/{found['pid']}/fd/2", f"/proc/{launcher.pid}/fd/2")
    assert (found["folder"], found["cores"], found["environment"]["ENDS"]) == (str(tmp_path), [core], "never")
    assert "fractions" in found["imported"]
    assert found["pid"] in children(process_of(server))
    assert found["signals"] == [True, True]  # as of a new process, for its subprocesses
    assert len(found["files"]) == 4  # the three streams, and the folder that lists them


def test_what_an_import_sets_in_the_environment_is_set_in_every_fork(server: ForkServer, launch: Launch) -> None:
    for _ in range(2):
        assert said(launch(server.name, "sets_a_variable"))["environment"]["SET_BY_AN_IMPORT"] == "1"


@pytest.mark.parametrize("ends", [ends for ends in ENDS if ends != "never"])
@pytest.mark.parametrize("is_fork", [True, False])
def test_a_launcher_ends_as_its_program_does(server: ForkServer, launch: Launch, ends: str, is_fork: bool) -> None:
    launcher = launch(server.name if is_fork else "no-such-server", ends=ends)
    found = said(launcher)
    _, errors = launcher.communicate()
    assert (found["pid"] == launcher.pid) == (not is_fork)
    expected = {"normally": 0, "with a code": 3, "by a signal": -signal.SIGKILL}
    assert launcher.returncode == expected.get(ends, 1)
    assert {"with a message": "it failed", "with an error": "KeyError"}.get(ends, "") in errors


def test_a_fork_dies_with_its_launcher_and_no_other_does(server: ForkServer, launch: Launch) -> None:
    launchers = [launch(server.name) for _ in range(3)]
    forks = [said(launcher)["pid"] for launcher in launchers]
    launchers[1].kill()
    assert gone_within([forks[1]]) == []
    assert [alive(fork) for fork in forks] == [True, False, True]
    assert said(launch(server.name))["pid"] in children(process_of(server))


def test_a_fork_that_ends_while_another_starts_does_not_end_the_server(
    launch: Launch, tmp_path: Path, finds_the_program: None, monkeypatch: pytest.MonkeyPatch
) -> None:  # a fork begins with copies of the server's descriptors, also of those that tell it of the others' ends
    monkeypatch.setenv("HOLDS_FORKS", str(tmp_path / "lock"))
    server = ForkServer(1, tmp_path / "fork_server.log")
    first = launch(server.name)
    ending = said(first)["pid"]
    with (tmp_path / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        starting = launch(server.name, "slows_forks")
        while not set(children(process_of(server))) - {ending}:
            pass
        first.kill()
        assert gone_within([ending]) == []
    assert said(starting)["pid"] in children(process_of(server))
    assert said(launch(server.name))["pid"] in children(process_of(server))
    server.close()


def test_a_fork_and_its_launcher_die_with_the_server(server: ForkServer, launch: Launch) -> None:
    launcher = launch(server.name)
    fork = said(launcher)["pid"]
    os.kill(process_of(server), signal.SIGKILL)
    assert gone_within([fork]) == []
    assert launcher.wait() == -signal.SIGKILL


def test_a_launcher_outlives_the_thread_that_started_it(server: ForkServer, launch: Launch) -> None:
    started: list[Any] = []

    def start() -> None:
        started.append(launch(server.name))
        started.append(said(started[0])["pid"])

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    while Path(f"/proc/self/task/{thread.native_id}").exists():
        pass
    said(launch(server.name))  # a signal would have come by now
    launcher, fork = started
    assert (launcher.poll(), alive(fork)) == (None, True)


def test_a_launcher_and_its_fork_end_with_the_process_that_started_it(server: ForkServer) -> None:
    command = [sys.executable, "-c", PARENT, server.name]
    environment = {**os.environ, "ENDS": "never"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        fork = said(parent)["pid"]
        launchers = children(parent.pid)
        parent.kill()
        assert gone_within([*launchers, fork]) == []


@pytest.mark.parametrize("end", ["is killed", "becomes another program"])
def test_a_fork_server_and_its_forks_end_with_their_owner(launch: Launch, tmp_path: Path, end: str) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path / "fork_server.log")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        name = owner.stdout.readline().strip()
        (server,) = children(owner.pid)
        fork = said(launch(name))["pid"]
        if end == "is killed":
            owner.kill()
        else:
            owner.stdin.write("\n")
            owner.stdin.flush()
        assert gone_within([server, fork]) == []
        owner.kill()


def test_signals_that_stop_a_run_end_neither_launcher_nor_server_nor_fork_before_the_controller_does(
    server: ForkServer, launch: Launch
) -> None:
    launcher = launch(server.name)
    said(launcher)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(launcher.pid, number)
        os.kill(process_of(server), number)
    assert said(launch(server.name))["pid"] in children(process_of(server))
    assert launcher.poll() is None


def test_a_program_with_other_threads_starts_alone(server: ForkServer, launch: Launch) -> None:
    launcher = launch(server.name, threads=2)
    assert said(launcher)["pid"] == launcher.pid
    assert said(launch(server.name))["pid"] in children(process_of(server))  # which serves on


def test_where_an_import_starts_a_thread_the_server_ends_and_processes_start_alone(
    server: ForkServer, launch: Launch, tmp_path: Path
) -> None:
    process = process_of(server)
    for _ in range(2):
        launcher = launch(server.name, "imports_a_thread")
        assert said(launcher)["pid"] == launcher.pid
    assert gone_within([process]) == []
    assert "that one of imports_a_thread started" in (tmp_path / "fork_server.log").read_text()


@pytest.mark.parametrize("answers", [False, True])
def test_a_launcher_whose_server_closes_the_line_starts_alone_unless_a_fork_may_run(
    launch: Launch, answers: bool
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        name = f"goaly-test-{os.getpid()}"
        server.bind(f"\0{name}")
        server.listen()
        launcher = launch(name)
        line, _ = server.accept()
        with line:
            line.recv(1 << 18)
            if answers:
                line.send(b"ready")
                assert line.recv(8) == b"run"
        if answers:
            assert launcher.wait() == -signal.SIGKILL
        else:
            assert said(launcher)["pid"] == launcher.pid


def test_a_fork_that_is_not_told_to_run_does_not(server: ForkServer, launch: Launch, tmp_path: Path) -> None:
    first = said(launch(server.name))["pid"]
    request = {"threads": "1", "program": PROGRAM, "modules": [], "folder": str(tmp_path), "cores": [0]}
    request["environment"] = {**os.environ, "ENDS": "normally"}
    with (tmp_path / "output").open("wb") as output:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.connect(f"\0{server.name}")
            socket.send_fds(line, [json.dumps(request).encode()], [output.fileno()] * 3)
            assert line.recv(8) == b"ready"
            (fork,) = set(children(process_of(server))) - {first}
        assert gone_within([fork]) == []
    assert (tmp_path / "output").read_bytes() == b""


class Forked(Actor):
    """Says what its process had to import by itself."""

    @endpoint
    def imports(self, role: str) -> set[str]:
        before = set(sys.modules)
        import_ahead(IMPORTS[role])
        return {name.partition(".")[0] for name in set(sys.modules) - before}


@pytest.mark.parametrize("role", FORKED)
def test_a_fork_has_the_libraries_of_its_role(role: str) -> None:
    mesh = spawn(role)
    assert mesh.spawn("forked", Forked).imports.call_one(role).get() <= {"goaly", "monarch"}
    mesh.stop().get()
