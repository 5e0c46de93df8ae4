"""What a script talks to: one object a stage, each a few calls on actors. Handles and numbers only, never tensors."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from goaly.backlog.admission import Ticket
from goaly.backlog.batch import BatchHandle
from goaly.backlog.group_queue import Wait
from goaly.errors import RunFailed, cause_of
from goaly.prompts.prompt import Prompt
from goaly.rollout.group import NO_ROOM, GroupSummary
from goaly.run.waiting import ANSWER_SECONDS, FIRST_SECONDS, telling

logger = logging.getLogger(__name__)

T = TypeVar("T")

FAILURES_IN_A_ROW = 16
"""So many failures without a completed group between them end the run."""

TOO_LONG_IN_A_ROW = 64
"""So many groups without room for an answer, and no completed one between them, end the run."""


QUEUE_LOST = "failed: the trajectory queue was lost"


class Backlog:
    """Stage 4: tickets out, batches in."""

    def __init__(self, queue: Any, tell: Callable[[float, Wait], Awaitable[None]] | None = None):
        """`tell` is called when `batches` waits long, with the seconds waited and what is waited for."""
        self.queue = queue
        self._tell = tell
        self.final_counts: dict[str, int] = {}
        self.final_reasons: dict[str, int] = {}
        self._admitted = 0
        self._known: dict[str, int] = {}

    async def tickets(self) -> AsyncIterator[Ticket]:
        """A ticket for each group, as soon as it may start, until the run has admitted all it will train."""
        while (ticket := await ask("queue.admit", self.queue.admit.call_one())) is not None:
            self._admitted = ticket.index + 1
            yield ticket

    async def batches(self, steps: int) -> AsyncIterator[BatchHandle]:
        """The batches of so many steps, each as soon as its groups are complete. Ends admission when it ends."""
        for _ in range(steps):
            async with telling(self._tell_wait):
                batch = await ask("queue.next_batch", self.queue.next_batch.call_one())
            if batch is None:
                raise RunFailed("the trajectory queue closed before the run's last step")
            yield batch
        await ask("queue.close", self.queue.close.call_one())

    async def trained(self, batch: BatchHandle, policy_version: int) -> None:
        """Account for a batch: a training step consumed it and made this version."""
        await ask("queue.trained", self.queue.trained.call_one(batch.id, policy_version))

    async def counts(self) -> dict[str, int]:
        """Groups admitted and in each state."""
        self._known = await ask("queue.counts", self.queue.counts.call_one())
        return self._known

    async def close(self) -> None:
        """End the accounting: what nobody will report on any more is rejected, or failed where the queue was lost."""
        trained, rejected, failed = (self._known.get(state, 0) for state in ("trained", "rejected", "failed"))
        admitted = max(self._admitted, self._known.get("admitted", 0))
        lost = admitted - trained - rejected - failed  # since the last that was known of them
        self.final_counts = dict(admitted=admitted, trained=trained, rejected=rejected, failed=failed + lost)
        self.final_reasons = {QUEUE_LOST: lost} if lost else {}
        self.final_counts = await self.queue.settle.call_one()
        self.final_reasons = await self.queue.reasons.call_one()

    async def _tell_wait(self, seconds: float) -> None:
        if self._tell is not None:
            await self._tell(seconds, await ask("queue.wait", self.queue.wait.call_one()))


class Ranks:
    """Actors, one a rank, that take the queue's batches."""

    def __init__(self, actors: Any, queue: Any, say: Callable[[str], None] = logger.info):
        """`say` is called with a line of text when a call takes long."""
        self._actors = actors
        self._queue = queue
        self._say = say
        self._longest: dict[str, float] = {}

    async def close(self) -> None:
        """Let go of what the actors hold."""
        await self._actors.close.call()

    async def _ask(self, endpoint: str, answers: Iterable[Awaitable[Any]]) -> Any:
        """The answer on which all ranks agree. A call that takes unusually long is told."""

        async def tell(seconds: float) -> None:
            self._say(f"waiting {seconds:.0f} s for {endpoint}")

        clock = asyncio.get_running_loop().time
        began, longest = clock(), self._longest.get(endpoint, 0.0)
        async with telling(tell, max(FIRST_SECONDS, 2 * longest)):
            answer = await ask(endpoint, agreed(answers))
        self._longest[endpoint] = max(longest, clock() - began)
        return answer


