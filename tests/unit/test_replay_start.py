"""Where a replay begins."""

from pathlib import Path

import pytest

from goaly.base.errors import RunFailed
from goaly.journal.checkpoint_folder import Checkpoints
from goaly.journal.records import Resumed, Snapshot
from goaly.journal.run_log import RunLog, delete_before
from goaly.replay import Asked, start_of


def run_of(folder: Path, *, snapshots: tuple[int, ...] = (2, 4), checkpoints: tuple[int, ...] = (2, 4, 6)) -> Path:
    """A run folder with these snapshots and checkpoints."""
    log = RunLog(folder / "log")
    log.record(Resumed(policy_version=0, trainer={}))
    for version in snapshots:
        log.record(Snapshot(policy_version=version, queue={}, passes={}, records=()))
    log.close()
    for step in checkpoints:
        Checkpoints(folder / "checkpoints").begin(step)
        Checkpoints(folder / "checkpoints").commit(step, {})
    return folder


def asked(folder: Path, *, to: int | None = None, check: bool = False, same: bool = True) -> Asked:
    return Asked(run_dir=folder, config=None, same=same, to=to, check=check, into=None)


def step_of(request: Asked) -> int | None:
    found = start_of(request)
    return None if found is None else found.step


def test_a_replay_begins_at_the_newest_checkpoint_or_where_all_versions_are_wanted_at_the_first_version(
    tmp_path: Path,
) -> None:
    folder = run_of(tmp_path)
    assert [step_of(asked(folder, to=to)) for to in (None, 5, 1)] == [6, 4, None]
    assert step_of(asked(folder, check=True)) is None
    assert step_of(asked(folder, same=False)) is None


def test_without_the_beginning_of_the_log_a_replay_begins_at_the_oldest_checkpoint_that_the_log_goes_on_from(
    tmp_path: Path,
) -> None:
    folder = run_of(tmp_path)
    delete_before(folder / "log", 5)
    assert [step_of(asked(folder, to=to)) for to in (None, 5)] == [6, 4]
    assert step_of(asked(folder, check=True)) == step_of(asked(folder, same=False)) == 4
    for request in (asked(folder, to=3), asked(folder, to=3, check=True)):
        with pytest.raises(RunFailed, match=r"log begins at policy version 4, and no checkpoint .* version 3 is left"):
            start_of(request)
