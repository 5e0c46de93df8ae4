"""A whole run whose versions travel by TorchStore, where it is installed."""

from collections.abc import Callable

import pytest
from launched import LaunchedRun

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]


def test_a_run_trains_on_weights_that_travel_by_torchstore(launch: Callable[..., LaunchedRun]) -> None:  # weights-4
    pytest.importorskip("torchstore")
    run = launch("steps=4", "weights.transport=torchstore", "backlog.max_staleness=1")
    assert run.wait(150) == 0, run.text()
    assert run.summary()["trained"] == 2 * 4
    assert [step["policy_version"] for step in run.lines("metrics.jsonl")] == [1, 2, 3, 4]
    assert run.lines("metrics.jsonl")[-1]["age/max"] <= 1 + 1  # the generator followed
    assert run.text().splitlines()[-1].startswith("held-out pass@1: ")  # nothing failed to close, nothing else printed
