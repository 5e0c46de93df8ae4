"""Runs the episodes of one prompt and reports the group to the queue.

rollout-1: `run` reports its ticket exactly once: as a group, as rejected, or as failed, also when it is cancelled.
rollout-2: When one episode fails, the other episodes of its group and their requests are cancelled.
rollout-4: An episode that exceeds its time limit, or raises after its session was exhausted, is trained as far as it
    came, as truncated, or leaves its group if the time was not its policy's. The group fails if its chats have no
    answer to train, its environment failed, or its verifier gave no score, or if all episodes were late.
rollout-5: An episode that begins again has a session, a policy, an API key and request ids of its own. Of its
    earlier attempts nothing is trained, no request is left, and what was counted in them counts.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from goaly.agents.answer_parser import AnswerParser
from goaly.agents.chat import Chat
from goaly.agents.session import Session, SessionEnd
from goaly.agents.session_files import SessionFiles
from goaly.backlog.events import CANCELLED, Dropped, Ticket
from goaly.base.errors import EpisodeError, cause_of, first_error
from goaly.base.telemetry.metrics import count
from goaly.base.telemetry.spans import span
from goaly.environments.protocol import ActionRefused, EnvironmentFailed
from goaly.generate.policy import ContextFull, Policy, PromptFillsContext
from goaly.generate.request import Sampling, evaluation_seeds
from goaly.generate.router import Router
from goaly.prompts.prompt import PASS_REWARD, Prompt
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.rollout.cut_off_reward import NoneFinished, settled
from goaly.rollout.episode import EpisodeContext, EpisodeFunction, is_resumable, trajectories_of
from goaly.rollout.episode_places import EpisodePlaces
from goaly.rollout.failed_episodes import FailedEpisodes
from goaly.rollout.hints import with_hints
from goaly.rollout.running_episodes import (
    EpisodeTimeout,
    EvaluationFailed,
    Failed,
    GroupProgress,
    GroupTimeout,
    RunningEpisode,
    RunningGroup,
    within,
)
from goaly.rollout.settings import RolloutSettings
from goaly.trajectory import Group, Trajectory, episode_reward

if TYPE_CHECKING:
    from goaly.agents.gateway import Gateway

logger = logging.getLogger(__name__)

T = TypeVar("T")

NO_ROOM = (PromptFillsContext.reason, ContextFull.reason, NoneFinished.reason)
"""Reasons of groups that were rejected because their tokens leave no room for an answer."""

Report = Callable[[Group | Dropped], Awaitable[bool]]
"""Tells the queue how a ticket ended; False if a complete group is not trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """How a group ended, without its tokens."""

    ticket: int
    prompt_id: str
    rewards: tuple[float, ...] = ()
    failed: str | None = None
    """Why it failed; None if it did not."""
    rejected: str | None = None
    """Why it was rejected; None if it was not."""


