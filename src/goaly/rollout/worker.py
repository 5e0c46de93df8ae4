"""The actor that runs episodes: environments live in its process. A shell around `GroupRunner`.

Samples through a router of its own, so that requests travel straight to a generator replica; `replicas` tells it which
ones serve. Groups go straight to the queue; the controller gets a summary.

Invariants
    WR-1  The task of every group and every evaluation has an owner here: `cancel` and `close` end them, and their
          requests and tickets with them. (Cancelling the caller of `run_group` or `evaluate` does not reach it: Monarch
          does not pass a cancellation on.)
    WR-2  An event loop that an episode blocks for too long ends the process, with the place of the block in its log.
"""

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
from monarch.actor import Actor, ActorError, concurrent_endpoint

from goaly.backlog.admission import Ticket
from goaly.errors import EpisodeError, root_cause
from goaly.generate.request import Sampling
from goaly.generate.router import Router
from goaly.generate.settings import SamplingSettings
from goaly.prompts.prompt import Prompt
from goaly.prompts.settings import ChatSettings
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.reward.judge import Judge
from goaly.reward.settings import RewardSettings
from goaly.rollout.episode import EpisodeFunction
from goaly.rollout.group import CANCELLED, GroupRunner, GroupSummary
from goaly.rollout.running import GroupProgress
from goaly.rollout.settings import RolloutSettings
from goaly.rollout.watchdog import LoopWatchdog
from goaly.telemetry import spans
from goaly.telemetry.journal import Journal
from goaly.trajectory import Group, Trajectory

T = TypeVar("T")


def packed(episode: EpisodeFunction) -> bytes:
    """A script's episode in a form that reaches workers, also when it was defined in `__main__`."""
    return cloudpickle.dumps(episode)


