"""Stage 5 of a run as a script calls it: the reference model, and the weights that it is refreshed with on disk."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from goaly.backlog.batch import BatchHandle
from goaly.durable.checkpoint import Checkpoint, Checkpoints
from goaly.errors import RunFailed, root_cause
from goaly.folder import link_files
from goaly.run.replaceable import Lost, Replaceable
from goaly.run.stages import Again, RanksStage
from goaly.train.reference import ReferenceModel

logger = logging.getLogger(__name__)

PART = "reference"
"""The folder of the reference's weights in a checkpoint."""
KEPT = 2
"""How many versions of the weights stay on disk: a checkpoint may still link the older one."""


class ReferenceStage(RanksStage[ReferenceModel]):
    """Computes log-probabilities under the reference weights, which the policy is kept close to.

    Invariants
        SR-1  Weights that the reference was refreshed with are on disk before a batch is trained with their log-probs.
              Ranks that replace lost ones load them from there.
        SR-2  If they cannot be written, the run says so and goes on, without checkpoints until the next refresh; if the
              reference dies, it ends.
    """

    def __init__(
        self,
        ranks: Replaceable[ReferenceModel],
        say: Callable[[str], None] = logger.info,
        refreshed: Checkpoints | None = None,
    ):
        """A reference that is refreshed needs `refreshed`, which keeps its weights by policy version."""
        super().__init__(ranks, say)
        self._refreshed = refreshed
        self._version = 0
        self._on_disk: Checkpoint | None = None
        """Where this version is; None for the weights that the run began with."""
        self._failure: OSError | None = None
        """Why this version is not on disk."""
        self._staged = self._on_disk, self._failure

    async def start(self, checkpoint: Checkpoint | None = None) -> None:
        """Build and load the model on every rank, with the reference weights of this checkpoint."""
        self._version = await self.ranks.call(lambda ranks: self._start(ranks, checkpoint))
        if self._refreshed is not None:
            await asyncio.to_thread(self._refreshed.clear)  # a run that goes on from a checkpoint makes them again
        if checkpoint is not None and self._version > 0:
            saved = checkpoint.folder / PART
            await self._keep(self._version, lambda folder: asyncio.to_thread(link_files, saved, folder))

    async def restore(self, ranks: ReferenceModel, checkpoint: Checkpoint | None, again: Again) -> None:
        """Load the weights of the lost ranks (SR-1)."""
        if self._failure is not None:
            raise RunFailed(f"reference version {self._version} is not on disk: {self._failure}")  # SR-2
        await self._start(ranks, self._on_disk)

    async def stage(self) -> None:
        """Note the present weights for a checkpoint."""
        self._staged = self._on_disk, self._failure

    async def write(self, folder: Path) -> None:
        """Put the noted weights into this folder; nothing if they are those that the run began with."""
        on_disk, failure = self._staged
        if failure is not None:
            raise failure  # SR-2
        if on_disk is not None:
            await asyncio.to_thread(link_files, on_disk.folder / PART, folder)

    async def annotate(self, batch: BatchHandle) -> None:
        """Add `reference_logprobs` to the batch's rows, after a refresh if it is due."""
        is_kept = False
        while not is_kept:
            version = self._version if self._refreshed is None else await self._refresh(batch)
            is_kept, _ = await asyncio.gather(
                self._is_kept(version), self._ask("annotate", lambda ranks: ranks.annotate.stream(batch))
            )
        if self._refreshed is not None:
            batch.metrics["reference/version"] = float(self._version)

    async def _refresh(self, batch: BatchHandle) -> int:
        """Load the weights for this batch on every rank, and copy them aside if they are new; their version."""
        while True:
            version = await self._ask("refresh", lambda ranks: ranks.refresh.stream(batch))
            if version == self._version or await super().stage() == version:  # else new ranks have the one before
                return version

    async def _is_kept(self, version: int) -> bool:
        """Write the weights that are copied aside, if they are new (SR-1). False if the copy was lost with a rank."""
        if version != self._version:
            with suppress(Lost):
                await self._keep(version, super().write)
                return True
        return version == self._version

    async def _keep(self, version: int, write: Callable[[Path], Awaitable[None]]) -> None:
        assert self._refreshed is not None
        failure = None
        try:
            folder = await asyncio.to_thread(self._refreshed.begin, version)
            await write(folder / PART)
            self._on_disk = await asyncio.to_thread(self._refreshed.commit, version, {})
            await asyncio.to_thread(self._refreshed.prune, KEPT)
        except Lost:
            raise
        except Exception as error:
            cause = root_cause(error.__cause__ or error)
            if not isinstance(cause, OSError):
                raise
            failure = cause
            self._say(f"reference version {version} cannot be written: {cause}")  # SR-2
        self._version, self._failure = version, failure
