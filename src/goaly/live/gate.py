"""The loop of the gate: takes a version as the candidate, asks pairs until its trial ends, and does what follows.

It waits for nobody but its own pairs, and nobody waits for it: serving goes on with the served version, training with
newer ones. Problems are drawn at random with replacement, by a generator that the candidate's number seeds, so a
restarted gate asks the same ones.
"""

import asyncio
import logging
import random
from collections.abc import Iterable, Sequence
from typing import Protocol

from goaly.base.errors import RunFailed
from goaly.live.decision import Decision
from goaly.live.gate_records import Baseline, ComparedPair, Decided, JudgedAnswer
from goaly.live.gate_settings import GateSettings
from goaly.live.promotion import Promotion
from goaly.live.traffic_split import Arm
from goaly.live.trial import CANARY, SHADOW, Trial
from goaly.prompts.prompt import Prompt

logger = logging.getLogger(__name__)

Pair = tuple[str, int]
"""A comparison and the number of a pair in it."""


class GatedPolicy(Protocol):
    """The versions of the policy, where they are served and trained."""

    async def serve(self, version: int) -> None:
        """Let the served arm have this version; returns once all of its replicas decode with it or a later one."""
        ...

    async def candidate(self, after: int) -> int:
        """Wait until the trainer has a version above `after`, and keep that one with the trainer's state; return it
        once the candidate's arm decodes with it."""
        ...

    async def resume(self, candidate: int) -> bool:
        """Let the candidate's arm have this version again after a restart; False if its weights are lost."""
        ...

    async def roll_back(self, version: int) -> int:
        """Give the trainer the state of this served version; the newest version that it had published before."""
        ...

    async def stop_training(self) -> None:
        """Train no more; serving goes on."""
        ...

    def decided(self, decision: Decided) -> None:
        """A trial has ended: keep the state of the served version, forget that of other ones."""
        ...


class Questions(Protocol):
    """Asks an arm a problem."""

    async def answer(self, arm: Arm, version: int, prompt: Prompt, name: str) -> JudgedAnswer | None:
        """The judged answer; the same `name` gives the same seed. None if no judge has scored it."""
        ...


class RecordedPrompts(Protocol):
    """The prompts of users that may be asked again."""

    async def draw(self, name: str) -> Prompt:
        """One of them, drawn by this name; waits until there are some."""
        ...


class Gate:
    """Decides which versions are served."""

    def __init__(
        self,
        promotion: Promotion,
        settings: GateSettings,
        policy: GatedPolicy,
        canaries: Sequence[Prompt],
        questions: Questions,
        recorded: RecordedPrompts | None = None,
        judged: Questions | None = None,
    ):
        """`judged` asks the prompts of `recorded`, whose answers the judge scores; both are needed if the settings want
        pairs of them."""
        self.promotion = promotion
        self._settings = settings
        self._policy = policy
        self._canaries = {prompt.id: prompt for prompt in canaries}
        self._questions = questions
        self._recorded = recorded
        self._judged = judged
        self._asked = asyncio.Semaphore(settings.concurrent)

    async def open(self, first: int = 0) -> None:
        """Serve the version that was promoted last, or `first` before any test; before training begins or goes on."""
        if not self.promotion.is_open:
            self.promotion.open(first)
        await self._policy.serve(self.promotion.served)  # the gate may have ended before a promotion took effect

    async def run(self) -> None:
        """Decide on one candidate after the other, until cancelled or stopped."""
        gate = self.promotion
        if gate.needs_baseline:
            gate.set_baseline(await self._baseline(gate.served))
        if gate.trial is not None and not await self._policy.resume(gate.trial.candidate):
            gate.withdraw("its weights were lost with a process")
        while not gate.stopped:
            if gate.rolls_back:
                gate.rolled_back(await self._policy.roll_back(gate.served))
            elif gate.trial is None:
                gate.published(await self._policy.candidate(gate.barred))
            else:
                await self._finish(await self._try(gate.trial))
        await self._policy.stop_training()

    async def _finish(self, decided: Decided) -> None:
        logger.info("version %d is %s: %s", decided.candidate, decided.decision, decided.why)
        if decided.decision is Decision.PROMOTED:
            await self._policy.serve(decided.candidate)
        self._policy.decided(decided)

    async def _baseline(self, version: int) -> Baseline:
        """The answers of this served version to each canary problem."""

        async def ask(prompt: Prompt, number: int) -> JudgedAnswer | None:
            async with self._asked:
                return await self._questions.answer(Arm.SERVED, version, prompt, f"gate/baseline/{prompt.id}/{number}")

        async with asyncio.TaskGroup() as tasks:
            asked = {
                prompt.id: [tasks.create_task(ask(prompt, number)) for number in range(self._settings.baseline_samples)]
                for prompt in self._canaries.values()
            }
        answers = {
            name: tuple(answer for task in those if (answer := task.result()) is not None)
            for name, those in asked.items()
        }
        known = {name: found for name, found in answers.items() if found}
        if not known:
            raise RunFailed("the gate has no scored answer to any canary problem: see the log of the worker for why")
        return Baseline(version=version, answers=known)

    async def _try(self, trial: Trial) -> Decided:
        """Ask pairs until the trial ends; the decision."""
        under_way: dict[asyncio.Task[ComparedPair], Pair] = {}
        decided: Decided | None = None
        try:
            while decided is None:
                for wanted in self._next_pairs(trial, under_way.values()):
                    under_way[asyncio.create_task(self._pair(trial, *wanted), name=f"pair {wanted}")] = wanted
                done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)  # pairs have time limits
                for task in done:
                    del under_way[task]
                    decided = self.promotion.compared(task.result()) or decided
            return decided
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    def _next_pairs(self, trial: Trial, under_way: Iterable[Pair]) -> list[Pair]:
        running = list(under_way)
        wanted: list[Pair] = []
        for comparison in (CANARY, SHADOW):
            while len(running) + len(wanted) < self._settings.concurrent:
                numbers = frozenset(number for name, number in [*running, *wanted] if name == comparison)
                number = trial.wanted(comparison, numbers)
                if number is None:
                    break
                wanted.append((comparison, number))
        return wanted

    async def _pair(self, trial: Trial, comparison: str, number: int) -> ComparedPair:
        name = f"gate/{trial.candidate}/{comparison}/{number}"
        if comparison == CANARY:
            known = sorted(self._canaries.keys() & trial.problems)
            prompt, questions = self._canaries[random.Random(name).choice(known)], self._questions
        else:
            assert self._recorded is not None, "shadow pairs need recorded prompts"
            assert self._judged is not None, "shadow pairs need a judge"
            prompt, questions = await self._recorded.draw(name), self._judged
        candidate, served = await asyncio.gather(
            questions.answer(Arm.CANDIDATE, trial.candidate, prompt, name),
            questions.answer(Arm.SERVED, trial.served, prompt, name),
        )
        return ComparedPair(
            candidate=trial.candidate,
            comparison=comparison,
            number=number,
            prompt=prompt.id,
            answers=None if candidate is None or served is None else (candidate, served),
        )
