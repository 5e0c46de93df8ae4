"""What the controller makes of processes that end, fall silent or cannot be reached, without any process."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from goaly.base.config import load
from goaly.base.errors import RunFailed
from goaly.base.process import FATAL, ExitWatch, ProcessMark, process_mark
from goaly.plan.run_config import RunConfig
from goaly.run import process_watch as watch
from goaly.run.process_watch import (
    START_SECONDS,
    TICKS,
    ProcessWatch,
    answered_within,
    descendant_that_logs_to,
    fatal_reason,
    tick_of,
)
from goaly.run.run import Run
from tests.unit.stalled import Stalls

LIMIT = 60.0
ELSEWHERE = ProcessMark(host="another host", pid=7, started=0)


async def never() -> Any:
    await asyncio.Event().wait()


async def mark() -> ProcessMark:
    return ELSEWHERE


async def beats() -> bool:
    return True


class Endpoint:
    def __init__(self, answer: Callable[[], Awaitable[Any]]):
        self._answer = answer
        self.calls = 0

    async def call_one(self) -> Any:
        self.calls += 1
        return await self._answer()


class Mesh:
    """A mesh of one process, which answers as it is told."""

    def __init__(self) -> None:
        self.mark, self.beat = Endpoint(mark), Endpoint(beats)

    def spawn(self, *_: Any) -> "Mesh":
        return self

    flatten = spawn

    def slice(self, *, rank: int) -> "Mesh":
        assert rank == 0
        return self


@pytest.fixture
def told() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "trainer.log"


@pytest.fixture
def child(log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that logs to the file and does nothing else."""
    with log.open("ab") as file, subprocess.Popen(["sleep", "100"], stderr=file) as sleeper:
        yield sleeper
        sleeper.kill()


def say(log: Path, *lines: str) -> None:
    log.write_text("".join(f"{line}\n" for line in lines))


def watching(mesh: Any, told: list[tuple[str, str]], log: Path, limit: float | None = LIMIT) -> ProcessWatch:
    return ProcessWatch("trainer", mesh, logs=[log], silent_seconds=limit, on_lost=lambda *report: told.append(report))


async def starting(
    monkeypatch: pytest.MonkeyPatch, told: list[tuple[str, str]], log: Path
) -> tuple[Stalls, ProcessWatch]:
    """A watch that has asked a process which does not answer yet."""
    stalls, mesh = Stalls(monkeypatch), Mesh()
    mesh.mark = Endpoint(never)
    watched = watching(mesh, told, log)
    await stalls.tick(0)
    return stalls, watched


async def test_a_process_that_answers_is_asked_again_and_never_lost(
    told: list[tuple[str, str]], log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalls, mesh = Stalls(monkeypatch), Mesh()
    watched = watching(mesh, told, log)
    for _ in range(3 * TICKS):
        await stalls.tick(tick_of(LIMIT))
    watched.kill()
    assert (told, mesh.beat.calls >= 3 * TICKS) == ([], True)


async def test_a_process_that_is_silent_for_the_limit_is_lost_with_its_reason(
    told: list[tuple[str, str]], log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalls, mesh = Stalls(monkeypatch), Mesh()
    say(log, "12:00 INFO goaly: starting", f"12:01 CRITICAL goaly.base.process: {FATAL}thread engine failed: boom")
    watched = watching(mesh, told, log)
    await stalls.tick(0)
    mesh.beat = Endpoint(never)
    ticks = 0
    while not told:
        assert ticks <= LIMIT / tick_of(LIMIT) + 2
        await stalls.tick(tick_of(LIMIT))
        ticks += 1
    assert ticks >= LIMIT / tick_of(LIMIT)
    ((name, report),) = told
    assert name == "trainer"
    assert "process 7 has not answered for 60 s (hosts.silent_seconds): thread engine failed: boom; its log" in report
    watched.kill()


async def test_a_controller_that_was_stopped_for_an_hour_loses_nobody(
    told: list[tuple[str, str]], log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalls, mesh = Stalls(monkeypatch), Mesh()
    answers: list[asyncio.Event] = []

    async def late() -> bool:
        answers.append(asyncio.Event())
        await answers[-1].wait()
        return True

    mesh.beat = Endpoint(late)
    watched = watching(mesh, told, log)
    await stalls.tick(0)
    for _ in range(TICKS // 2):
        await stalls.tick(3600)  # the timers come before the answer that waits
    answers[-1].set()
    await stalls.tick(0)
    assert told == []
    watched.kill()


async def test_a_process_has_longer_to_start_but_not_for_ever(
    told: list[tuple[str, str]], log: Path, monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]
) -> None:
    stalls, watched = await starting(monkeypatch, told, log)
    ticks = round(START_SECONDS / tick_of(START_SECONDS))
    for _ in range(ticks - 1):
        await stalls.tick(tick_of(START_SECONDS))
        assert not told
    await stalls.tick(tick_of(START_SECONDS))
    await stalls.tick(tick_of(START_SECONDS))
    assert [name for name, _ in told] == ["trainer"]
    assert "has not started within 600 s" in told[0][1]
    assert child.wait(10) == -signal.SIGKILL
    watched.kill()


def stop(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGSTOP)
    assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])


def go_on(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGCONT)
    assert os.WIFCONTINUED(os.waitpid(child.pid, os.WCONTINUED)[1])


def test_a_child_is_found_by_its_own_log_only(log: Path, child: subprocess.Popen[bytes]) -> None:
    other = log.with_name("hub.log")
    other.touch()
    assert descendant_that_logs_to(log) == process_mark(child.pid)
    assert descendant_that_logs_to(other) is None
    assert descendant_that_logs_to(log.with_name("none.log")) is None


async def test_a_process_that_ends_before_its_first_answer_is_lost_at_once(
    told: list[tuple[str, str]], log: Path, monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]
) -> None:
    stalls, watched = await starting(monkeypatch, told, log)
    await stalls.tick(tick_of(LIMIT))
    child.kill()
    assert child.wait(10) == -signal.SIGKILL
    await stalls.tick(0)
    assert f"process {child.pid} ended" in told[0][1]
    watched.kill()


