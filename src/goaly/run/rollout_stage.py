"""Stage 2 of a run as a script calls it: runs groups of episodes on the rollout workers."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

from goaly.agents.session_files import forget_group
from goaly.backlog.events import CANCELLED, Ticket
from goaly.base.actors import ask
from goaly.base.errors import RunFailed, first_error, root_cause
from goaly.base.wait_reports import ANSWER_SECONDS, reporting
from goaly.generate.connection import POISON_DEATHS, SUSPECT_DEATHS
from goaly.generate.generator import Generator
from goaly.prompts.prompt import Prompt
from goaly.rollout.group_runner import NO_ROOM, GroupSummary
from goaly.rollout.rollout_worker import RolloutWorker
from goaly.rollout.running_episodes import EvaluationFailed, Failed
from goaly.run.backlog_stage import BacklogStage
from goaly.run.replaceable_actors import Lost, ReplaceableActors
from goaly.run.suspect_groups import SuspectGroups

logger = logging.getLogger(__name__)

T = TypeVar("T")

FAILURES_IN_A_ROW = 16
"""The run ends after this many failed groups without a completed group between them, and an evaluation after this many
failed episodes. A row of groups ends the run only if it is longer than the number that ran when it began: they may have
failed for one reason, such as the death of a server of sandboxes."""

TOO_LONG_IN_A_ROW = 64
"""The run ends after this many groups without room for an answer and without a completed group between them."""

POISONED = f"its worker died {POISON_DEATHS} times"

CANCEL_SECONDS = 1.0
"""A group that a script cancels is cancelled after this time: by then it is known whether the run ends."""


class RolloutStage:
    """Stage 2: runs groups of episodes on the rollout workers.

    A group under which workers have died `POISON_DEATHS` times fails: it may be what kills them. The suspects of a
    worker begin one after the other, so that they do not fail with it (`SuspectGroups`). With `fixed`, a group
    runs again on its first worker or the one in its place, also with the next hub. A group that ends while its worker
    is dead leaves no session file: later workers would wait for it.

        run-7: A group or an evaluation whose worker dies runs again, with the same prompt, unless its ticket has ended,
            or is given out again because its hub died.
    """

    def __init__(
        self,
        workers: Sequence[ReplaceableActors[RolloutWorker]],
        say: Callable[[str], None] = logger.info,
        backlog: BacklogStage | None = None,
        *,
        fixed: bool = False,
        sessions: Path | None = None,
        on_end: Callable[[GroupSummary], None] = lambda summary: None,
    ):
        """An evaluation that takes long is reported to `say`, as a line of text. Without a `backlog` every ticket is
        running. `fixed` is for groups whose agents know the address of their worker. `sessions` is the folder of
        the workers' session files. `on_end` gets how each group ended."""
        self.workers = tuple(workers)
        self._on_end = on_end
        self._say = say
        self._backlog = backlog
        self._fixed = fixed
        self._sessions = sessions
        self._homes: dict[int, int] = {}
        """The worker on which each group began, with `fixed`, by ticket."""
        self._replicas: Mapping[str, Generator] = {}
        self._announcements: set[asyncio.Task[None]] = set()
        self._running = [0] * len(self.workers)
        self._suspects = [SuspectGroups() for _ in self.workers]
        self._groups: dict[int, tuple[int, Prompt]] = {}
        """The worker and the prompt of each running group, by ticket."""
        self._evaluations = itertools.count()
        self._failures_in_a_row = self._too_long_in_a_row = self._too_long = 0
        self._ran_as_row_began = 0
        self._closed = False

    async def start(self) -> None:
        """Start the verifiers of every worker."""
        await asyncio.gather(
            *(worker.call("rollout.start", lambda actor: actor.start.call_one()) for worker in self.workers)
        )

    async def restore(self, worker: RolloutWorker) -> None:
        """Start a worker that replaces a lost one."""
        await ask("rollout.start", worker.start.call_one())
        await ask("rollout.replicas", worker.replicas.call_one(self._replicas))

    async def group(self, ticket: Ticket, prompt: Prompt) -> None:
        """Run the group's episodes on a worker, which reports the group to the queue."""
        backlog = self._backlog
        hub = "" if backlog is None else backlog.hub_of(ticket.index)
        try:
            await self._run_group(ticket, prompt, hub)
        finally:
            if backlog is None or backlog.hub == hub:  # or the next hub gives the ticket out again
                self._homes.pop(ticket.index, None)

    async def _run_group(self, ticket: Ticket, prompt: Prompt, hub: str) -> None:
        backlog = self._backlog

        async def run(worker: RolloutWorker) -> GroupSummary:
            if backlog is not None and backlog.hub != hub:
                raise Lost(f"{hub} died before the group began")
            if turn is not None:
                turn.begin()
            return await worker.run_group.call_one(ticket, prompt)

        for deaths in range(POISON_DEATHS):
            index = self._home(ticket.index)
            group = self._groups[ticket.index] = index, prompt
            is_suspect = deaths >= SUSPECT_DEATHS
            self._running[index] += 1
            try:
                async with self._suspects[index].turn(f"{hub} {ticket.index}") if is_suspect else nullcontext() as turn:
                    self._judge(await self.workers[index].call("rollout.run_group", run))
                return
            except Lost:
                if backlog is not None and not await backlog.is_running(ticket.index, hub):
                    self._forget(ticket.index, hub)
                    return  # run-7
            except asyncio.CancelledError:
                self._cancel_later(self.workers[index], ticket.index, hub)
                raise
            finally:
                self._running[index] -= 1
                if self._groups.get(ticket.index) is group:  # or the next hub has given the ticket out again
                    del self._groups[ticket.index]
        self._drop(ticket.index, hub, POISONED)
        self._judge(GroupSummary(ticket=ticket.index, prompt_id=prompt.id, failed=POISONED))

    def _cancel_later(self, worker: ReplaceableActors[RolloutWorker], ticket: int, hub: str) -> None:
        """Have the worker end the group, which then counts as failed, unless the run ends: then a resumed run runs it
        again."""

        def cancel() -> None:
            if self._closed:
                return
            worker.broadcast(lambda actor: actor.cancel.broadcast([ticket]))
            self._drop(ticket, hub, CANCELLED)  # the worker may have died

        asyncio.get_running_loop().call_later(CANCEL_SECONDS, cancel)

    def _drop(self, ticket: int, hub: str, why: str) -> None:
        """Count a group as failed that no worker reports."""
        if self._backlog is not None:
            self._backlog.drop(ticket, hub, why)
        self._forget(ticket, hub)

    def _forget(self, ticket: int, hub: str) -> None:
        """Delete the session files of a group that no worker goes on with."""
        is_given_out_again = self._backlog is not None and self._backlog.hub != hub
        if self._sessions is not None and not is_given_out_again:
            forget_group(self._sessions, ticket)

    def _judge(self, summary: GroupSummary) -> None:
        """End the run if too many groups in a row failed or left no room for an answer."""
        self._on_end(summary)
        group = f"group {summary.ticket} ({summary.prompt_id})"
        if summary.failed is not None:
            self._failures_in_a_row += 1
            if self._failures_in_a_row == 1:
                self._ran_as_row_began = len(self._groups)
            logger.warning("%s failed: %s", group, summary.failed)
            if self._failures_in_a_row >= max(FAILURES_IN_A_ROW, 1 + self._ran_as_row_began):
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

    @property
    def count(self) -> int:
        """The number of workers."""
        return len(self.workers)

    async def limit_episodes(self, most: int) -> list[tuple[int, int]]:
        """Have every worker run at most this many episodes at once. For each worker that answers, how many have a place
        and how many wait for one."""

        async def limited(worker: ReplaceableActors[RolloutWorker]) -> tuple[int, int] | None:
            with suppress(Lost):
                return await worker.call("rollout.limit_episodes", lambda actor: actor.limit_episodes.call_one(most))
            return None

        answers = await asyncio.gather(*(limited(worker) for worker in self.workers if worker.serves))
        return [answer for answer in answers if answer is not None]

    async def describe(self, ticket: int) -> str:
        """The group of this ticket in words: its prompt, its worker, and the progress of its episodes."""
        if ticket not in self._groups:
            return f"group {ticket}, which has no prompt yet"
        index, prompt = self._groups[ticket]
        group = f"group {ticket} (prompt {prompt.id}, source {prompt.source})"
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                worker = self.workers[index]
                found = await worker.call("rollout.progress", lambda actor: actor.progress.call_one(ticket))
        except (TimeoutError, Lost):
            return f"{group}, whose worker rollout-{index} does not answer"
        if found is None:
            return f"{group}, which rollout-{index} does not run"
        return f"{group}: {found}, running for {found.seconds:.0f} s on rollout-{index}"

    async def rewards(
        self, prompts: Sequence[Prompt], samples_per_prompt: int, sampling: Mapping[str, Any], policy_version: int
    ) -> list[list[float | None]]:
        """The rewards of each prompt's evaluation episodes, under this policy version or a newer one.

        `sampling` holds the sampling parameters that differ from training. The reward is None if the prompt left no
        room for an answer, and `Failed` if the episode failed. EvaluationFailed after too many of these in a row, or if
        a response has no score.
        """
        failures = 0

        def judge(prompt: Prompt, rewards: Sequence[float | None]) -> None:
            nonlocal failures
            for one in rewards:
                failures = failures + 1 if isinstance(one, Failed) else 0
                if isinstance(one, Failed) and failures >= FAILURES_IN_A_ROW:
                    raise EvaluationFailed(f"{failures} episodes failed in a row; the last: {one.why}")

        async def evaluate(prompt: Prompt) -> list[float | None]:
            name = f"evaluation-{next(self._evaluations)}"

            async def run(worker: RolloutWorker) -> list[float | None]:
                try:
                    return await worker.evaluate.call_one(name, prompt, samples_per_prompt, sampling, policy_version)
                except asyncio.CancelledError:
                    worker.cancel.broadcast([name])  # Monarch does not pass a cancellation on
                    raise

            deaths = 0
            while deaths < POISON_DEATHS:
                try:
                    rewards = await self._run_on(self._least_busy(), "rollout.evaluate", run)
                    break
                except Lost as lost:  # run-7
                    deaths += lost.is_own
                except RunFailed as error:
                    if isinstance(cause := root_cause(error.__cause__ or error), EvaluationFailed):
                        raise cause from error
                    raise
            else:
                rewards = [Failed(f"prompt {prompt.id}: {POISONED}")] * samples_per_prompt
            judge(prompt, rewards)
            return rewards

        async def report(seconds: float) -> None:
            left = [task.get_name() for task in tasks if not task.done()]
            done = f"{len(tasks) - len(left)} of {len(tasks)} prompts are done"
            self._say(f"evaluating for {seconds:.0f} s: {done}; waiting for {', '.join(left[:3])}")

        try:
            async with reporting(report), asyncio.TaskGroup() as group:
                tasks = [group.create_task(evaluate(prompt), name=f"prompt {prompt.id}") for prompt in prompts]
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        return [task.result() for task in tasks]

    async def use(self, replicas: Mapping[str, Generator]) -> None:
        """Sample from these generator replicas from now on."""
        self._replicas = dict(replicas)
        serving = [worker for worker in self.workers if worker.serves]
        for worker in set(self.workers) - set(serving):  # once it is replaced
            telling = asyncio.create_task(self._tell(worker), name=f"announce to {worker.role}")
            self._announcements.add(telling)
            telling.add_done_callback(self._announced)
        await asyncio.gather(*map(self._tell, serving))

    async def close(self) -> None:
        """Cancel running groups and release what the workers hold."""
        self._closed = True
        closing = (worker.call("rollout.close", lambda actor: actor.close.call_one()) for worker in self.workers)
        for ended in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(ended, BaseException):
                raise ended

    async def _tell(self, worker: ReplaceableActors[RolloutWorker]) -> None:
        with suppress(Lost):  # one that replaces it begins with the newest
            await worker.call("rollout.replicas", lambda actor: actor.replicas.call_one(self._replicas))

    def _announced(self, telling: asyncio.Task[None]) -> None:
        self._announcements.discard(telling)
        if not telling.cancelled() and (error := telling.exception()) is not None:  # the run ends
            logger.info("%s: %s", telling.get_name(), error)

    def _home(self, ticket: int) -> int:
        """The worker that runs this group next: the least busy one, or the one on which it began."""
        if not self._fixed:
            return self._least_busy()
        if ticket not in self._homes:
            self._homes[ticket] = self._least_busy()
        return self._homes[ticket]

    def _least_busy(self) -> int:
        return min(range(len(self.workers)), key=lambda index: (not self.workers[index].serves, self._running[index]))

    async def _run_on(self, index: int, endpoint: str, call: Callable[[RolloutWorker], Awaitable[T]]) -> T:
        self._running[index] += 1
        try:
            return await self.workers[index].call(endpoint, call)
        finally:
            self._running[index] -= 1
