"""Runs the episodes of one prompt and takes the group to the queue. Asyncio; what it talks to are Protocols.

Invariants
    RG-1  A ticket that was started is reported exactly once: as a group, as rejected, or as failed, also when this is
          cancelled.
    RG-2  When one episode fails, the others of its group are cancelled, and their requests with them.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from goaly.backlog.admission import Ticket
from goaly.errors import EpisodeError
from goaly.generate.request import Sampling
from goaly.prompts.prompt import Message, Prompt
from goaly.rollout.episode import EpisodeContext, EpisodeFunction
from goaly.rollout.policy import ContextFull, RoutedPolicy, Sampler
from goaly.telemetry.spans import span
from goaly.trajectory import Group, Trajectory

CANCELLED = "cancelled"
PROMPT_TOO_LONG = "prompt_too_long"


class Chat(Protocol):
    """What turns messages into tokens, and tokens into text."""

    def render(self, messages: Sequence[Message]) -> list[int]:
        """The chat as tokens; the policy's answer comes next."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text that the tokens stand for."""
        ...


class Queue(Protocol):
    """Where groups go."""

    async def started(self, ticket: int) -> bool:
        """The ticket's episodes start; False: they should not."""
        ...

    async def put(self, group: Group) -> bool:
        """A complete group; False: it is not trained: it came too late, or has no signal."""
        ...

    async def reject(self, ticket: int, why: str) -> bool:
        """Leave the ticket out on purpose."""
        ...

    async def fail(self, ticket: int, why: str) -> bool:
        """Something broke."""
        ...


class Rewards(Protocol):
    """Who judges."""

    async def score(self, prompt: Prompt, response: str) -> float:
        """The verifier's value for this response to this prompt."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """What became of a group, without its tokens."""

    ticket: int
    prompt_id: str
    seconds: float
    rewards: tuple[float, ...] = ()
    trained_tokens: int = 0
    failed: str | None = None
    """Why it failed; None: it did not."""
    rejected: str | None = None
    """Why it was left out; None: it was not."""


class GroupRunner:
    """Runs groups of episodes, many at once."""

    def __init__(
        self,
        episode: EpisodeFunction,
        *,
        name: str,
        sampler: Sampler,
        queue: Queue,
        rewards: Rewards,
        chat: Chat,
        sampling: Sampling,
        group_size: int,
        max_context: int,
        concurrency: int,
        record: Callable[[int, Prompt, Trajectory], None] | None = None,
    ):
        self._episode = episode
        self._name = name
        self._sampler = sampler
        self._queue = queue
        self._rewards = rewards
        self._chat = chat
        self._sampling = sampling
        self._group_size = group_size
        self._max_context = max_context
        self._places = asyncio.Semaphore(concurrency)
        self._record = record
        self._evaluations = 0

    async def run(self, ticket: Ticket, prompt: Prompt) -> GroupSummary:
        """Run the group's episodes and report their end to the queue."""
        began = time.monotonic()
        samples: tuple[Trajectory, ...] = ()
        failed = rejected = None
        try:
            if not await self._queue.started(ticket.index):
                rejected = "it had ended before it started"
            else:
                samples = await self._sample_group(ticket, prompt)
                group = Group(ticket=ticket.index, prompt_id=prompt.id, source=prompt.source, samples=samples)
                if not await self._queue.put(group):
                    rejected = "it came too late, or has no signal"
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.ensure_future(self._queue.fail(ticket.index, CANCELLED)))  # RG-1
            raise
        except ContextFull as error:
            rejected = f"{PROMPT_TOO_LONG}: {error}"
            await self._queue.reject(ticket.index, PROMPT_TOO_LONG)
        except Exception as error:
            failed = _reason(prompt, error)
            await self._queue.fail(ticket.index, failed)
        return GroupSummary(
            ticket=ticket.index,
            prompt_id=prompt.id,
            seconds=time.monotonic() - began,
            rewards=tuple(sample.reward for sample in samples),
            trained_tokens=sum(sample.trained_tokens for sample in samples),
            failed=failed,
            rejected=rejected,
        )

    async def evaluate(
        self, prompt: Prompt, samples: int, temperature: float | None = None, min_version: int = 0
    ) -> list[float]:
        """The rewards of so many episodes that nobody trains."""
        self._evaluations += 1
        sampling = self._sampling if temperature is None else replace(self._sampling, temperature=temperature)
        name = f"{self._name}.evaluation-{self._evaluations}"
        trajectories = await self._sample(prompt, samples, name=name, sampling=sampling, min_version=min_version)
        return [trajectory.reward for trajectory in trajectories]

    async def _sample_group(self, ticket: Ticket, prompt: Prompt) -> tuple[Trajectory, ...]:
        samples = await self._sample(
            prompt,
            self._group_size,
            name=str(ticket.index),
            sampling=self._sampling,
            min_version=ticket.min_version,
        )
        if self._record is not None:
            for sample in samples:
                self._record(ticket.index, prompt, sample)
        return samples

    async def _sample(
        self, prompt: Prompt, count: int, *, name: str, sampling: Sampling, min_version: int
    ) -> tuple[Trajectory, ...]:
        def context(index: int) -> EpisodeContext:
            policy = RoutedPolicy(
                self._sampler,
                name=f"{name}.{index}",
                session=name,
                sampling=sampling,
                min_version=min_version,
                max_context=self._max_context,
                decode=self._chat.decode,
            )
            return EpisodeContext(policy=policy, reward=self._score, render=self._render, sample_index=index)

        try:
            async with asyncio.TaskGroup() as episodes:  # RG-2
                tasks = [episodes.create_task(self._run_one(prompt, context(index))) for index in range(count)]
        except BaseExceptionGroup as group:
            raise _first(group) from group
        return tuple(task.result() for task in tasks)

    async def _run_one(self, prompt: Prompt, context: EpisodeContext) -> Trajectory:
        async with self._places:  # Unblocked by the end of other episodes.
            trajectory = await self._episode(prompt, context)
        if not isinstance(trajectory, Trajectory):
            raise EpisodeError(f"the episode returned {type(trajectory).__name__}, must be a Trajectory")
        if trajectory.sample_index == context.sample_index:
            return trajectory
        return replace(trajectory, sample_index=context.sample_index)

    async def _score(self, prompt: Prompt, response: str) -> float:
        with span("reward", prompt=prompt.id):
            return await self._rewards.score(prompt, response)

    def _render(self, prompt: Prompt) -> list[int]:
        return self._chat.render(prompt.messages)


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


def _reason(prompt: Prompt, error: Exception) -> str:
    return f"prompt {prompt.id}: {type(error).__name__}: {error}"
