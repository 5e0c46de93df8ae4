"""A run whose processes are killed at random moments, its controller among them: `bench.chaos` in small."""

import os
import random
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress

import pytest
from launched import (
    REWARDED,
    START_SECONDS,
    LaunchedRun,
    gone_within,
    orphaned_memory,
    orphaned_within,
    replayed,
)

from bench.chaos import accounts

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

VICTIMS = ("critic", "rollout", "generator", "reference", "trainer", "controller")
REFRESH_EVERY = 10
STEPS_AFTER = 8
"""Steps after the last kill, which is the controller's."""
LONGEST_PAUSE = 2.0
"""Seconds between two kills: some hit a run that recovers, some one that trains."""


def going(run: LaunchedRun, launch: Callable[..., LaunchedRun], seconds: float) -> LaunchedRun:
    """The run after this time, resumed if it has ended."""
    with suppress(subprocess.TimeoutExpired):
        assert run.process.wait(seconds) != 0, run.text()
        return launch(resume=run, app="ppo")
    return run


def test_eight_kills_at_any_moment_lose_no_prompt_and_change_no_weight(launch: Callable[..., LaunchedRun]) -> None:
    chance = random.Random(0)
    before = orphaned_memory()
    settings = [REWARDED, "checkpoint.every=5", "checkpoint.restarts=3", "backlog.max_staleness=2"]
    settings += ["loss.kl_coef=0.001", f"reference.refresh_every={REFRESH_EVERY}"]
    run = launch("steps=1000", *settings, app="ppo")
    run.wait_for_steps(7)
    generators, seen = run.spawned("generator"), set(run.processes())
    run.kill("trainer")
    run.wait_for_text("batches again", START_SECONDS)
    run.wait_for_text("trainer-1 serves in its place", START_SECONDS)
    run.kill("hub")
    for role in ("hub-1", "trainer-2", "reference-1", "critic-1", "rollout-0-1"):
        run.wait_for_text(f"{role} serves in its place", START_SECONDS)
    assert run.spawned("generator") == generators  # which worked on

    for victim in VICTIMS:
        killed = False
        while not killed:
            run = going(run, launch, chance.uniform(0.0, LONGEST_PAUSE))
            seen |= set(run.processes())
            for pid in [run.process.pid] if victim == "controller" else run.spawned(victim):
                with suppress(ProcessLookupError):  # it died with another one
                    os.kill(pid, signal.SIGKILL)
                    killed = True
    run.wait()
    steps = run.steps() + STEPS_AFTER
    while run.wait(START_SECONDS) != 0:  # at first because the controller was killed, later if a role died too often
        run = launch(f"steps={steps}", resume=run, app="ppo")

    assert [step["policy_version"] for step in run.lines("metrics.jsonl")] == list(range(1, steps + 1))
    log = (run.folder / "logs" / "controller.log").read_text()
    assert not [text for text in ("when it was made first", "no longer in the weight store") if text in log]
    assert all(step["grad_norm"] > 0 for step in run.lines("metrics.jsonl"))
    references = [step["reference/version"] for step in run.lines("metrics.jsonl")]
    assert references == [batch - batch % REFRESH_EVERY for batch in range(steps)]  # run-11
    found = accounts(run.folder)
    assert found["trained"] == 2 * steps
    assert {key: found[key] for key in ("lost", "doubled", "failed", "unaccounted")} == {
        "lost": 0,
        "doubled": 0,
        "failed": 0,
        "unaccounted": 0,
    }
    checked = replayed(run, "--check")
    assert f"{steps} digests are as recorded" in checked.stdout, checked.stdout + checked.stderr
    assert gone_within(list(seen)) == []
    assert orphaned_within(before) == set()
