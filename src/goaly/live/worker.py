"""The actor of live traffic: a rollout worker that serves clients, and whose groups are made of what they said.

    tick      ends what has waited for too long, learns from the queue which tickets have ended, writes the status
    judge     gives rewards (`judging.py`)
    groups    a ticket's group is the next batch of turns with a reward; on disk before the queue gets it

Each loop has a task of its own, and none waits for another. A worker that takes the place of a dead one reads the
records, and goes on with its sessions, turns and tickets.
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from goaly.agents.listeners import listener_of
from goaly.backlog.events import Dropped, Ticket
from goaly.backlog.ledger import State
from goaly.base.actors import answer_of, concurrent_endpoint
from goaly.base.process import vital_task
from goaly.base.registry import function_at
from goaly.generate.policy import Policy
from goaly.generate.request import Sampling
from goaly.generate.router import Router
from goaly.live.canary_questions import CanaryQuestions
from goaly.live.collection import CollectionLimits
from goaly.live.gate_records import JudgedAnswer
from goaly.live.gateway import LiveGateway
from goaly.live.hints import teacher_sees
from goaly.live.judges import TurnJudge, VerifierJudge, VotingJudge
from goaly.live.judging import Judging
from goaly.live.log import LiveLog
from goaly.live.settings import LiveJudgeSettings, LiveSettings
from goaly.live.status import LiveStatus, write_status
from goaly.live.traffic import Traffic
from goaly.live.traffic_split import Arm, TrafficSplit, arm_of_replica
from goaly.live.turn import LiveTurn, ReactionKind, TurnEnd
from goaly.live.turn_samples import group_of
from goaly.prompts.prompt import Message, Prompt
from goaly.rollout.group_runner import GroupSummary
from goaly.rollout.rollout_worker import RolloutWorker
from goaly.rollout.running_episodes import GroupProgress
from goaly.rollout.settings import RolloutSettings

if TYPE_CHECKING:
    import openai

    from goaly.generate.generator import Generator

TICK_SECONDS = 1.0
CANARY_SECONDS = 600.0
"""Time limit of an answer to a canary problem where episodes have none."""
LIVE_FOLDER = "live"


class LiveWorker(RolloutWorker):
    """Serves live traffic, and makes groups of it."""

    def __init__(
        self,
        name: str,
        settings: RolloutSettings,
        *episode: Any,
        live: LiveSettings,
        sessions: Path,
        replicas: int = 1,
        **worker: Any,
    ):
        """The arguments of a `RolloutWorker`, and the settings of live traffic. `settings.endpoint` is the address of
        the server."""
        endpoint = settings.endpoint
        assert endpoint is not None, "checked with the settings"
        listener: str | None = worker.pop("listener", None)
        super().__init__(name, replace(settings, endpoint=None), *episode, sessions=sessions, **worker)
        self._settings = live
        self._group_size: int = worker["group_size"]
        self._sees = teacher_sees(live.hint, self._chat, worker["max_context"])
        self._folder = sessions.with_name(LIVE_FOLDER)
        self._log = LiveLog(self._folder)
        self._traffic = Traffic(
            chat=self._chat,
            limits=limits_of(live),
            log=self._log,
            row_length=worker["max_context"],
            clock=time.time,
            redact=None if live.redact is None else function_at(live.redact),
            on_change=self._changes,
        )
        self._changed = asyncio.Event()
        self._waiting: dict[int, float] = {}
        """The tickets that wait for their turns, and since when."""
        self._gated, self._candidates = live.gate is not None, Router()
        self._split = TrafficSplit(self._router, self._candidates, share=live.candidate_share)
        self._replicas = replicas
        longest = worker.get("evaluation_context") or worker["max_context"]
        sampling = Sampling.of(worker["sampling"], self._chat.stop_token_ids)
        self._server = LiveGateway(
            live,
            self._traffic,
            name,
            self._soon,
            host=endpoint.host,
            port=endpoint.port,
            chat=self._chat,
            parser=self._parser,
            sampling=sampling,
            max_context=longest,
            sampler=self._split,
            listen=None if listener is None else partial(listener_of, listener),
        )
        self._own = Policy(
            sampler=self._router,
            name=f"{name}.judge",
            session=f"{name}.judge",
            sampling=sampling,
            min_version=0,
            max_context=longest,
            decode=self._chat.decode,
            evaluation=True,
        )
        self._canaries = CanaryQuestions(
            {Arm.SERVED: self._router, Arm.CANDIDATE: self._candidates},
            self._chat,
            self._parser,
            self._runner.score,
            sampling=sampling,
            max_context=longest,
            seconds=settings.episode_seconds or CANARY_SECONDS,
        )
        self._judging = Judging(self._judge_of(live.judge), live.judge, self._traffic)
        self._client: openai.AsyncOpenAI | None = None
        self._trained_at: float | None = None
        self._tasks: list[asyncio.Task[Any]] = []

    async def _start(self) -> None:
        self._loop = asyncio.get_running_loop()
        await super()._start()
        if (judge := self._judging.judge) is not None:
            await judge.start()
        await self._server.start(self._parser)
        self._tasks = [vital_task(self._tick(), "live traffic"), vital_task(self._judging.run(), "judge")]

    def _use(self, handles: "Mapping[str, Generator]") -> None:
        arms = {name: arm_of_replica(name, self._replicas) if self._gated else Arm.SERVED for name in handles}
        served = {name: handle for name, handle in handles.items() if arms[name] is Arm.SERVED}
        super()._use(served)
        self._candidates.update({name: handle for name, handle in handles.items() if name not in served})
        self._server.is_open = bool(served)

    @concurrent_endpoint
    async def canary(self, arm: Arm, version: int, prompt: Prompt, name: str) -> JudgedAnswer | None:
        """The judged answer of this arm to a canary problem; None if it could not be scored."""
        return await self._canaries.answer(arm, version, prompt, name)

    @concurrent_endpoint
    async def on_trial(self, candidate: int | None) -> None:
        """Send a share of the new conversations to this candidate, or to none."""
        self._split.use(candidate)

    @concurrent_endpoint
    async def went_back(self, served: int, newest: int) -> None:
        """The trainer, at version `newest`, has the weights of version `served` again, as `GroupQueue.went_back`."""
        self._traffic.collection.same_weights = {served: newest}

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.close()
        if self._client is not None:
            await self._client.close()
        await super()._close()
        self._write_status()
        self._log.close()

    async def _group(self, ticket: Ticket, prompt: Prompt) -> GroupSummary:
        """Report the next batch of turns as the group of this ticket."""
        turns = await self._turns_of(ticket)
        await asyncio.to_thread(self._log.durable, {turn.session for turn in turns})  # live-22
        group = group_of(
            ticket.index, [(turn, self._traffic.turn(turn.id)) for turn in turns], self._group_size, self._sees
        )
        try:
            accepted = await self._report(group)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            await self._report(Dropped.failed(ticket.index, why))
            self._traffic.collection.settle(ticket.index, TurnEnd.REFUSED)
            return GroupSummary(ticket=ticket.index, prompt_id=group.prompt_id, failed=why)
        if not accepted:
            await self._settle()
            return GroupSummary(ticket=ticket.index, prompt_id=group.prompt_id, rejected="it came too late")
        return GroupSummary(ticket=ticket.index, prompt_id=group.prompt_id, rewards=tuple(group.rewards))

    def _progress(self, ticket: int) -> GroupProgress | None:
        if (since := self._waiting.get(ticket)) is None:
            return super()._progress(ticket)
        return GroupProgress(seconds=time.time() - since, doing={self._state_of_training(): 1})

    async def _turns_of(self, ticket: Ticket) -> list[LiveTurn]:
        """The turns of this ticket: those that it has already, or the next batch once it is due. The first ticket comes
        first."""
        collection, most = self._traffic.collection, self._group_size
        self._waiting[ticket.index] = time.time()
        try:
            while True:
                changed, due = self._changed, None
                if ticket.index in collection.tickets or ticket.index == min(self._waiting):
                    now = time.time()
                    if self._traffic.broken is None:
                        if (turns := collection.give(ticket.index, ticket.min_version, most, now)) is not None:
                            return turns
                        due = collection.due_at(most)
                try:
                    async with asyncio.timeout(None if due is None else max(0.0, due - now)):
                        await changed.wait()  # Unblocked by new turns and rewards, and by other tickets.
                except TimeoutError:
                    pass
        finally:
            del self._waiting[ticket.index]
            self._changes()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._traffic.sweep()
            await self._settle()
            self._write_status()

    async def _settle(self) -> None:
        """End the turns whose tickets have ended."""
        tickets = self._traffic.collection.tickets
        if not tickets:
            return
        for ticket, state in zip(tickets, await answer_of(self._queue.states.call_one(tickets)), strict=True):
            if state is State.TRAINED:
                self._trained_at = time.time()
                self._traffic.collection.settle(ticket, TurnEnd.TRAINED)
            elif state in (State.REJECTED, State.FAILED):
                self._traffic.collection.settle(ticket, TurnEnd.REFUSED)

    def _write_status(self) -> None:
        collection, traffic = self._traffic.collection, self._traffic
        write_status(
            self._folder,
            LiveStatus(
                at=time.time(),
                address=self._server.url,
                serves=self._server.is_open,
                answered=self._server.answered,
                version=traffic.newest,
                sessions=sum(one.closed is None for one in collection.sessions.values()),
                stages=collection.stages(),
                recorded=collection.recorded,
                ended={end.value: count for end, count in collection.ended.items()},
                left_out=dict(traffic.left_out),
                counts=dict(collection.counts),
                collecting="recording" if traffic.broken is None else f"stopped: {traffic.broken}",
                judging=self._judging.state(),
                judged=self._judging.judged,
                training=self._state_of_training(),
                trained_at=self._trained_at,
            ),
        )

    def _state_of_training(self) -> str:
        collection = self._traffic.collection
        stages, due = collection.stages(), collection.due_at(self._group_size)
        if not self._waiting:
            return f"the trainer has {stages['given']} turns, and takes no more now"
        if due is not None:
            return f"{stages['judged']} of {self._group_size} turns have a reward; a batch in {due - time.time():.0f} s"
        silent = self._judging.silent_for if stages["heard"] else 0.0
        why = f"; the judge is silent for {silent:.0f} s" if silent else ""
        return f"waits for rewards: {stages['heard']} turns wait for the judge, {stages['open']} for a reaction{why}"

    def _judge_of(self, settings: LiveJudgeSettings) -> TurnJudge | None:
        match settings.kind:
            case "none":
                return None
            case "verifier":
                return VerifierJudge(settings)
            case "endpoint":
                return VotingJudge(settings, self._ask_endpoint)
            case "policy":
                return VotingJudge(settings, self._ask_policy)

    async def _ask_endpoint(self, question: str) -> str:
        settings = self._settings.judge
        if self._client is None:
            import openai  # takes 0.5 s

            key = os.environ.get(settings.key_variable, "") if settings.key_variable else ""
            self._client = openai.AsyncOpenAI(base_url=settings.url, api_key=key or "none", max_retries=0)
        made = await self._client.chat.completions.create(
            model=settings.model,
            messages=[{"role": "user", "content": question}],
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
        )
        return made.choices[0].message.content or ""

    async def _ask_policy(self, question: str) -> str:
        settings, asked = self._settings.judge, [Message(role="user", content=question)]
        tokens = self._chat.encode(self._chat.render_text(asked, True, (), {}))
        said = await self._own.sample(tokens, max_tokens=settings.max_tokens, temperature=settings.temperature)
        return said.text

    def _soon(self, call: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(call)

    def _changes(self) -> None:
        """Wake the loops that wait for turns and rewards."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self._judging.changed.set()


def limits_of(settings: LiveSettings) -> CollectionLimits:
    """The bounds of these settings."""
    rewards = {
        ReactionKind.RETRY: settings.retry_reward,
        ReactionKind.EDIT: settings.edit_reward,
        ReactionKind.MALFORMED: settings.malformed_reward,
    }
    return CollectionLimits(
        most_turns=settings.most_turns,
        idle_seconds=settings.idle_seconds,
        session_turns=settings.session_turns,
        outcome_seconds=settings.outcome_seconds,
        batch_seconds=settings.batch_seconds,
        judge_tries=settings.judge.tries,
        hints_alone=settings.hint is not None and settings.judge.kind == "none",
        rewards={kind: reward for kind, reward in rewards.items() if reward is not None},
    )