async def test_a_process_that_is_killed_before_its_first_answer_is_gone(
    told: list[tuple[str, str]], log: Path, monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]
) -> None:
    _, watched = await starting(monkeypatch, told, log)
    watched.kill()
    assert child.wait(10) == -signal.SIGKILL
    assert not told


async def test_a_process_that_is_stopped_before_its_first_answer_is_lost_after_the_limit_and_killed(
    told: list[tuple[str, str]], log: Path, monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]
) -> None:
    stalls, watched = await starting(monkeypatch, told, log)
    ticks = round(LIMIT / tick_of(LIMIT))
    for _ in range(2 * ticks):
        await stalls.tick(tick_of(LIMIT))
    assert not told  # it is slow
    stop(child)
    for _ in range(ticks - 1):
        await stalls.tick(10 * LIMIT)  # one tick of the controller
        assert not told
    await stalls.tick(tick_of(LIMIT))
    assert [name for name, _ in told] == ["trainer"]
    assert f"process {child.pid} has been stopped for 60 s before its first answer; its log is {log}" in told[0][1]
    assert child.wait(10) == -signal.SIGKILL
    watched.kill()


async def test_a_process_that_goes_on_before_the_limit_starts_its_time_again(
    told: list[tuple[str, str]], log: Path, monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]
) -> None:
    stalls, watched = await starting(monkeypatch, told, log)
    for _ in range(3):
        stop(child)
        for _ in range(round(LIMIT / tick_of(LIMIT)) - 1):
            await stalls.tick(tick_of(LIMIT))
        go_on(child)
        await stalls.tick(tick_of(LIMIT))
    assert not told
    watched.kill()


async def test_a_process_that_has_answered_is_judged_by_its_answers_alone(
    told: list[tuple[str, str]], log: Path, monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]
) -> None:
    stalls = Stalls(monkeypatch)
    watched = watching(Mesh(), told, log)
    await stalls.tick(0)
    stop(child)
    for _ in range(2 * TICKS):
        await stalls.tick(tick_of(LIMIT))
    assert not told
    watched.kill()


async def test_without_a_limit_a_silent_process_is_waited_for(
    told: list[tuple[str, str]], log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalls, mesh = Stalls(monkeypatch), Mesh()
    mesh.beat = Endpoint(never)
    watched = watching(mesh, told, log, None)
    for _ in range(3 * TICKS):
        await stalls.tick(LIMIT)
    assert (told, mesh.beat.calls) == ([], 0)
    watched.kill()


async def test_a_process_that_can_not_be_reached_is_told_once_and_not_once_it_is_being_stopped(
    told: list[tuple[str, str]], log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails() -> Any:
        raise ConnectionError("gone")

    stalls = Stalls(monkeypatch)
    for stopped in (True, False):
        mesh = Mesh()
        mesh.mark = Endpoint(fails)
        watched = watching(mesh, told, log)
        if stopped:
            watched.stop_reporting()
        await stalls.tick(LIMIT)
        watched.kill()
    assert [name for name, _ in told] == ["trainer"]
    assert "ConnectionError" in told[0][1]


async def test_an_answer_that_comes_in_time_is_given_and_one_that_fails_raises() -> None:
    assert await answered_within(beats(), 1) is True
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(answered_within(never(), None), 0.01)


async def test_a_callback_that_fails_in_the_controller_ends_the_run_with_its_error(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    argv = [f"model.path={tiny_model_folder}", "steps=9", "telemetry.tensorboard=false", "telemetry.progress=off"]
    run = Run(load(RunConfig, argv, prog="test", description="").config, tmp_path)

    def breaks() -> None:
        raise KeyError("sabotage")

    child = await asyncio.create_subprocess_exec("sleep", "100")
    ExitWatch(process_mark(child.pid), breaks)
    child.kill()
    with pytest.raises(RunFailed, match=r"the controller's callback ExitWatch\._exited failed: KeyError: 'sabotage'"):
        await asyncio.wait_for(run.alive(), 30)


def test_the_fatal_reason_is_the_last_one_that_the_process_logged(log: Path) -> None:
    assert fatal_reason(log) is None
    log.write_text("nothing of note\n")
    assert fatal_reason(log) is None
    with log.open("a") as file:
        file.write("x" * watch.TAIL_BYTES + f"\n{FATAL}first\n{FATAL}second\nTraceback\n")
    assert fatal_reason(log) == "second"
