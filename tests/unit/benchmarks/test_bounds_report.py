"""What runs at several staleness bounds come to."""

from dataclasses import replace

import pytest

from bench.bounds import Runs, numbers
from bench.recipes import Finished

RUN = Finished(
    recipe="bound/0",
    settings="s",
    seed=100,
    pass_at_1_before=0.4,
    pass_at_1=0.9,
    area=0.8,
    seconds=60.0,
    policy_version=160,
    rejected=0,
    failed=0,
)


def test_bounds_are_compared_seed_by_seed_on_the_seeds_that_all_of_them_have() -> None:
    fresh = [replace(RUN, seed=seed, area=area) for seed, area in ((100, 0.8), (101, 0.6), (102, 0.9))]
    stale = [replace(RUN, seed=seed, area=area) for seed, area in ((101, 0.5), (100, 0.7))]
    found = numbers({0: fresh, 8: stale})
    assert found[0]["area"].mean == pytest.approx(0.7)
    assert found[8]["loss of area"].mean == pytest.approx(0.1)
    assert found[8]["loss of area"].half_width == pytest.approx(0.0, abs=1e-9)
    assert found[8]["loss of area"].count == 2
    none: Runs = {0: fresh, 8: []}
    with pytest.raises(SystemExit, match="no seed"):
        numbers(none)
