"""The actor that runs episodes with `GroupRunner`; environments live in its process.

Each worker has its own router, so requests go straight to a generator replica; `replicas` names those that serve.
Groups go straight to the queue, and the controller gets a summary.

    rollout-9: This actor owns the task of every group and evaluation. `cancel` and `close` end them with their requests
        and tickets. Monarch does not forward cancellations of their callers.
"""

import asyncio
import io
import sys
from collections.abc import Coroutine, Mapping, Sequence
from itertools import count
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import cloudpickle
from monarch.actor import Actor

from goaly.agents.answer_parser import AnswerParser
from goaly.agents.session_files import SessionFiles
from goaly.backlog.events import CANCELLED, Dropped, Ticket
from goaly.base.actors import NamedTasks, answer_of, concurrent_endpoint
from goaly.base.errors import EpisodeError
from goaly.base.registry import function_at
from goaly.base.telemetry import spans
from goaly.base.watchdog import LoopWatchdog
from goaly.generate.request import Sampling
from goaly.generate.router import Router
from goaly.generate.settings import SamplingSettings
from goaly.prompts.prompt import Prompt
from goaly.prompts.settings import ChatSettings
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.reward.settings import RewardSettings
from goaly.reward.verifier_pool import Judge
from goaly.rollout.episode import EpisodeFunction, is_resumable
from goaly.rollout.failed_episodes import FAILED_FOLDER, FailedEpisodes
from goaly.rollout.group_runner import GroupRunner, GroupSummary
from goaly.rollout.running_episodes import GroupProgress
from goaly.rollout.settings import RolloutSettings
from goaly.trajectory import Group

if TYPE_CHECKING:
    from goaly.backlog.trajectory_queue import TrajectoryQueue
    from goaly.generate.generator import Generator
    from goaly.reward.pool_actor import RewardPool


def pickled(episode: EpisodeFunction) -> bytes:
    """A script's episode, for its workers. They import a script that was started by `python -m`; the episode of another
    `__main__` is pickled by value, with all that it refers to."""
    into = io.BytesIO()
    _ScriptPickler(into).dump(episode)
    return into.getvalue()


class _ScriptPickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        main = sys.modules["__main__"]
        if (
            isinstance(obj, FunctionType)
            and (spec := getattr(main, "__spec__", None)) is not None
            and getattr(main, obj.__name__, None) is obj
        ):
            return function_at, (f"{spec.name}:{obj.__name__}",)
        return super().reducer_override(obj)


