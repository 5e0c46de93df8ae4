"""A checkpoint appears whole or not at all, and a damaged one is passed over."""

import shutil
from pathlib import Path

import pytest

from goaly.journal import checkpoint_folder as checkpoint
from goaly.journal.checkpoint_folder import Checkpoint, Checkpoints, read_checkpoint


def save(checkpoints: Checkpoints, step: int) -> Path:
    folder = checkpoints.begin(step)
    (folder / "trainer").mkdir()
    (folder / "trainer" / "0.distcp").write_bytes(bytes([step]) * 1000)
    (folder / "queue.json").write_text("{}")
    return checkpoints.commit(step, {"log": [0, 24]}).folder


def newest(folder: Path) -> Path | None:
    found = Checkpoints(folder).newest()
    return None if found is None else found.folder


def test_the_newest_checkpoint_has_its_step_facts_and_files(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest() is None
    save(checkpoints, 9)
    folder = save(checkpoints, 10)
    found = Checkpoints(tmp_path).newest()
    assert found is not None
    assert (found.folder, found.step, found.facts) == (folder, 10, {"log": [0, 24]})
    assert (folder / "trainer" / "0.distcp").read_bytes() == bytes([10]) * 1000


def test_a_checkpoint_whose_writer_died_is_not_there_and_its_rest_goes_with_the_next(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    kept = save(checkpoints, 1)
    (checkpoints.begin(2) / "half").write_bytes(b"half")
    assert newest(tmp_path) == kept  # journal-4
    save(checkpoints, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001", "000003"]


@pytest.mark.parametrize("step", ["files", "manifest", "rename"])
def test_a_commit_that_fails_at_any_step_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    checkpoints = Checkpoints(tmp_path)
    kept = save(checkpoints, 1)
    folder = checkpoints.begin(2)
    (folder / "a").write_text("a")

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    target = {
        "files": (checkpoint, "_file_entry"),
        "manifest": (checkpoint, "sync"),
        "rename": (checkpoint.os, "rename"),
    }
    with monkeypatch.context() as patched:
        patched.setattr(*target[step], fail)
        with pytest.raises(OSError, match="No space"):
            checkpoints.commit(2, {})
    assert newest(tmp_path) == kept  # journal-4


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest", "no manifest"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path)
    kept, folder = save(checkpoints, 1), save(checkpoints, 2)
    file, manifest = folder / "trainer" / "0.distcp", folder / "manifest.json"
    match damage:
        case "flip":
            file.write_bytes(bytes([3]) + file.read_bytes()[1:])
        case "cut":
            file.write_bytes(file.read_bytes()[:-1])
        case "remove":
            file.unlink()
        case "manifest":
            manifest.write_text(manifest.read_text().replace('"step": 2', '"step": 3'))
        case "no manifest":
            manifest.unlink()
    assert newest(tmp_path) == kept
    assert f"checkpoint {folder} is skipped" in caplog.text
    assert ("manifest.json" if "manifest" in damage else "0.distcp") in caplog.text


def test_pruning_keeps_the_newest_sound_ones(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in range(1, 6):
        save(checkpoints, step)
    (tmp_path / "000004" / "queue.json").unlink()
    checkpoints.prune(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000003", "000004", "000005"]


def test_pruning_reads_each_checkpoint_once_and_again_only_if_its_files_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        save(checkpoints, step)
    found = []

    def counted(folder: Path) -> Checkpoint:
        found.append(folder.name)
        return read_checkpoint(folder)

    monkeypatch.setattr(checkpoint, "read_checkpoint", counted)
    assert checkpoints.prune(2) == 1
    assert found == []  # it has written them itself
    resumed = Checkpoints(tmp_path)
    assert resumed.newest() is not None
    save(resumed, 3)
    assert resumed.prune(3) == resumed.prune(3) == 1
    assert found == ["000002", "000001"]
    changed = tmp_path / "000002" / "queue.json"
    changed.write_text(changed.read_text()[::-1])
    assert resumed.prune(2) == 1
    assert found == ["000002", "000001", "000002"]
    assert checkpoints.prune(4) is None


def test_the_oldest_sound_checkpoint_of_at_least_a_step_is_found(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in range(1, 5):
        save(checkpoints, step)
    (tmp_path / "000002" / "queue.json").unlink()
    found = [checkpoints.oldest(at_least=step) for step in (0, 2, 5)]
    assert [None if one is None else one.step for one in found] == [1, 3, None]


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "FORMAT", 9)
        folder = save(Checkpoints(tmp_path), 1)
    with pytest.raises(ValueError, match="has format 9, this goaly reads format 1"):
        read_checkpoint(folder)


def test_a_moved_checkpoint_is_still_sound(tmp_path: Path) -> None:
    shutil.move(save(Checkpoints(tmp_path / "a"), 1), tmp_path / "b")
    assert read_checkpoint(tmp_path / "b").step == 1


def test_a_checkpoint_takes_the_place_of_a_damaged_one_of_the_same_step(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    damaged = save(checkpoints, 2)
    (damaged / "queue.json").write_text("no")
    assert newest(tmp_path) != damaged
    assert save(checkpoints, 2) == newest(tmp_path) == damaged
    (tmp_path / "000009.bak").mkdir()  # is nobody's
    assert newest(tmp_path) == damaged
