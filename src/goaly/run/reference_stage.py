"""Stage 5 of a run as a script calls it: the reference model, whose weights are on disk if they are refreshed."""

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from goaly.backlog.batch import BatchHandle
from goaly.base.atomic_files import link_files, put_in_place, remove
from goaly.base.errors import RunFailed, os_error
from goaly.base.wait_reports import reporting
from goaly.journal.checkpoint_folder import Checkpoint
from goaly.run.replaceable_actors import Lost, ReplaceableActors
from goaly.run.trainer_stage import ModelStage
from goaly.train.reference import ReferenceModel

logger = logging.getLogger(__name__)

PART = "reference"
"""The folder of the reference's weights in a checkpoint."""


@dataclass(frozen=True, slots=True)
class _Weights:
    """The weights of a policy version, and where they are on disk."""

    version: int = 0
    folder: Path | None = None
    """None for the weights that the run began with, and for those that could not be written."""
    failure: OSError | None = None
    """Why they could not be written."""


class ReferenceStage(ModelStage[ReferenceModel]):
    """Computes log-probabilities under the reference weights, which the policy is kept close to.

    If refreshed weights cannot be written, the run says so and goes on. They are written again for the next checkpoint.
    Until that succeeds there is no checkpoint, and the reference is not replaced: its death ends the run.

        run-11: Weights that the reference was refreshed with are on disk before a batch is trained with their
            log-probs. Ranks that replace lost ones load them from there.
    """

    def __init__(
        self,
        ranks: ReplaceableActors[ReferenceModel],
        say: Callable[[str], None] = logger.info,
        folder: Path | None = None,
    ):
        """A reference that is refreshed has its weights in `folder`, as long as the run lasts."""
        super().__init__(ranks, say)
        self._folder = folder
        self._weights = self._staged = _Weights()
        self._changing = asyncio.Lock()
        """Held from the answer of ranks that have written their weights until these are the ones to load."""

    async def start(self, checkpoint: Checkpoint | None = None) -> None:
        """Build and load the model on every rank, with the reference weights of this checkpoint if it has any."""
        saved = None
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)  # left by a run that was killed
            if checkpoint is not None and (checkpoint.folder / PART).is_dir():
                saved = checkpoint.folder / PART
        version = await self.ranks.call("reference.start", lambda ranks: self._start(ranks, saved))
        if saved is not None:
            await self._keep(version, lambda folder: asyncio.to_thread(link_files, saved, folder))

    async def restore(self, ranks: ReferenceModel) -> None:
        """Load the weights of the lost ranks (run-11)."""
        async with self._changing:  # ends with the files' sync
            present = self._weights
        if present.failure is not None:
            raise RunFailed(f"reference version {present.version} is not on disk: {present.failure}")
        await self._start(ranks, present.folder)

    async def stage(self) -> None:
        """Choose the present weights for a checkpoint."""
        if self._weights.failure is not None:
            await super().stage()
            with suppress(Lost):
                await self._keep(self._weights.version, super().write)
        self._staged = self._weights

    async def write(self, folder: Path) -> None:
        """Put the chosen weights into this folder; nothing if they are those that the run began with."""
        if self._staged.failure is not None:
            raise self._staged.failure
        if self._staged.folder is not None:
            await asyncio.to_thread(link_files, self._staged.folder, folder)

    async def annotate(self, batch: BatchHandle) -> None:
        """Add `reference_logprobs` to the batch's rows, after a refresh if it is due."""
        is_kept = False
        while not is_kept:
            version = 0 if self._folder is None else await self._refresh(batch)
            is_kept, _ = await asyncio.gather(
                self._is_kept(version), self._ask("annotate", lambda ranks: ranks.annotate.stream(batch))
            )
            if self._folder is not None:
                batch.metrics["reference/version"] = float(version)

    async def close(self) -> None:
        """Release what the ranks hold, and remove the weights, which checkpoints have, too."""
        try:
            await super().close()
        finally:
            if self._folder is not None:
                await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _refresh(self, batch: BatchHandle) -> int:
        """Load the weights for this batch on every rank, and copy them aside if they are new; their version."""
        while True:
            version = await self._ask("refresh", lambda ranks: ranks.refresh.stream(batch))
            if version == self._weights.version or await super().stage() == version:
                return version  # otherwise the ranks were replaced meanwhile, and have the weights before

    async def _is_kept(self, version: int) -> bool:
        """Write the copy of the weights, if they are new. False if it is lost with a rank."""
        if version != self._weights.version:
            try:
                await self._keep(version, super().write)
            except Lost:
                return False
        return True

    async def _keep(self, version: int, write: Callable[[Path], Awaitable[None]]) -> None:
        assert self._folder is not None
        staging, folder = self._folder / "writing", self._folder / f"{version:06d}"

        async def report(seconds: float) -> None:
            self._say(f"waiting {seconds:.0f} s for {folder} to be written")

        try:
            async with reporting(report):
                self._folder.mkdir(exist_ok=True)
                await write(staging)
                async with self._changing:
                    await asyncio.to_thread(put_in_place, staging, folder)
                    self._weights = _Weights(version, folder)
        except Lost:
            raise
        except Exception as error:
            if (cause := os_error(error)) is None:
                raise
            self._weights = _Weights(version, None, cause)
            self._say(f"reference version {version} cannot be written: {cause}")
        finally:
            await asyncio.to_thread(shutil.rmtree, staging, ignore_errors=True)
        self.ranks.recoverable = self._weights.failure is None
        try:
            await asyncio.to_thread(self._remove_old)
        except OSError as error:
            self._say(f"old reference weights cannot be removed: {error}")

    def _remove_old(self) -> None:
        assert self._folder is not None
        for folder in self._folder.iterdir():
            if folder not in (self._weights.folder, self._staged.folder):
                remove(folder)
