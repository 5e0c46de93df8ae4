"""The judging loop: gives turns with a reaction to the judge, at most so many at once and in a minute.

A judgement that fails or exceeds its time limit leaves the turn without a reward, and is counted. When several have
failed in a row, the judge is failing: one turn is tried at a time, after growing pauses, and the failures are not
counted against turns. A judge that has answered nothing for `silent_seconds` while turns wait is silent, which the
status shows: without rewards nothing is trained.

    live-27: A failing, late or silent judge makes no reward.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable

from goaly.base.errors import cause_of
from goaly.live.judges import Case, NoVerdict, TurnJudge
from goaly.live.settings import LiveJudgeSettings
from goaly.live.traffic import Traffic
from goaly.prompts.template import text_of

logger = logging.getLogger(__name__)

FAILING = 3
"""The judge is failing after this many failures in a row."""
LONGEST_PAUSE = 30.0
"""Seconds between two tries of a failing judge."""
MINUTE = 60.0


class Judging:
    """Judges the turns of live traffic."""

    def __init__(
        self,
        judge: TurnJudge | None,
        settings: LiveJudgeSettings,
        traffic: Traffic,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Without a judge only scores and corrections are rewards."""
        self.judge = judge
        self._settings = settings
        self._traffic = traffic
        self._clock = clock
        self.changed = asyncio.Event()
        self.judged = self.failed = 0
        self._in_a_row = 0
        self._last_error = ""
        self._answered_at = self._pause_until = clock()
        self._began: deque[float] = deque()
        self._under_way: dict[str, asyncio.Task[None]] = {}

    @property
    def silent_for(self) -> float:
        """The seconds for which turns have waited and the judge has answered nothing; 0 while it answers."""
        seconds = self._clock() - self._answered_at
        return seconds if seconds >= self._settings.silent_seconds else 0.0

    def state(self) -> str:
        """The present work of the loop."""
        waiting = self._traffic.collection.stages()["heard"]
        if self.judge is None:
            return f"off: {waiting} turns have a reaction without a score"
        if waiting and (seconds := self.silent_for):
            return f"silent for {seconds:.0f} s, {waiting} turns wait: {self._last_error or 'no answer yet'}"
        if self._in_a_row >= FAILING:
            return f"failing, {waiting} turns wait: {self._last_error}"
        return f"judging {len(self._under_way)}, {waiting} wait" if waiting else "idle: no turn waits for it"

    async def run(self) -> None:
        """Judge turns until cancelled."""
        if self.judge is None:
            return
        try:
            async with asyncio.TaskGroup() as judging:
                while True:
                    self.changed.clear()
                    self._begin(judging)
                    try:
                        async with asyncio.timeout(1.0):  # a pause or a minute may be over
                            await self.changed.wait()  # Unblocked by new reactions, and by ends of judgements.
                    except TimeoutError:
                        pass
        finally:
            await self.judge.close()

    def _begin(self, judging: asyncio.TaskGroup) -> None:
        waiting = [turn for turn in self._traffic.collection.heard() if turn.id not in self._under_way]
        now = self._clock()
        if not waiting and not self._under_way:
            self._answered_at = now  # nobody waits for an answer
        while self._began and self._began[0] <= now - MINUTE:
            self._began.popleft()
        most = 1 if self._in_a_row >= FAILING else self._settings.parallel
        if self._settings.per_minute is not None:
            most = min(most, len(self._under_way) + self._settings.per_minute - len(self._began))
        if now < self._pause_until:
            return
        for turn in waiting[: max(0, most - len(self._under_way))]:
            recorded = self._traffic.turn(turn.id)
            case = Case(
                turn=turn.id,
                messages=recorded.request.messages,
                answer=text_of(recorded.answer.content or ""),
                reactions=tuple(turn.reactions),
            )
            self._began.append(now)
            self._under_way[turn.id] = judging.create_task(self._one(case), name=f"judge {turn.id}")

    async def _one(self, case: Case) -> None:
        name = case.turn
        assert self.judge is not None
        try:
            async with asyncio.timeout(self._settings.time_limit_seconds):
                reward = await self.judge.reward(case)
            if not math.isfinite(reward):
                raise NoVerdict(f"the reward is {reward}")
        except Exception as error:  # whatever a judge raises: live-27
            self._failed(name, "it exceeded its time limit" if isinstance(error, TimeoutError) else cause_of(error))
        else:
            self._in_a_row, self._answered_at, self.judged = 0, self._clock(), self.judged + 1
            self._traffic.collection.judge(name, reward, self._settings.kind, self._traffic.clock())
            self._traffic.on_change()
        finally:
            del self._under_way[name]
            self.changed.set()

    def _failed(self, name: str, why: str) -> None:
        self._in_a_row += 1
        self.failed += 1
        if why != self._last_error:
            logger.warning("the judge failed on turn %s: %s", name, why)
        self._last_error = why
        if self._in_a_row >= FAILING:
            pause = min(LONGEST_PAUSE, 2.0 ** (self._in_a_row - FAILING))
            self._pause_until = self._clock() + pause
        else:
            self._traffic.collection.judge_failed(name)
