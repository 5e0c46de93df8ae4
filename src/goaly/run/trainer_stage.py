"""The models of a run as a script calls them. A stage calls actors; handles and numbers pass through it, no tensors."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from goaly.backlog.batch import BatchHandle
from goaly.base.actors import ask
from goaly.base.errors import RunFailed
from goaly.base.wait_reports import FIRST_SECONDS, reporting
from goaly.journal.checkpoint_folder import Checkpoint
from goaly.journal.records import Published
from goaly.run.replaceable_actors import Lost, ReplaceableActors
from goaly.train.critic import CriticModel
from goaly.train.reference import ReferenceModel
from goaly.train.trainer import PolicyTrainer

logger = logging.getLogger(__name__)

T = TypeVar("T")
RankActor = TypeVar("RankActor", PolicyTrainer, ReferenceModel, CriticModel)
Trained = TypeVar("Trained", PolicyTrainer, CriticModel)

Again = Callable[[str, int, int], AsyncIterator[BatchHandle]]
"""Gives a reader the batches from one number on and before another, as they were trained."""


class ModelStage(Generic[RankActor]):
    """A model on a mesh of actors, one for each rank.

    A call whose ranks die is made again to those that replace them. These have the state of the ranks before the call.
    """

    def __init__(self, ranks: ReplaceableActors[RankActor], say: Callable[[str], None] = logger.info):
        """A call that takes long is reported to `say`, as a line of text."""
        self.ranks = ranks
        self._say = say
        self._longest: dict[str, float] = {}
        self._staged_by = ranks.name

    async def stage(self) -> int | None:
        """Copy the ranks' state aside; the number of steps that it is the result of."""
        steps = await self._ask("stage", lambda ranks: ranks.stage.stream())
        self._staged_by = self.ranks.name
        return steps

    async def write(self, folder: Path) -> None:
        """Write the copy of the state to this folder. `Lost` if the copy is, because a rank died."""
        staged_by = self._staged_by

        async def write(ranks: RankActor) -> None:
            if self.ranks.name != staged_by:
                raise Lost(f"{staged_by} died with its copy of the state")
            await asyncio.gather(*ranks.write.stream(folder))

        await self.ranks.call(f"{self.ranks.role}.write", write)

    async def close(self) -> None:
        """Release what the ranks hold."""
        await self.ranks.call(f"{self.ranks.role}.close", lambda ranks: ranks.close.call())

    def _start(self, ranks: RankActor, folder: Path | None) -> Awaitable[Any]:
        """Build the model on these ranks, in the state of this folder; the ranks' answer."""
        return self._answer("start", ranks.start.stream(None if folder is None else folder.absolute()))

    async def _ask(self, endpoint: str, call: Callable[[RankActor], Iterable[Awaitable[T]]]) -> T:
        """The ranks' common answer. A failure is raised at once, because the other ranks may wait for the failed one. A
        call that takes unusually long is reported."""

        async def report(seconds: float) -> None:
            self._say(f"waiting {seconds:.0f} s for {self.ranks.role}.{endpoint}")

        clock = asyncio.get_running_loop().time
        longest = self._longest.get(endpoint, 0.0)
        async with reporting(report, max(FIRST_SECONDS, 2 * longest)):
            while True:
                began = clock()
                with suppress(Lost):
                    name = f"{self.ranks.role}.{endpoint}"
                    answer, *_ = await self.ranks.call(name, lambda ranks: asyncio.gather(*call(ranks)))
                    break
        self._longest[endpoint] = max(longest, clock() - began)
        return answer

    async def _answer(self, endpoint: str, answers: Iterable[Awaitable[T]]) -> T:
        """The common answer of ranks that do not serve yet."""
        answer, *_ = await ask(f"{self.ranks.role}.{endpoint}", asyncio.gather(*answers))
        return answer


class TrainedStage(ModelStage[Trained]):
    """A model that is trained on batches."""

    steps_done = 0
    """How many batches the ranks have trained."""

    async def start(self, checkpoint: Checkpoint | None = None) -> None:
        """Build and load the model on every rank, in the state of this checkpoint."""
        folder = None if checkpoint is None else checkpoint.folder
        await self.ranks.call(f"{self.ranks.role}.start", lambda ranks: self._start(ranks, folder))
        self.steps_done = 0 if checkpoint is None else checkpoint.step

    async def restore(self, ranks: Trained, checkpoint: Checkpoint | None, again: Again) -> None:
        """Bring new ranks from this checkpoint to the state that the lost ones had; `again` gives their batches."""
        await self._start(ranks, None if checkpoint is None else checkpoint.folder)
        first = 0 if checkpoint is None else checkpoint.step
        if first < self.steps_done:
            self._say(f"{self.ranks.name} trains {self.steps_done - first} batches again")
        async for batch in again(self.ranks.name, first, self.steps_done):
            await self._answer("step", ranks.step.stream(batch))


