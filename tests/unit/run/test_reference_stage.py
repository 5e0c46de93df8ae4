"""The reference stage over ranks that refresh themselves as the real ones do, and that die when they are told."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from goaly.base.actors import SupervisionError
from goaly.base.errors import RunFailed
from goaly.journal.checkpoint_folder import Checkpoint
from goaly.run import reference_stage
from goaly.run.reference_stage import ReferenceStage
from goaly.run.replaceable_actors import ReplaceableActors
from tests.unit.run.keeping import keep
from tests.virtual_time import turns

EVERY = 4


class Ranks:
    """A reference of one rank, whose weights are its version; dies in the endpoint that `dies_in` names."""

    def __init__(self, dies_in: str = ""):
        self.dies_in = dies_in
        self.version = self.copied = 0
        self.annotated: list[tuple[int, int]] = []
        """The batches, and the versions of their log-probs."""
        self.disk_error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        async def answer(*arguments: Any) -> Any:
            if name == self.dies_in:
                raise SupervisionError(f"died in {name}")
            return getattr(self, f"_{name}")(*arguments)

        return SimpleNamespace(stream=lambda *arguments: [answer(*arguments)])

    def _start(self, folder: Path | None) -> int:
        if folder is not None:
            self.version = int((folder / "weights").read_text())
        return self.version

    def _refresh(self, batch: Any) -> int:
        self.version = batch.id - batch.id % EVERY
        return self.version

    def _annotate(self, batch: Any) -> None:
        self._refresh(batch)
        self.annotated.append((batch.id, self.version))

    def _stage(self) -> int:
        self.copied = self.version
        return self.copied

    def _write(self, folder: Path) -> None:
        if self.disk_error is not None:
            raise self.disk_error
        folder.mkdir()
        (folder / "weights").write_text(str(self.copied))


class Run:
    """A reference stage whose ranks are replaced, the n-th time by the n-th of `others`."""

    def __init__(self, folder: Path, *ranks: Ranks):
        self.said: list[str] = []
        self.all = ranks
        self.folder = folder
        self.kept: ReplaceableActors[Any] = ReplaceableActors("reference", ranks[0])
        self.stage = ReferenceStage(self.kept, self.said.append, folder / "reference")

        async def replace(name: str) -> Ranks:
            new = ranks[int(name.split("-")[1])]
            await self.stage.restore(new)  # type: ignore[bad-argument-type]
            return new

        self.keeping = keep(self.kept, replace, limit=len(ranks) - 1, say=self.said.append)

    async def annotate(self, *batches: int) -> list[float]:
        """The versions that the metrics of these batches name."""
        found = []
        for number in batches:
            batch: Any = SimpleNamespace(id=number, metrics={})
            await self.stage.annotate(batch)
            found.append(batch.metrics["reference/version"])
        return found

    async def written(self, name: str = "checkpoint") -> str | None:
        """The weights in a checkpoint that is taken now."""
        await self.stage.stage()
        return await self.as_staged(name)

    async def as_staged(self, name: str) -> str | None:
        """The weights in a checkpoint whose state was copied before."""
        folder = self.folder / name
        folder.mkdir()
        await self.stage.write(folder / "reference")
        weights = folder / "reference" / "weights"
        return weights.read_text() if weights.exists() else None


@pytest.fixture
async def run(tmp_path: Path) -> Any:
    """Makes a run of these ranks, which is ended after the test."""
    runs: list[Run] = []

    async def make(*ranks: Ranks) -> Run:
        runs.append(Run(tmp_path, *ranks))
        await turns()
        return runs[-1]

    yield make
    for each in runs:
        each.keeping.cancel()


Make = Callable[..., Any]


@pytest.mark.parametrize("dies_in", ["refresh", "annotate", "stage", "write"])
async def test_new_ranks_have_the_weights_of_the_lost_ones_wherever_these_died(
    run: Make, dies_in: str
) -> None:  # run-11
    ranks = [Ranks(), Ranks(), Ranks()]
    one = await run(*ranks)
    await one.stage.start()
    assert await one.annotate(3, 4, 5) == [0.0, 4.0, 4.0]
    ranks[0].dies_in = dies_in
    assert await one.annotate(8) == [8.0]
    assert ranks[1].annotated[-1] == (8, 8)
    ranks[1].dies_in = "annotate"
    assert await one.annotate(9) == [8.0]
    assert ranks[2].annotated == [(9, 8)]


@pytest.mark.parametrize("dies_in", ["refresh", "annotate"])
async def test_new_ranks_begin_with_the_version_of_the_lost_ones(run: Make, dies_in: str) -> None:  # run-11
    ranks = [Ranks(), Ranks()]
    one = await run(*ranks)
    await one.stage.start()
    await one.annotate(4)
    began: list[int] = []
    ranks[0].dies_in = dies_in
    ranks[1]._annotate = lambda batch: began.append(ranks[1].version)  # type: ignore[method-assign]
    ranks[1]._refresh = lambda batch: ranks[1].version  # type: ignore[method-assign]
    assert await one.annotate(5) == [4.0]
    assert began == [4]


async def test_a_checkpoint_has_the_weights_of_its_step_though_they_were_refreshed_since(run: Make) -> None:
    one = await run(Ranks())
    await one.stage.start()
    assert await one.written("before the first refresh") is None
    await one.annotate(4)
    await one.stage.stage()
    await one.annotate(8)
    assert await one.as_staged("slow") == "4"
    assert await one.written("next") == "8"


async def test_a_run_goes_on_from_the_weights_of_its_checkpoint_not_from_newer_ones_of_its_earlier_life(
    run: Make, tmp_path: Path
) -> None:
    before = await run(Ranks())
    await before.stage.start()
    await before.annotate(4)
    checkpoint = Checkpoint(tmp_path / "checkpoint", 5, {})
    await before.written("checkpoint")
    await before.annotate(8, 12)
    ranks = [Ranks(), Ranks()]
    after = await run(*ranks)
    await after.stage.start(checkpoint)
    assert [one.name for one in (tmp_path / "reference").iterdir()] == ["000004"]
    (tmp_path / "checkpoint" / "reference" / "weights").unlink()  # as when an old checkpoint is removed
    ranks[0].dies_in = "refresh"
    assert await after.annotate(5, 8, 12) == [4.0, 8.0, 12.0]
    assert sorted(one.name for one in (tmp_path / "reference").iterdir()) == ["000012"]
    assert ranks[1].annotated == [(5, 4), (8, 8), (12, 12)]
    assert await after.written("another") == "12"


NO_SPACE = OSError(28, "No space left on device")


async def test_weights_that_cannot_be_written_are_written_for_a_later_checkpoint(run: Make) -> None:
    ranks = [Ranks()]
    one = await run(*ranks)
    await one.stage.start()
    ranks[0].disk_error = NO_SPACE
    assert await one.annotate(4, 5) == [4.0, 4.0]
    assert one.said == ["reference version 4 cannot be written: [Errno 28] No space left on device"]
    with pytest.raises(OSError, match="No space"):
        await one.written("without")
    ranks[0].disk_error = None
    assert await one.written("with") == "4"
    assert one.kept.recoverable


async def test_the_death_of_a_reference_whose_weights_are_nowhere_ends_the_run(run: Make) -> None:
    ranks = [Ranks(), Ranks()]
    one = await run(*ranks)
    await one.stage.start()
    await one.annotate(4)
    ranks[0].disk_error = NO_SPACE
    await one.annotate(8)
    assert not one.kept.lost("reference", "killed")
    with pytest.raises(RunFailed, match=r"version 8 is not on disk: .* No space"):
        await one.stage.restore(ranks[1])
    ranks[0].dies_in = "annotate"
    with pytest.raises(RunFailed, match=r"reference died during reference\.annotate"):
        await one.annotate(9)


async def test_ranks_that_die_after_they_have_written_have_the_same_weights_as_those_that_replace_them(
    run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:  # run-11
    ranks = [Ranks(), Ranks()]
    one = await run(*ranks)
    await one.stage.start()
    await one.annotate(4)
    going_on = threading.Event()
    put = reference_stage.put_in_place

    def slowly(*folders: Path) -> None:
        assert going_on.wait(20)
        put(*folders)

    monkeypatch.setattr(reference_stage, "put_in_place", slowly)
    annotating = asyncio.ensure_future(one.annotate(8))
    await turns(100)
    assert ranks[0].annotated[-1] == (8, 8)
    assert one.kept.lost("reference", "killed")
    await turns(100)  # the others are to load what is being put in place
    going_on.set()
    assert await annotating == [8.0]
    await one.kept.present()
    assert ranks[1].version == 8


async def test_a_frozen_reference_is_asked_once_for_each_batch_and_writes_nothing(tmp_path: Path) -> None:
    ranks = Ranks(dies_in="refresh")
    stage = ReferenceStage(ReplaceableActors("reference", ranks))  # type: ignore[bad-argument-type]
    await stage.start()
    batch: Any = SimpleNamespace(id=5, metrics={})
    await stage.annotate(batch)
    assert [number for number, _ in ranks.annotated] == [5]
    assert batch.metrics == {}
