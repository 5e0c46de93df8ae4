"""How SIGINT and SIGTERM end a run."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from goaly.run.launch import _StopSignals

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """The signals' handlers are as before when the test ends."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


async def ended_by(number: int, run: Any, monkeypatch: pytest.MonkeyPatch) -> list[asyncio.TimerHandle]:
    """Send the signal to a run, wait until its task is cancelled, and return the timers that were set."""
    loop, timers = asyncio.get_running_loop(), []
    call_later = loop.call_later

    def call_later_seen(*arguments: Any, **options: Any) -> asyncio.TimerHandle:
        timers.append(call_later(*arguments, **options))
        return timers[-1]

    async def script() -> None:
        signals = _StopSignals(grace_seconds=1000.0)
        signals.run = run
        monkeypatch.setattr(loop, "call_later", call_later_seen)
        os.kill(os.getpid(), number)
        await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(script())
    return timers


async def test_ctrl_c_ends_a_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await ended_by(signal.SIGINT, SimpleNamespace(), monkeypatch) == []


@pytest.mark.parametrize("trains", [True, False])
async def test_sigterm_ends_a_run_after_its_step_and_its_time_limit_does_not_interrupt_the_end(
    trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_after_step(stop: Callable[[], object]) -> bool:
        if trains:
            asyncio.get_running_loop().call_soon(stop)
        return trains

    (too_late,) = await ended_by(signal.SIGTERM, SimpleNamespace(stop_after_step=stop_after_step), monkeypatch)
    assert too_late.cancelled()


async def test_a_step_that_takes_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_later", lambda seconds, call: loop.call_soon(call) if seconds == 1000.0 else None)

    async def script() -> None:
        _StopSignals(grace_seconds=1000.0).run = SimpleNamespace(stop_after_step=lambda stop: True)  # type: ignore
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(script())