class RolloutWorker(Actor):
    """Runs groups of episodes, many at once."""

    def __init__(
        self,
        name: str,
        settings: RolloutSettings,
        episode: bytes,
        *,
        queue: Any,
        rewards: Any,
        verifiers: Sequence[str] = (),
        tokenizer: str,
        chat: ChatSettings,
        sampling: SamplingSettings,
        group_size: int,
        max_context: int,
        journal: Path | None = None,
        journal_tokens: bool = False,
        first_replica: int = 0,
    ):
        """`episode` is `packed(…)`; `queue` is the hub's actor, and `rewards` too, or the settings of a pool of the
        worker's own, with processes also for `verifiers`; `tokenizer` is a model folder, and `chat` says how its chats
        are rendered.

        `max_context` bounds prompt and answer together: the least of the generator's and a packed row's.
        Workers with different `first_replica` begin with different replicas where all have the same load.
        """
        self._chat = ChatTokenizer(tokenizer, chat)
        self._router = Router(first=first_replica)
        self._journal = Journal(journal, tokens=journal_tokens)
        self._queue = _Queue(queue)
        self._verifiers = Judge(rewards, verifiers) if isinstance(rewards, RewardSettings) else None
        self._watchdog = None if settings.blocked_seconds is None else LoopWatchdog(settings.blocked_seconds)
        self._running: dict[int | str, asyncio.Task[Any]] = {}
        self._runner = GroupRunner(
            cloudpickle.loads(episode),
            name=name,
            sampler=self._router,
            queue=self._queue,
            rewards=self._verifiers or _Rewards(rewards, name),
            chat=self._chat,
            sampling=Sampling.of(sampling, self._chat.stop_token_ids),
            group_size=group_size,
            max_context=max_context,
            concurrency=settings.concurrency,
            episode_seconds=settings.episode_seconds,
            group_seconds=settings.group_seconds,
            record=self._write,
        )

    @concurrent_endpoint
    async def start(self) -> None:
        """Start the worker's own verifiers, where it has some; they are ready on return."""
        if self._watchdog is not None:
            self._watchdog.start()  # WR-2
        if self._verifiers is not None:
            await self._verifiers.start()

    @concurrent_endpoint
    async def replicas(self, handles: Mapping[str, Any]) -> None:
        """Sample from these generator replicas, by name, from now on."""
        self._router.update(handles)

    @concurrent_endpoint
    async def run_group(self, ticket: Ticket, prompt: Prompt) -> GroupSummary:
        """Run the group's episodes and take the group to the queue."""
        task = await self._ended(ticket.index, self._runner.run(ticket, prompt))
        if task.cancelled():
            await self._queue.fail(ticket.index, CANCELLED)  # It may have been cancelled before its first step.
            return GroupSummary(ticket=ticket.index, prompt_id=prompt.id, seconds=0.0, failed=CANCELLED)
        return task.result()

    @concurrent_endpoint
    async def progress(self, ticket: int) -> GroupProgress | None:
        """How far the episodes of this ticket's group are; None when they do not run here."""
        return self._runner.progress(ticket)

    @concurrent_endpoint
    async def evaluate(
        self, name: str, prompt: Prompt, samples: int, sampling: Mapping[str, Any] | None = None, min_version: int = 0
    ) -> list[float | None]:
        """The rewards of so many episodes on this prompt, of which nothing is trained; None where no room for an answer
        was left. `sampling` has what is sampled differently than in training; `cancel` takes the name."""
        task = await self._ended(name, self._runner.evaluate(prompt, samples, sampling, min_version))
        if task.cancelled():
            raise EpisodeError(f"{name} was cancelled")
        return task.result()

    @concurrent_endpoint
    async def cancel(self, running: list[int | str]) -> None:
        """End groups by their ticket, as failed, and evaluations by their name; those that are not here are passed
        over."""
        await self._end(running)

    @concurrent_endpoint
    async def close(self) -> None:
        """End all groups and evaluations, and write what is held."""
        await self._end(list(self._running))
        self._router.update({})
        if self._verifiers is not None:
            await self._verifiers.close()
        self._journal.close()
        if self._watchdog is not None:
            self._watchdog.stop()
        spans.flush()

    async def _ended(self, key: int | str, episodes: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """The task of these episodes, once it has ended (WR-1)."""
        task = self._running[key] = asyncio.create_task(episodes, name=f"episodes of {key}")
        try:
            await asyncio.wait([task])  # Unblocked by the episodes' end, or by `cancel`.
        finally:
            del self._running[key]
            task.cancel()  # Nothing once it has ended; the end of it when this endpoint is stopped.
        return task

    async def _end(self, keys: Iterable[int | str]) -> None:
        tasks = [self._running[key] for key in keys if key in self._running]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)  # Unblocked by the groups' own report to the queue.

    def _write(self, ticket: int, prompt: Prompt, trajectory: Trajectory) -> None:
        tokens = trajectory.tokens["tokens"].tolist()
        answer_at = trajectory.turns[0].stop if trajectory.turns else 0
        self._journal.write(
            trajectory,
            ticket=ticket,
            prompt=self._chat.decode(tokens[:answer_at]),
            response=self._chat.decode(tokens[answer_at:]),
            source=prompt.source,
            answer=prompt.answer,
        )


class _Queue:
    """The trajectory queue's actor, as a group runner speaks to it."""

    def __init__(self, queue: Any):
        self._queue = queue

    async def started(self, ticket: int) -> bool:
        return await _answer(self._queue.started.call_one(ticket))

    async def put(self, group: Group) -> bool:
        return await _answer(self._queue.put.call_one(group))

    async def reject(self, ticket: int, why: str) -> bool:
        return await _answer(self._queue.reject.call_one(ticket, why))

    async def fail(self, ticket: int, why: str) -> bool:
        return await _answer(self._queue.fail.call_one(ticket, why))


class _Rewards:
    """The reward pool's actor, as a group runner speaks to it."""

    def __init__(self, rewards: Any, name: str):
        self._rewards = rewards
        self._name = name
        self._numbers = count()

    async def score(self, prompt: Prompt, response: str) -> float:
        request = f"{self._name}.{next(self._numbers)}"
        try:
            return await _answer(self._rewards.score.call_one(prompt, response, request))
        except asyncio.CancelledError:
            self._rewards.cancel.broadcast(request)  # Monarch does not pass a cancellation on
            raise


async def _answer(call: Awaitable[Any]) -> Any:
    """What the actor answered; what it raised is raised here as itself, not as the report about it."""
    try:
        return await call
    except ActorError as error:
        raise root_cause(error) from error