@dataclass(kw_only=True, eq=False)
class GroupRunner:
    """Runs groups of episodes, many at once."""

    name: str
    """The first part of the ids of evaluations' requests."""
    episode: EpisodeFunction
    settings: RolloutSettings
    sampler: Router
    report: Report
    score: Callable[[Prompt, str], Awaitable[float]]
    """The verifier's score of a response."""
    chat: ChatTokenizer
    parser: AnswerParser
    """Reads the answers of episodes that chat."""
    sampling: Sampling
    group_size: int
    max_context: int
    evaluation_context: int | None = None
    """The same for evaluations, whose answers no packed row must hold; None: `max_context`."""
    gateway: "Gateway | None" = None
    """Serves the sessions of episodes by HTTP."""
    session_files: SessionFiles | None = None
    """Has the records of sessions, for a worker that takes over a group."""
    failed_episodes: FailedEpisodes | None = None
    """Keeps what the chats of failed groups have said."""
    seed: int = 0
    """Seeds the requests of evaluations, and with `rollout.repeatable` all others."""

    def __post_init__(self) -> None:
        self.places = EpisodePlaces(self.settings.most_episodes)
        self._evaluations = 0
        self._running: dict[int, RunningGroup] = {}

    def progress(self, ticket: int) -> GroupProgress | None:
        """The progress of this ticket's group; None if it does not run here."""
        group = self._running.get(ticket)
        return None if group is None else group.progress()

    async def run(self, ticket: Ticket, prompt: Prompt) -> GroupSummary:
        """Run the episodes of a group and report how they ended."""
        rewards: tuple[float, ...] = ()
        failed = rejected = None
        running = self._running[ticket.index] = self._trained_group(ticket)
        try:
            group = await self._sample_group(ticket, prompt, running)
            rewards = tuple(group.rewards)
            if not await self.report(group):
                rejected = "it came too late, or has no signal"
        except asyncio.CancelledError:
            dropped = Dropped.failed(ticket.index, CANCELLED, running.counts)
            await asyncio.shield(asyncio.ensure_future(self.report(dropped)))  # rollout-1
            raise
        except ContextFull as error:
            rejected = f"{error.reason}: {error}"
            await self.report(Dropped.rejected(ticket.index, error.reason, running.counts))
        except Exception as error:
            why = failed = f"prompt {prompt.id}: {type(error).__name__}: {error}"
            if isinstance(error, EpisodeTimeout | GroupTimeout):
                why, failed = error.reason, f"{error.reason}: {error}"
            await self.report(Dropped.failed(ticket.index, why, running.counts))
            if self.failed_episodes is not None:
                await self.failed_episodes.keep(ticket.index, running.episodes)
        finally:
            del self._running[ticket.index]
            if self.session_files is not None:
                for episode in running.episodes:
                    self.session_files.discard(episode.policy.name)
        return GroupSummary(ticket=ticket.index, prompt_id=prompt.id, rewards=rewards, failed=failed, rejected=rejected)

    async def evaluate(
        self, prompt: Prompt, samples: int, changes: Mapping[str, Any] | None = None, min_version: int = 0
    ) -> list[float | None]:
        """The rewards of `samples` episodes that are not trained: 0 for an episode that fills the context, `Failed` for
        one that raises or exceeds its time limit, None for one whose prompt leaves no room for an answer. `changes`
        overrides sampling values. EvaluationFailed if a response has no score."""
        self._evaluations += 1
        sampling = self.sampling.changed(Sampling(**(changes or {})))
        name = f"{self.name}.evaluation-{self._evaluations}"

        async def reward(episode: RunningEpisode) -> float | None:
            try:
                return episode_reward(await self._run_one(prompt, episode))
            except Exception as error:
                cause, is_late = first_error(error), isinstance(error, EpisodeTimeout)
                why = f"prompt {prompt.id}: {cause_of(cause)}"
                if isinstance(cause, ContextFull):
                    logger.info("an evaluation counts prompt %s as not solved: %s", prompt.id, cause)
                    return None if isinstance(cause, PromptFillsContext) else 0.0
                if episode.is_unjudged and not is_late:
                    raise EvaluationFailed(why) from error
                logger.warning("an evaluation counts reward 0: %s", why)
                return Failed(why)

        seeds = evaluation_seeds(self.seed, min_version, prompt.id)
        group = self._group(
            samples, name=name, sampling=sampling, min_version=min_version, seeds=seeds, evaluation=True
        )
        return list(await _all(group, reward))

    async def _sample_group(self, ticket: Ticket, prompt: Prompt, running: RunningGroup) -> Group:
        try:
            async with asyncio.timeout(None) as limit:
                made = await _all(running, partial(self._run_one, prompt, group_limit=limit))
        except Exception as error:
            if not limit.expired():
                raise
            raise GroupTimeout(
                f"the episodes of prompt {prompt.id} exceeded rollout.group_seconds={self.settings.group_seconds}; "
                f"{running.done} of {self.group_size} were done"
            ) from error
        if all(one.is_late for one in running.episodes):  # it says nothing of the policy, and may go on for ever
            raise EpisodeTimeout(
                f"all episodes of prompt {prompt.id} exceeded rollout.episode_seconds={self.settings.episode_seconds}"
            )
        of_episodes = [(one, those) for one, those in zip(running.episodes, made, strict=True) if those]
        cut_off = [those for one, those in of_episodes if one.is_cut_off]
        unscored = [those for one, those in of_episodes if one.is_unscored and not one.is_cut_off]
        finished = [those for one, those in of_episodes if not (one.is_unscored or one.is_cut_off)]
        episodes = settled(finished, cut_off, self.settings.cut_off_reward, unscored)
        left = len(made) - len(episodes)
        if not episodes:
            raise NoneFinished(f"rollout.cut_off_reward=exclude: all episodes of prompt {prompt.id} were cut off")
        group = Group(
            ticket=ticket.index,
            prompt_id=prompt.id,
            source=prompt.source,
            samples=tuple(one for trajectories in episodes for one in trajectories),
            counts=running.counts | ({"rollout/excluded_episodes": left} if left else {}),
            left=left,
        )
        if not any(group.trained_tokens):
            raise EpisodeError(
                "no token of its episodes can be trained: each was sampled with trained=False or has no finite log-prob"
            )
        hint = self.settings.hint
        return group if hint is None else with_hints(group, prompt, hint, self.chat, self.max_context)

    def _trained_group(self, ticket: Ticket) -> RunningGroup:
        name, min_version = str(ticket.index), ticket.min_version
        seeds = f"{self.seed}/{name}" if self.settings.repeatable else None
        group = self._group(self.group_size, name=name, sampling=self.sampling, min_version=min_version, seeds=seeds)
        if self.session_files is not None:
            for episode in group.episodes:
                episode.begin(self.session_files.attempt(episode.policy.name))
        return group

    def _group(
        self,
        count: int,
        *,
        name: str,
        sampling: Sampling,
        min_version: int,
        seeds: str | None,
        evaluation: bool = False,
    ) -> RunningGroup:
        def policy(index: int) -> Policy:
            return Policy(
                sampler=self.sampler,
                name=f"{name}.{index}",
                session=name,
                sampling=sampling,
                min_version=min_version,
                max_context=(evaluation and self.evaluation_context) or self.max_context,
                decode=self.chat.decode,
                evaluation=evaluation,
                seeds=None if seeds is None else f"{seeds}.{index}",
            )

        return RunningGroup([RunningEpisode(policy(index), index) for index in range(count)])

    def _session(self, prompt: Prompt, running: RunningEpisode) -> Session:
        """The session of an episode. It goes on from the records of an earlier worker, if there are any."""
        files, name = self.session_files, running.policy.name
        is_recorded = files is not None and not running.policy.evaluation
        session = Session(
            self.chat,
            prompt_id=prompt.id,
            sample_index=running.sample_index,
            limits=self.settings.session,
            log=partial(files.write, name) if is_recorded else None,
        )
        if is_recorded:
            session.replay(files.begin(name, own=is_resumable(self.episode)))
            running.policy.go_on_after(len(session.turns))
        return session

    async def _run_one(
        self, prompt: Prompt, running: RunningEpisode, group_limit: asyncio.Timeout | None = None
    ) -> tuple[Trajectory, ...]:
        name = f"episode {running.sample_index} of prompt {prompt.id}"
        async with self.places:  # Unblocked by the end of other episodes.
            seconds = self.settings.group_seconds
            if group_limit is not None and seconds is not None and group_limit.when() is None:
                group_limit.reschedule(asyncio.get_running_loop().time() + seconds)
            while True:
                try:
                    return await self._attempt(prompt, running, name)
                except Exception as error:
                    cause = first_error(error)
                    running.why = cause_of(cause)
                    has_lost = isinstance(cause, EnvironmentFailed) and not isinstance(cause, ActionRefused)
                    if not has_lost or running.attempt >= self.settings.episode_retries:
                        raise
                    logger.warning("%s begins again: %s", name, cause_of(cause))
                failed = running.policy
                running.begin(running.attempt + 1)
                running.counts["rollout/episode_retries"] += 1
                if self.session_files is not None and not failed.evaluation:
                    self.session_files.begin(running.policy.name)  # first: the next worker goes on with the newest
                    self.session_files.discard(failed.name)

    async def _attempt(self, prompt: Prompt, running: RunningEpisode, name: str) -> tuple[Trajectory, ...]:
        async def judge(prompt: Prompt, response: str) -> float:
            with span("reward", prompt=prompt.id):
                return await running.judged(self.score(prompt, response))

        session = running.session = self._session(prompt, running)
        gateway, policy = self.gateway, running.policy
        served = nullcontext() if gateway is None else gateway.serve(session, policy, self.parser)
        with running.under_way(), _ended(session), served as endpoint:
            chat = Chat(policy, session, self.parser, prompt.tools)
            context = EpisodeContext(
                policy=policy,
                reward=judge,
                prompt=prompt,
                sample_index=running.sample_index,
                chat=chat,
                tokenizer=self.chat,
                _endpoint=endpoint,
            )
            try:
                episode = self.episode(prompt, context)
                made = trajectories_of(
                    await within(self.settings.episode_seconds, episode, name, running.ran_out_of_time)
                )
                passes = episode_reward(made) >= PASS_REWARD
                has_said = session.reward is not None or chat.was_refused or passes
                running.is_cut_off = session.exhausted and not has_said
                running.is_unscored &= not passes
            except Exception as error:
                made = self._cut_off(running, session, error, name)
        index = running.sample_index
        return tuple(one if one.sample_index == index else replace(one, sample_index=index) for one in made)

    def _cut_off(
        self, running: RunningEpisode, session: Session, error: Exception, name: str
    ) -> tuple[Trajectory, ...]:
        """The trajectories of an episode that this error ended, or none if it leaves its group (rollout-4). Raises the
        error if no limit cut it off."""
        cause, is_late, setting = first_error(error), isinstance(error, EpisodeTimeout), self.settings.cut_off_reward
        is_evaluation, reward = running.policy.evaluation, session.reward
        has_broken = running.is_unjudged or isinstance(cause, EnvironmentFailed)
        is_known = (is_late or session.exhausted) and any(turn.trained for turn in session.turns)
        was_innocent = running.was_held_up and is_known and not has_broken
        leaves = is_late and reward is None and (setting == "exclude" or was_innocent)
        if (is_evaluation and is_late) or not (leaves or (is_known and not has_broken)):
            raise error
        if is_late:
            session.end(SessionEnd.TIMED_OUT)
        running.is_cut_off = reward is None and isinstance(setting, str)
        logger.info("%s was cut off: %s", name, cause_of(cause))
        if reward is None:
            reward = 0.0 if is_evaluation or isinstance(setting, str) else setting
        return () if leaves else tuple(session.trajectories(reward))


@contextmanager
def _ended(session: Session) -> Iterator[None]:
    """The block in which an episode runs; its session ends with it, and is counted."""
    try:
        yield
        session.end(SessionEnd.COMPLETE)
    except EpisodeTimeout:
        session.end(SessionEnd.TIMED_OUT)
        raise
    finally:
        session.end(SessionEnd.ABANDONED)
        count("agents/malformed_calls", session.malformed_calls)
        count("agents/untrained_turns", session.untrained_turns)
        count("agents/overridden_requests", session.overridden_requests)
        count("agents/left_out_messages", session.left_out_messages)
        if session.ended is not SessionEnd.COMPLETE:
            count(f"agents/sessions_{session.ended}")


async def _all(group: RunningGroup, run: Callable[[RunningEpisode], Coroutine[Any, Any, T]]) -> tuple[T, ...]:
    """The result of each episode, or the error of the first one that fails."""
    try:
        async with asyncio.TaskGroup() as episodes:  # rollout-2
            tasks = [episodes.create_task(run(episode)) for episode in group.episodes]
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors
    return tuple(task.result() for task in tasks)
