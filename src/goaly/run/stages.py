"""The stages of a run as a script calls them. A stage calls actors; handles and numbers pass through it, no tensors."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from goaly.actors import ask
from goaly.backlog.admission import Ticket
from goaly.backlog.batch import BatchHandle
from goaly.backlog.group_queue import Wait
from goaly.backlog.queue import TrajectoryQueue
from goaly.errors import RunFailed
from goaly.generate.generator import Generator
from goaly.prompts.prompt import Prompt
from goaly.rollout.group import NO_ROOM, GroupSummary
from goaly.rollout.worker import RolloutWorker
from goaly.run.waiting import ANSWER_SECONDS, FIRST_SECONDS, reporting
from goaly.train.critic import CriticModel
from goaly.train.reference import ReferenceModel
from goaly.train.trainer import PolicyTrainer

logger = logging.getLogger(__name__)

T = TypeVar("T")
RankActor = TypeVar("RankActor", PolicyTrainer, ReferenceModel, CriticModel)

FAILURES_IN_A_ROW = 16
"""The run ends after so many failed groups without a completed group between them."""

TOO_LONG_IN_A_ROW = 64
"""The run ends after so many groups without room for an answer and without a completed group between them."""

QUEUE_LOST = "failed: the trajectory queue was lost"


class BacklogStage:
    """Stage 4: gives out tickets and batches."""

    def __init__(self, queue: TrajectoryQueue, on_wait: Callable[[float, Wait], Awaitable[None]] | None = None):
        """`batches` calls `on_wait` when it waits for long, with the seconds waited and what it waits for."""
        self._queue = queue
        self._on_wait = on_wait
        self.final_counts: dict[str, int] = {}
        self.final_reasons: dict[str, int] = {}
        self._admitted = 0
        self._last_counts: dict[str, int] = {}

    async def tickets(self) -> AsyncIterator[Ticket]:
        """A ticket for each group, as soon as the group may start, until the run has admitted all groups it trains."""
        while (ticket := await ask("queue.admit", self._queue.admit.call_one())) is not None:
            self._admitted = ticket.index + 1
            yield ticket

    async def batches(self, steps: int) -> AsyncIterator[BatchHandle]:
        """The batches of so many steps, each as soon as its groups are complete. Ends admission when it ends."""
        for _ in range(steps):
            async with reporting(self._report_wait):
                batch = await ask("queue.next_batch", self._queue.next_batch.call_one())
            if batch is None:
                raise RunFailed("the trajectory queue closed before the run's last step")
            yield batch
        await ask("queue.close", self._queue.close.call_one())

    async def trained(self, batch: BatchHandle, policy_version: int) -> None:
        """Record that a training step consumed this batch and made this policy version."""
        await ask("queue.trained", self._queue.trained.call_one(batch.id, policy_version))

    async def counts(self) -> dict[str, int]:
        """How many groups were admitted, and how many are in each state."""
        self._last_counts = await ask("queue.counts", self._queue.counts.call_one())
        return self._last_counts

    async def close(self) -> None:
        """End the accounting. Open groups are rejected, or have failed if the queue was lost."""
        last = self._last_counts
        ended = {state: last.get(state, 0) for state in ("trained", "rejected", "failed")}
        admitted = max(self._admitted, last.get("admitted", 0))
        lost = admitted - sum(ended.values())
        self.final_counts = {"admitted": admitted, **ended, "failed": ended["failed"] + lost}
        self.final_reasons = {QUEUE_LOST: lost} if lost else {}
        self.final_counts = await self._queue.settle.call_one()
        self.final_reasons = await self._queue.reasons.call_one()

    async def _report_wait(self, seconds: float) -> None:
        if self._on_wait is not None:
            await self._on_wait(seconds, await ask("queue.wait", self._queue.wait.call_one()))


class _RanksStage(Generic[RankActor]):
    """A mesh of actors, one for each rank."""

    def __init__(self, ranks: RankActor, say: Callable[[str], None] = logger.info):
        """A call that takes long is reported to `say`, as a line of text."""
        self._ranks = ranks
        self._say = say
        self._longest: dict[str, float] = {}

    async def close(self) -> None:
        """Release what the ranks hold."""
        await self._ranks.close.call()

    async def _ask(self, endpoint: str, answers: Iterable[Awaitable[T]]) -> T:
        """The answer of a call to all ranks. A call that takes unusually long is reported."""

        async def report(seconds: float) -> None:
            self._say(f"waiting {seconds:.0f} s for {endpoint}")

        clock = asyncio.get_running_loop().time
        began, longest = clock(), self._longest.get(endpoint, 0.0)
        async with reporting(report, max(FIRST_SECONDS, 2 * longest)):
            answer = await ask(endpoint, _from_all_ranks(answers))
        self._longest[endpoint] = max(longest, clock() - began)
        return answer


class TrainerStage(_RanksStage[PolicyTrainer]):
    """Stage 5: makes policy versions from batches.

    Invariants
        SV-1  The last step's policy is saved before a script continues. Only the trainer's death or a second Ctrl-C
              stops the save: a failing evaluation or an interrupt finds the policy on disk.
        SV-2  A saved policy is the result of whole steps.
        SV-3  A step waits for the save of the version before it, so that a save never sees half a step.
    """

    def __init__(self, ranks: PolicyTrainer, say: Callable[[str], None] = logger.info, *, steps: int, folder: Path):
        """After `steps` steps the policy is saved to `folder`."""
        super().__init__(ranks, say)
        self._steps = steps
        self._folder = folder
        self._in_step = False
        self._between_steps = asyncio.Lock()
        self._saving: asyncio.Task[None] | None = None
        self.start_version = 0
        self.policy_version = 0

    async def start(self) -> int:
        """Build and load the model on every rank; its policy version."""
        self.policy_version = await ask("trainer.start", _from_all_ranks(self._ranks.start.stream()))
        self.start_version = self.policy_version
        return self.policy_version

    async def step(self, batch: BatchHandle) -> dict[str, float]:
        """Train the next policy version on this batch; the step's metrics. After the last step the save begins."""
        async with self._between_steps:  # SV-3; unblocked by the trainer's answer or death
            self._in_step = True  # SV-2: stays True if the step fails
            metrics = await self._ask("trainer.step", self._ranks.step.stream(batch))
            self._in_step = False
            self.policy_version = batch.id + 1
        if self.is_done:
            self._save()
        return metrics

    async def publish(self) -> int:
        """Make the new weights readable by generators; their version. Waits for the save of the last policy."""
        version = await self._ask("trainer.publish", self._ranks.publish.stream())
        if self._saving is not None:
            await asyncio.shield(self._saving)  # SV-1; unblocked by the trainer's answer or death
        return version

    async def save(self, folder: str | Path) -> None:
        """Write the policy as a Hugging Face folder."""
        await self._ask("trainer.save", self._ranks.save.stream(folder))

    async def save_version(self, policy_version: int, folder: Path) -> None:
        """Write the policy of this version as a Hugging Face folder; RunFailed if a step has replaced it."""
        async with self._between_steps:  # SV-3
            if self._in_step or self.policy_version != policy_version:
                raise RunFailed(f"the trainer has policy version {self.policy_version} or a part of the next one")
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
        return not self._in_step and self.policy_version > self.start_version

    async def save_newest(self) -> None:
        """Save the newest policy. Does nothing if no step was trained or the last one was interrupted (SV-2)."""
        if self._saving is None and self.has_unsaved:
            self._save()
        if self._saving is not None:
            await asyncio.shield(self._saving)  # unblocked by the trainer's answer or death

    def _save(self) -> None:
        self._saving = asyncio.create_task(self.save(self._folder), name="save the policy")


