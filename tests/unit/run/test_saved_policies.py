"""Policies that a run keeps beside its final one: which folders are there, and that each is whole."""

import json
import shutil
from pathlib import Path

import pytest

from goaly.base.atomic_files import put_in_place
from goaly.base.errors import RunFailed
from goaly.plan.run_config import SaveSettings
from goaly.rollout.evaluation import EvalResult, Evaluation
from goaly.run.saved_policies import SavedPolicies

NO_SPACE = "trainer.save failed: OSError: [Errno 28] No space left on device"


class Trainer:
    """A trainer whose policy is a file with its version in it."""

    def __init__(self) -> None:
        self.disk_is_full = False
        self.saves: list[int] = []

    async def save_version(self, policy_version: int, folder: Path) -> None:
        """Write the folder as the trainer does."""
        if self.disk_is_full:
            raise RunFailed(NO_SPACE)
        self.saves.append(policy_version)
        staging = folder.with_name(f".{folder.name}.partial")
        staging.mkdir(parents=True)
        (staging / "model.safetensors").write_text(str(policy_version))
        put_in_place(staging, folder)
        shutil.rmtree(staging, ignore_errors=True)


def evaluation(policy_version: int, pass_at_1: float) -> Evaluation:
    """An evaluation of two sets; the second one is always solved."""

    def result(value: float) -> EvalResult:
        return EvalResult(prompts=20, samples_per_prompt=1, pass_at={1: value}, average=value)

    return Evaluation(policy_version=policy_version, results={"first": result(pass_at_1), "second": result(1.0)})


def saved(folder: Path) -> dict[str, str]:
    """The version in each folder that is there, by name."""
    return {path.name: (path / "model.safetensors").read_text() for path in sorted(folder.iterdir())}


def best(folder: Path) -> dict[str, object]:
    """The record of the best policy."""
    return json.loads((folder / "best" / "policy_score.json").read_text())


async def test_periodic_policies_are_those_of_the_newest_versions_that_are_kept(tmp_path: Path) -> None:
    trainer, policies = Trainer(), SavedPolicies(tmp_path / "policies", SaveSettings(every=3, keep=2), "first")
    for version in range(1, 14):
        await policies.save(version, trainer, candidate=True)
    assert trainer.saves == [3, 6, 9, 12]
    assert saved(tmp_path / "policies") == {"000009": "9", "000012": "12"}
    for version in (999_999, 1_000_002, 1_000_005):
        await policies.save(version, trainer, candidate=True)
    assert saved(tmp_path / "policies") == {"1000002": "1000002", "1000005": "1000005"}


@pytest.mark.parametrize("every", [None, 2], ids=["candidates alone", "candidates that are periodic ones too"])
async def test_the_best_policy_is_the_first_with_the_highest_score_across_starts(
    every: int | None, tmp_path: Path
) -> None:
    folder, trainer, settings = tmp_path / "policies", Trainer(), SaveSettings(every=every, best=True)
    policies = SavedPolicies(folder, settings, "first")
    kept = []
    for version, score in [(2, 0.0), (4, 0.5), (6, 0.25), (8, 0.5), (10, 0.75), (12, 0.5)]:
        if version == 8:
            policies = SavedPolicies(folder, settings, "first")  # the run was stopped and resumed
        await policies.save(version, trainer, candidate=True)
        await policies.save(version + 1, trainer, candidate=False)  # training goes on while the evaluation runs
        await policies.scored(evaluation(version, score))
        kept.append(saved(folder)["best"])
    assert kept == ["2", "4", "4", "4", "10", "10"]
    assert best(folder) == {"policy_version": 10, "set": "first", "pass@1": 0.75}
    assert trainer.saves == [2, 4, 6, 8, 10, 12]  # each is written once
    periodic = {} if every is None else {f"{version:06d}": str(version) for version in trainer.saves}
    assert saved(folder) == {"best": "10"} | periodic
    assert not any((path / "policy_score.json").exists() for path in folder.glob("0*"))


async def test_a_full_disk_costs_one_warning_for_each_save_and_no_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, trainer = tmp_path / "policies", Trainer()
    policies = SavedPolicies(folder, SaveSettings(every=4, best=True), "first")
    await policies.save(2, trainer, candidate=True)
    await policies.scored(evaluation(2, 0.25))
    trainer.disk_is_full = True
    for version in (4, 6):
        await policies.save(version, trainer, candidate=True)
        await policies.scored(evaluation(version, 0.5))
    assert saved(folder) == {"best": "2"}
    assert best(folder)["policy_version"] == 2
    assert caplog.messages == [
        f"saving policy version 4 in {folder / '000004'} failed: {NO_SPACE}",
        f"saving policy version 6 in {folder / '.candidate'} failed: {NO_SPACE}",
    ]
    trainer.disk_is_full = False
    await policies.save(8, trainer, candidate=True)
    await policies.scored(evaluation(8, 0.5))
    assert saved(folder) == {"000008": "8", "best": "8"}


async def test_a_disk_that_is_full_when_the_score_is_known_keeps_the_best_policy_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, trainer = tmp_path / "policies", Trainer()
    policies = SavedPolicies(folder, SaveSettings(best=True), "first")
    await policies.save(2, trainer, candidate=True)
    await policies.scored(evaluation(2, 0.25))
    await policies.save(4, trainer, candidate=True)

    def full(path: Path, text: str) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        await policies.scored(evaluation(4, 0.5))
    assert saved(folder) == {"best": "2"}
    assert caplog.messages == ["keeping policy version 4 as the best failed: [Errno 28] No space left on device"]


async def test_a_process_that_dies_while_it_removes_or_sets_aside_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, trainer, settings = tmp_path / "policies", Trainer(), SaveSettings(every=2, keep=1, best=True)
    policies = SavedPolicies(folder, settings, "first")
    await policies.save(2, trainer, candidate=True)  # its score never comes
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)
        await policies.save(4, trainer, candidate=False)  # version 2 is removed, but not its files
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} == {"000004"}
    assert len(list(folder.glob(".*"))) > 0
    SavedPolicies(folder, settings, "first")
    assert saved(folder) == {"000004": "4"}


async def test_the_end_of_a_run_removes_a_candidate_without_a_score(tmp_path: Path) -> None:
    policies = SavedPolicies(tmp_path / "policies", SaveSettings(best=True), "first")
    policies.close()  # before anything was saved
    await policies.save(2, Trainer(), candidate=True)
    policies.close()
    assert list((tmp_path / "policies").iterdir()) == []


async def test_a_damaged_score_is_told_and_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "policies"
    (folder / "best").mkdir(parents=True)
    (folder / "best" / "policy_score.json").write_text('{"pass')
    policies = SavedPolicies(folder, SaveSettings(best=True), "first")
    assert "the next one replaces it" in caplog.text
    await policies.save(2, Trainer(), candidate=True)
    await policies.scored(evaluation(2, 0.0))
    assert best(folder)["policy_version"] == 2
