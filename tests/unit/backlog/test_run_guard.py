"""What a run does when its guard sees a collapse."""

import asyncio
from typing import Any

import pytest

from goaly.backlog.guard_settings import GuardSettings
from goaly.backlog.run_guard import RunGuard
from goaly.base.errors import RunFailed


class Followed:
    """A guard of a run whose `sampler_kl` is given, with a window of two steps."""

    def __init__(self, action: Any, earlier: tuple[float, ...] = ()):
        self.said: list[str] = []
        self.bounds: list[int | None] = []
        self.version = len(earlier)
        settings = GuardSettings(action=action, window=2)
        self.guard = RunGuard(settings, [{"sampler_kl": kl} for kl in earlier], self._tighten, self.said.append)

    async def _tighten(self, bound: int | None) -> None:
        self.bounds.append(bound)

    def steps(self, *divergences: float) -> None:
        for kl in divergences:
            self.version += 1
            asyncio.run(self.guard.act(self.version, self.guard.observe({"sampler_kl": kl})))


def test_a_collapse_is_said_once_and_said_again_only_after_it_was_over():
    run = Followed("report")
    run.steps(0.0, 2.0, 2.0)
    assert len(run.said) == 1
    assert "collapse at version 2: sampler_kl" in run.said[0]
    run.steps(0.0, 0.0, 2.0)
    assert len(run.said) == 2
    assert run.bounds == []


def test_admission_is_tightened_at_the_first_signal_and_restored_a_window_after_the_last():
    run = Followed("tighten")
    run.steps(0.0, 2.0, 2.0)
    assert run.bounds == [0]
    run.steps(0.0, 0.0)  # the window of the first still has a 2
    assert run.bounds == [0]
    run.steps(0.0)
    assert run.bounds == [0, None]


def test_a_run_that_is_resumed_in_a_collapse_is_tightened_again():
    run = Followed("tighten", earlier=(2.0, 2.0))
    run.steps(2.0)
    assert run.bounds == [0]


def test_stop_ends_the_run_with_the_signals_and_what_to_do():
    run = Followed("stop")
    with pytest.raises(RunFailed, match=r"collapsed at version 2: sampler_kl.*--resume with guard.action=report"):
        run.steps(0.0, 2.0)
    resumed = Followed("stop", earlier=(0.0, 2.0))
    resumed.steps(2.0)  # it has ended once for this collapse


def test_a_guard_that_is_off_sees_nothing():
    run = Followed("off", earlier=(2.0, 2.0))
    run.steps(2.0, 2.0)
    assert run.said == run.bounds == []