class Trainer(Ranks):
    """Stage 5: batches in, policy versions out.

    Invariants
        SV-1  The last step's policy is saved before a script can go on, and nothing but the trainer's death or a second
              Ctrl-C ends the writing: a failing evaluation or an interrupt finds it on disk.
        SV-2  What is saved is the policy of a whole step.
    """

    def __init__(self, actors: Any, queue: Any, say: Callable[[str], None] = logger.info, *, steps: int, folder: Path):
        """After `steps` steps the policy is saved to `folder`."""
        super().__init__(actors, queue, say)
        self._steps = steps
        self._folder = folder
        self._in_step = False
        self._saving: asyncio.Task[None] | None = None
        self.start_version = 0
        self.policy_version = 0

    async def start(self) -> int:
        """Build and load the model on every rank; its policy version."""
        self.policy_version = await ask("trainer.start", agreed(self._actors.start.stream()))
        self.start_version = self.policy_version
        return self.policy_version

    async def step(self, batch: BatchHandle) -> dict[str, float]:
        """Train on this batch: it makes the next policy version; its metrics. The last one's policy is saved."""
        self._in_step = True  # SV-2: stays so where the step fails
        metrics = await self._ask("trainer.step", self._actors.step.stream(self._queue, batch))
        self._in_step = False
        self.policy_version = batch.id + 1
        if self.is_done:
            self._save()
        return metrics

    async def publish(self) -> int:
        """Make the new weights readable by generators; their version. Returns once the last one's policy is saved."""
        version = await self._ask("trainer.publish", self._actors.publish.stream())
        if self._saving is not None:
            await asyncio.shield(self._saving)  # SV-1; unblocked by the trainer's answer or death
        return version

    async def save(self, folder: str | Path) -> None:
        """Write the policy as a Hugging Face folder."""
        await self._ask("trainer.save", self._actors.save.stream(folder))

    @property
    def is_done(self) -> bool:
        """Whether the run's last step is trained."""
        return self.policy_version >= self._steps

    @property
    def has_unsaved(self) -> bool:
        """Whether a whole step made a policy that is not on disk yet."""
        if self._saving is not None:
            return not self._saving.done()
        return not self._in_step and self.policy_version > self.start_version

    async def save_newest(self) -> None:
        """Return once the newest policy is saved; at once if nothing was trained, or a step broke off (SV-2)."""
        if self._saving is None and self.has_unsaved:
            self._save()
        if self._saving is not None:
            await asyncio.shield(self._saving)  # Unblocked by the trainer's answer or death.

    def _save(self) -> None:
        self._saving = asyncio.create_task(self.save(self._folder), name="save the policy")


class Reference(Ranks):
    """Stage 5: log-probabilities under the weights that the policy is not to go far from."""

    async def start(self) -> None:
        """Build and load the model on every rank."""
        await ask("reference.start", agreed(self._actors.start.stream()))

    async def annotate(self, batch: BatchHandle) -> None:
        """Add `reference_logprobs` to the batch's rows, and to its metrics whose they are where that changes."""
        version = await self._ask("reference.annotate", self._actors.annotate.stream(self._queue, batch))
        if version is not None:
            batch.metrics["reference/version"] = float(version)


class Critic(Ranks):
    """Stage 5: what to expect from each token on."""

    async def start(self) -> None:
        """Build the model on every rank."""
        await ask("critic.start", agreed(self._actors.start.stream()))

    async def annotate(self, batch: BatchHandle) -> None:
        """Add `values` to the batch's rows; advantages and returns come with them."""
        await self._ask("critic.annotate", self._actors.annotate.stream(self._queue, batch))

    async def step(self, batch: BatchHandle) -> dict[str, float]:
        """Learn the batch's returns; the metrics."""
        return await self._ask("critic.step", self._actors.step.stream(self._queue, batch))