class TrainerStage(TrainedStage[PolicyTrainer]):
    """Stage 5: makes policy versions from batches.

    A saved policy is the result of whole steps. A step waits for the save of the version before it, so that a save
    never sees half a step. Ranks that replace lost ones serve once generators can read the version that the run is at.

        run-1: The last step's policy is saved before a script continues. Only the trainer's death or a second Ctrl-C
            stops the save: a failing evaluation or an interrupt finds the policy on disk.
    """

    def __init__(
        self,
        ranks: ReplaceableActors[PolicyTrainer],
        say: Callable[[str], None] = logger.info,
        *,
        steps: int,
        folder: Path,
        record: Callable[[Published], None] = lambda published: None,
    ):
        """After `steps` steps the policy is saved to `folder`. `record` gets every version that is published."""
        super().__init__(ranks, say)
        self._record = record
        self._expected: dict[int, str] = {}
        self._steps = steps
        self._folder = folder
        self._in_step = False
        self._between_steps = asyncio.Lock()
        self._saving: asyncio.Task[None] | None = None
        self._published = 0
        self._news = asyncio.Event()
        self.start_version = 0

    def expect(self, digests: Mapping[int, str]) -> None:
        """Report a version that is published with another digest than this one."""
        self._expected.update(digests)

    @property
    def policy_version(self) -> int:
        """The newest version: how many batches are trained."""
        return self.steps_done

    async def start(self, checkpoint: Checkpoint | None = None) -> None:
        """Build and load the model on every rank, in the state of this checkpoint."""
        await super().start(checkpoint)
        self.start_version = self.steps_done

    async def restore(self, ranks: PolicyTrainer, checkpoint: Checkpoint | None, again: Again) -> None:
        """Bring new ranks from this checkpoint to the state of the lost ones, and publish their version."""
        await super().restore(ranks, checkpoint, again)
        if self.policy_version > 0:
            digest = await self._answer("digest", ranks.digest.stream())
            self._compare(self.policy_version, digest)
            await self._answer("publish", ranks.publish.stream())

    async def step(self, batch: BatchHandle) -> dict[str, float]:
        """Train the next policy version on this batch; the step's metrics. After the last step the save begins."""
        async with self._between_steps:  # unblocked by the trainer's answer or death
            self._in_step = True  # stays True if the step fails
            metrics = await self._ask("step", lambda ranks: ranks.step.stream(batch))
            self._in_step, self.steps_done = False, batch.id + 1
        if self.is_done:
            self._save()
        return metrics

    async def publish(self) -> int:
        """Make the new weights readable by generators; their version. Waits for the save of the last policy."""
        version, digest = await asyncio.gather(
            self._ask("publish", lambda ranks: ranks.publish.stream()), self.digest()
        )
        self._compare(version, digest)
        self._expected = {version: digest, **{newer: one for newer, one in self._expected.items() if newer > version}}
        self._record(Published(version=version, digest=digest))
        self._published = version
        self._news.set()
        self._news = asyncio.Event()
        if self._saving is not None:
            await asyncio.shield(self._saving)  # run-1; unblocked by the trainer's answer or death
        return version

    async def published_above(self, version: int) -> int:
        """Wait until a version above this one is published; the newest."""
        while self._published <= version:
            await self._news.wait()  # unblocked by `publish`
        return self._published

    async def stage_policy(self, folder: Path) -> int:
        """Write the policy of a whole step as a Hugging Face folder, copy the state aside for `write`; its version."""
        async with self._between_steps:
            if self._in_step:
                raise RunFailed(f"the step after policy version {self.policy_version} has failed")
            await self.save(folder)
            await self.stage()
            return self.policy_version

    async def go_back(self, folder: Path) -> int:
        """Take parameters and optimizer state that `write` has written to this folder; the present version, which
        stays: the next step makes the first version after the return."""
        async with self._between_steps:
            return await self._ask("go_back", lambda ranks: ranks.go_back.stream(folder.absolute()))

    async def digest(self) -> str:
        """The digest of the current parameters."""
        return await self._ask("digest", lambda ranks: ranks.digest.stream())

    async def save(self, folder: str | Path) -> None:
        """Write the policy as a Hugging Face folder."""
        await self._ask("save", lambda ranks: ranks.save.stream(folder))

    async def save_version(self, policy_version: int, folder: Path) -> None:
        """Write the policy of this version as a Hugging Face folder; RunFailed if a step has replaced it."""
        async with self._between_steps:
            if self._in_step:
                raise RunFailed(f"the step after policy version {self.policy_version} has failed")
            if self.policy_version != policy_version:
                raise RunFailed(f"policy version {policy_version} is gone: the trainer is at {self.policy_version}")
            await self.save(folder)

    @property
    def is_done(self) -> bool:
        """Whether the run's last step is trained."""
        return self.policy_version >= self._steps

    @property
    def has_unsaved(self) -> bool:
        """Whether the newest whole step made a policy that is not on disk yet."""
        if self._saving is not None:
            return not self._saving.done()
        if self._in_step:
            return False
        return self.policy_version > self.start_version or (self.is_done and not self._folder.exists())

    async def save_newest(self) -> None:
        """Save the newest policy. Does nothing if no step was trained or the last one was interrupted."""
        if self._saving is None and self.has_unsaved:
            self._save()
        if self._saving is not None:
            await asyncio.shield(self._saving)  # unblocked by the trainer's answer or death

    def _compare(self, version: int, digest: str) -> None:
        if (before := self._expected.get(version, digest)) != digest:
            self._say(f"policy version {version} has digest {digest}, but had {before} when it was made first")

    def _save(self) -> None:
        self._saving = asyncio.create_task(self.save(self._folder), name="save the policy")


class CriticStage(TrainedStage[CriticModel]):
    """Stage 5: predicts the return from each token on."""

    async def step(self, batch: BatchHandle) -> dict[str, float]:
        """Train on this batch; the step's metrics."""
        metrics = await self._ask("step", lambda ranks: ranks.step.stream(batch))
        self.steps_done = batch.id + 1
        return metrics

    async def annotate(self, batch: BatchHandle) -> None:
        """Add `values` to the batch's rows. The queue then adds advantages and returns."""
        await self._ask("annotate", lambda ranks: ranks.annotate.stream(batch))
