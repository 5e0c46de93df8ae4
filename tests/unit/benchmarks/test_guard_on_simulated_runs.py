"""The guard on the simulated runs of `bench.lost_tokens`."""

import pytest

from bench.lost_tokens import ARMS, learn
from goaly.backlog.collapse_guard import CollapseGuard
from goaly.backlog.guard_settings import GuardSettings

UNSTABLE = ("icepop, either sign", 32, 0.8)
"""An arm, a bound and a learning rate at which every run collapses."""


@pytest.mark.timeout(120)
def test_of_simulated_runs_it_fires_on_those_that_collapse_and_on_none_that_learn():
    healthy, collapsing = (learn(ARMS[arm], bound, 8, lr=lr) for arm, bound, lr in (("grpo", 8, 0.06), UNSTABLE))
    for run in healthy:
        assert run.pass_at_1 > 0.99
        guard = CollapseGuard(GuardSettings())
        assert not any(guard.observe(step).is_collapse for step in run.steps)
    assert max(run.pass_at_1 for run in collapsing) < 0.7
    for run in collapsing:
        guard = CollapseGuard(GuardSettings())
        assert any(guard.observe(step).is_collapse for step in run.steps[:20])