class Rollouts:
    """Stage 2: groups of episodes on the rollout workers."""

    def __init__(self, workers: Sequence[Any], say: Callable[[str], None] = logger.info):
        """`say` is called with a line of text when an evaluation takes long."""
        self._workers = tuple(workers)
        self._say = say
        self._running = [0] * len(self._workers)
        self._under_way: dict[int, tuple[int, Prompt]] = {}
        self._evaluations = itertools.count()
        self._failures = self._too_long = self._too_long_in_all = 0

    async def start(self) -> None:
        """Have every worker ready to judge."""
        await asyncio.gather(*(ask("rollout.start", worker.start.call_one()) for worker in self._workers))

    async def group(self, ticket: Ticket, prompt: Prompt) -> None:
        """Run the group's episodes on the least busy worker; it ends in the backlog, whatever happens."""

        async def run(index: int) -> Any:
            worker = self._workers[index]
            self._under_way[ticket.index] = index, prompt
            try:
                return await _owned(
                    "rollout.run_group", worker.run_group.call_one(ticket, prompt), worker, ticket.index
                )
            finally:
                del self._under_way[ticket.index]

        self._judge(await self._on_least_busy(run))

    def _judge(self, summary: GroupSummary) -> None:
        """End the run when only failures, or only groups without room for an answer, have come for long."""
        group = f"group {summary.ticket} ({summary.prompt_id})"
        if summary.failed is not None:
            self._failures += 1
            logger.warning("%s failed: %s", group, summary.failed)
            if self._failures >= FAILURES_IN_A_ROW:
                raise RunFailed(f"{self._failures} groups failed in a row; the last: {summary.failed}")
        elif summary.rewards:
            self._failures = self._too_long = 0
        elif summary.rejected is not None and summary.rejected.startswith(NO_ROOM):
            self._too_long += 1
            self._too_long_in_all += 1
            if self._too_long_in_all & (self._too_long_in_all - 1) == 0:  # 1, 2, 4, …
                logger.warning("%s rejected, %d so far: %s", group, self._too_long_in_all, summary.rejected)
            if self._too_long >= TOO_LONG_IN_A_ROW:
                raise RunFailed(f"{self._too_long} groups were rejected in a row; the last: {summary.rejected}")

    async def describe(self, ticket: int) -> str:
        """Which group a ticket is, and how far its episodes are."""
        if ticket not in self._under_way:
            return f"group {ticket}, which has no prompt yet"
        index, prompt = self._under_way[ticket]
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
        """The rewards of so many episodes on each prompt under this policy version or a newer one; none is trained.
        None stands for an episode whose prompt left no room for an answer. `sampling` has what is sampled differently
        than in training."""

        async def evaluate(prompt: Prompt) -> list[float | None]:
            name = f"evaluation-{next(self._evaluations)}"

            def run(index: int) -> Awaitable[Any]:
                worker = self._workers[index]
                call = worker.evaluate.call_one(name, prompt, samples_per_prompt, sampling, policy_version)
                return _owned("rollout.evaluate", call, worker, name)

            return await self._on_least_busy(run)

        async def tell(seconds: float) -> None:
            left = [task.get_name() for task in tasks if not task.done()]
            done = f"{len(tasks) - len(left)} of {len(tasks)} prompts are done"
            self._say(f"evaluating for {seconds:.0f} s: {done}; waiting for {', '.join(left[:3])}")

        async with telling(tell), asyncio.TaskGroup() as asked:
            tasks = [asked.create_task(evaluate(prompt), name=f"prompt {prompt.id}") for prompt in prompts]
        return [task.result() for task in tasks]

    async def use(self, replicas: Mapping[str, Any]) -> None:
        """Sample from these generator replicas from now on."""
        calls = (worker.replicas.call_one(dict(replicas)) for worker in self._workers)
        await asyncio.gather(*(ask("rollout.replicas", call) for call in calls))

    async def close(self) -> None:
        """Let go of what the workers hold."""
        await asyncio.gather(*(worker.close.call_one() for worker in self._workers))

    async def _on_least_busy(self, call: Callable[[int], Awaitable[T]]) -> T:
        index = min(range(len(self._workers)), key=self._running.__getitem__)
        self._running[index] += 1
        try:
            return await call(index)
        finally:
            self._running[index] -= 1


async def _owned(endpoint: str, answer: Awaitable[T], worker: Any, key: int | str) -> T:
    """The worker's answer; it ends the episodes of this ticket or name when nobody waits for them any more."""
    try:
        return await ask(endpoint, answer)
    except asyncio.CancelledError:
        worker.cancel.broadcast([key])  # Monarch does not pass a cancellation on
        raise


async def ask(endpoint: str, answer: Awaitable[T]) -> T:
    """The answer of an actor; its failure as a RunFailed that names actor, endpoint and cause."""
    try:
        return await answer
    except SupervisionError as error:
        raise RunFailed(f"{endpoint.partition('.')[0]} died during {endpoint}: {error}") from error
    except ActorError as error:
        raise RunFailed(f"{endpoint} failed: {cause_of(error)}") from error


async def agreed(answers: Iterable[Awaitable[T]]) -> T:
    """The answer on which all ranks agree, or the first failure at once: the other ranks may wait for that one."""
    answer, *_ = [await answer for answer in answers]
    return answer