class RolloutWorker(Actor):
    """Runs groups of episodes, many at once."""

    def __init__(
        self,
        name: str,
        settings: RolloutSettings,
        episode: bytes,
        *,
        queue: "TrajectoryQueue",
        rewards: "RewardPool | RewardSettings",
        verifiers: Sequence[str] = (),
        tokenizer: str,
        chat: ChatSettings,
        sampling: SamplingSettings,
        group_size: int,
        max_context: int,
        evaluation_context: int | None = None,
        first_replica: int = 0,
        sessions: Path | None = None,
        listener: str | None = None,
        seed: int = 0,
    ):
        """`episode` comes from `pickled`. `rewards` is the hub's actor, or the settings of verifier processes of this
        worker's own; these also run `verifiers`. `tokenizer` is a model folder, and `chat` says how to render its
        chats.

        `max_context` is the limit on prompt and answer together: the smaller of the generator's and a packed row's.
        That of evaluations is `evaluation_context`, the generator's; None: the same one. Among replicas of equal load
        the router prefers `first_replica`; each worker should have a different one, which also decides its port.
        `sessions` is the folder of the run's sessions that may go on in another worker, beside that of failed episodes,
        and `listener` the name of the socket that the controller keeps for them.
        """
        self._chat = ChatTokenizer(tokenizer, chat)
        self._parser = AnswerParser(self._chat, chat)
        self._router = Router(first=first_replica)
        self._queue = queue
        if isinstance(rewards, RewardSettings):
            judge = self._verifiers = Judge(rewards, verifiers)
        else:
            judge, self._verifiers = _RemoteRewards(rewards, name), None
        self._watchdog = None if settings.blocked_seconds is None else LoopWatchdog(settings.blocked_seconds)
        self._requests = NamedTasks()  # rollout-9
        run_episode: EpisodeFunction = cloudpickle.loads(episode)
        is_recorded = settings.endpoint is not None or is_resumable(run_episode)
        files = SessionFiles(sessions) if is_recorded and sessions is not None else None
        self._gateway = None
        if settings.endpoint is not None:
            from goaly.agents.gateway import Gateway  # imports starlette

            longest = evaluation_context or max_context  # each session's own limit is its policy's
            self._gateway = Gateway(settings.endpoint, first_replica, tokenizer, longest, files, listener)
        self._runner = GroupRunner(
            name=name,
            episode=run_episode,
            settings=settings,
            sampler=self._router,
            report=self._report,
            score=judge.score,
            chat=self._chat,
            parser=self._parser,
            sampling=Sampling.of(sampling, self._chat.stop_token_ids),
            group_size=group_size,
            max_context=max_context,
            evaluation_context=evaluation_context,
            gateway=self._gateway,
            session_files=files,
            failed_episodes=None if sessions is None else FailedEpisodes(sessions.with_name(FAILED_FOLDER)),
            seed=seed,
        )

    @concurrent_endpoint
    async def start(self) -> None:
        """Load the parsers, and start the endpoint, the watchdog and the worker's own verifiers, if it has them."""
        await self._start()

    async def _start(self) -> None:
        await asyncio.to_thread(self._parser.load)
        if self._gateway is not None:
            await self._gateway.start(self._parser)
        if self._watchdog is not None:
            self._watchdog.start()
        if self._verifiers is not None:
            await self._verifiers.start()

    @concurrent_endpoint
    async def replicas(self, handles: "Mapping[str, Generator]") -> None:
        """Sample from these generator replicas (by name) from now on."""
        self._use(handles)

    def _use(self, handles: "Mapping[str, Generator]") -> None:
        self._router.update(handles)

    @concurrent_endpoint
    async def run_group(self, ticket: Ticket, prompt: Prompt) -> GroupSummary:
        """Run the episodes of a group and report it to the queue."""
        task = await self._requests.run(ticket.index, self._group(ticket, prompt))
        if task.cancelled():  # perhaps before its first step, and so without a report
            await self._report(Dropped.failed(ticket.index, CANCELLED))
            return GroupSummary(ticket=ticket.index, prompt_id=prompt.id, failed=CANCELLED)
        return task.result()

    def _group(self, ticket: Ticket, prompt: Prompt) -> Coroutine[Any, Any, GroupSummary]:
        return self._runner.run(ticket, prompt)

    @concurrent_endpoint
    async def progress(self, ticket: int) -> GroupProgress | None:
        """The progress of this ticket's group; None if it does not run here."""
        return self._progress(ticket)

    def _progress(self, ticket: int) -> GroupProgress | None:
        return self._runner.progress(ticket)

    @concurrent_endpoint
    async def limit_episodes(self, most: int) -> tuple[int, int]:
        """Run at most this many episodes at once from now on; how many have a place, and how many wait for one."""
        self._runner.places.limit(most)
        return self._runner.places.taken, self._runner.places.waiting

    @concurrent_endpoint
    async def evaluate(
        self, name: str, prompt: Prompt, samples: int, sampling: Mapping[str, Any] | None = None, min_version: int = 0
    ) -> list[float | None]:
        """The rewards of `samples` episodes that are not trained, as `GroupRunner.evaluate` has them. `sampling`
        overrides sampling values; `cancel` takes the name."""
        task = await self._requests.run(name, self._runner.evaluate(prompt, samples, sampling, min_version))
        if task.cancelled():
            raise EpisodeError(f"{name} was cancelled")
        return task.result()

    @concurrent_endpoint
    async def cancel(self, running: list[int | str]) -> None:
        """End groups by ticket, as failed, and evaluations by name; unknown ones are ignored."""
        await self._requests.cancel(running)

    @concurrent_endpoint
    async def close(self) -> None:
        """End all groups and evaluations, and the episode's own resources: `close` of an episode that has one."""
        await self._close()

    async def _close(self) -> None:
        await self._requests.cancel()
        if (close := getattr(self._runner.episode, "close", None)) is not None:
            await close()
        self._router.update({})
        if self._gateway is not None:
            await self._gateway.close()
        if self._verifiers is not None:
            await self._verifiers.close()
        if self._watchdog is not None:
            self._watchdog.stop()
        spans.flush()

    async def _report(self, end: Group | Dropped) -> bool:
        return await answer_of(self._queue.report.call_one(end))


class _RemoteRewards:
    """Scores by the hub's `RewardPool`; cancelling a call cancels the request there."""

    def __init__(self, rewards: "RewardPool", name: str):
        self._rewards = rewards
        self._name = name
        self._numbers = count()

    async def score(self, prompt: Prompt, response: str) -> float:
        request = f"{self._name}.{next(self._numbers)}"
        try:
            return await answer_of(self._rewards.score.call_one(prompt, response, request))
        except asyncio.CancelledError:
            self._rewards.cancel.broadcast(request)  # Monarch does not forward cancellations
            raise