class ReferenceStage(_RanksStage[ReferenceModel]):
    """Stage 5: computes log-probabilities under the reference weights, which the policy is kept close to."""

    async def start(self) -> None:
        """Build and load the model on every rank."""
        await ask("reference.start", _from_all_ranks(self._ranks.start.stream()))

    async def annotate(self, batch: BatchHandle) -> None:
        """Add `reference_logprobs` to the batch's rows. Also record the reference's version if it is refreshed."""
        version = await self._ask("reference.annotate", self._ranks.annotate.stream(batch))
        if version is not None:
            batch.metrics["reference/version"] = float(version)


class CriticStage(_RanksStage[CriticModel]):
    """Stage 5: predicts the return from each token on."""

    async def start(self) -> None:
        """Build the model on every rank."""
        await ask("critic.start", _from_all_ranks(self._ranks.start.stream()))

    async def annotate(self, batch: BatchHandle) -> None:
        """Add `values` to the batch's rows. The queue then adds advantages and returns."""
        await self._ask("critic.annotate", self._ranks.annotate.stream(batch))

    async def step(self, batch: BatchHandle) -> dict[str, float]:
        """Train the critic on the batch's returns; the step's metrics."""
        return await self._ask("critic.step", self._ranks.step.stream(batch))


class RolloutStage:
    """Stage 2: runs groups of episodes on the rollout workers."""

    def __init__(self, workers: Sequence[RolloutWorker], say: Callable[[str], None] = logger.info):
        """An evaluation that takes long is reported to `say`, as a line of text."""
        self._workers = tuple(workers)
        self._say = say
        self._running = [0] * len(self._workers)
        self._groups: dict[int, tuple[int, Prompt]] = {}
        """The worker and the prompt of each running group, by ticket."""
        self._evaluations = itertools.count()
        self._failures_in_a_row = self._too_long_in_a_row = self._too_long = 0

    async def start(self) -> None:
        """Start the verifiers of every worker."""
        await asyncio.gather(*(ask("rollout.start", worker.start.call_one()) for worker in self._workers))

    async def group(self, ticket: Ticket, prompt: Prompt) -> None:
        """Run the group's episodes on the least busy worker. The worker reports the group to the queue in any case."""

        async def run(index: int) -> GroupSummary:
            worker = self._workers[index]
            self._groups[ticket.index] = index, prompt
            try:
                call = worker.run_group.call_one(ticket, prompt)
                return await _cancelled_with_caller("rollout.run_group", call, worker, ticket.index)
            finally:
                del self._groups[ticket.index]

        self._judge(await self._on_least_busy(run))

    def _judge(self, summary: GroupSummary) -> None:
        """End the run if too many groups in a row failed or left no room for an answer."""
        group = f"group {summary.ticket} ({summary.prompt_id})"
        if summary.failed is not None:
            self._failures_in_a_row += 1
            logger.warning("%s failed: %s", group, summary.failed)
            if self._failures_in_a_row >= FAILURES_IN_A_ROW:
                raise RunFailed(f"{self._failures_in_a_row} groups failed in a row; the last: {summary.failed}")
        elif summary.rewards:
            self._failures_in_a_row = self._too_long_in_a_row = 0
        elif summary.rejected is not None and summary.rejected.startswith(NO_ROOM):
            self._too_long_in_a_row += 1
            self._too_long += 1
            if self._too_long.bit_count() == 1:  # 1, 2, 4, ...
                logger.warning("%s rejected, %d so far: %s", group, self._too_long, summary.rejected)
            if self._too_long_in_a_row >= TOO_LONG_IN_A_ROW:
                raise RunFailed(
                    f"{self._too_long_in_a_row} groups were rejected in a row; the last: {summary.rejected}"
                )

    async def describe(self, ticket: int) -> str:
        """The group of this ticket in words: its prompt, its worker, and the progress of its episodes."""
        if ticket not in self._groups:
            return f"group {ticket}, which has no prompt yet"
        index, prompt = self._groups[ticket]
        group = f"group {ticket} (prompt {prompt.id}, source {prompt.source})"
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                found = await ask("rollout.progress", self._workers[index].progress.call_one(ticket))
        except TimeoutError:
            return f"{group}, whose worker rollout-{index} does not answer"
        if found is None:
            return f"{group}, which rollout-{index} does not run"
        return f"{group}: {found}, running for {found.seconds:.0f} s on rollout-{index}"

    async def rewards(
        self, prompts: Sequence[Prompt], samples_per_prompt: int, sampling: Mapping[str, Any], policy_version: int
    ) -> list[list[float | None]]:
        """The rewards of evaluation episodes, so many for each prompt, under this policy version or a newer one.

        `sampling` holds the sampling parameters that differ from training. The reward is None if the prompt left no
        room for an answer.
        """

        async def evaluate(prompt: Prompt) -> list[float | None]:
            name = f"evaluation-{next(self._evaluations)}"

            def run(index: int) -> Awaitable[list[float | None]]:
                worker = self._workers[index]
                call = worker.evaluate.call_one(name, prompt, samples_per_prompt, sampling, policy_version)
                return _cancelled_with_caller("rollout.evaluate", call, worker, name)

            return await self._on_least_busy(run)

        async def report(seconds: float) -> None:
            left = [task.get_name() for task in tasks if not task.done()]
            done = f"{len(tasks) - len(left)} of {len(tasks)} prompts are done"
            self._say(f"evaluating for {seconds:.0f} s: {done}; waiting for {', '.join(left[:3])}")

        async with reporting(report), asyncio.TaskGroup() as group:
            tasks = [group.create_task(evaluate(prompt), name=f"prompt {prompt.id}") for prompt in prompts]
        return [task.result() for task in tasks]

    async def use(self, replicas: Mapping[str, Generator]) -> None:
        """Sample from these generator replicas from now on."""
        calls = (worker.replicas.call_one(dict(replicas)) for worker in self._workers)
        await asyncio.gather(*(ask("rollout.replicas", call) for call in calls))

    async def close(self) -> None:
        """Cancel running groups and release what the workers hold."""
        await asyncio.gather(*(worker.close.call_one() for worker in self._workers))

    async def _on_least_busy(self, call: Callable[[int], Awaitable[T]]) -> T:
        index = min(range(len(self._workers)), key=self._running.__getitem__)
        self._running[index] += 1
        try:
            return await call(index)
        finally:
            self._running[index] -= 1


async def _cancelled_with_caller(endpoint: str, call: Awaitable[T], worker: RolloutWorker, key: int | str) -> T:
    """The worker's answer. When the caller is cancelled, the worker ends the episodes of this ticket or name."""
    try:
        return await ask(endpoint, call)
    except asyncio.CancelledError:
        worker.cancel.broadcast([key])  # Monarch does not pass a cancellation on
        raise


async def _from_all_ranks(answers: Iterable[Awaitable[T]]) -> T:
    """The ranks' common answer, or the first failure at once: the other ranks may wait for the failed one."""
    answer, *_ = [await answer for answer in answers]
    return answer
