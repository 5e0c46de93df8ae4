"""Evaluations that a run starts by itself every `evaluation.every` policy versions, beside training.

At most one runs at a time. The run skips one that is due meanwhile, and says so. It owns the evaluation's task: a
failure ends the run, an interrupt cancels the task, and the script's end waits for it.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from goaly.base.errors import RunFailed, first_error
from goaly.rollout.evaluation import Evaluation


class PeriodicEvaluation:
    """Evaluates the policy every `evaluation.every` versions."""

    def __init__(
        self,
        every: int | None,
        evaluate: Callable[[int], Coroutine[Any, Any, Evaluation]],
        say: Callable[[str], None],
    ):
        """`evaluate` evaluates this policy version or, while training goes on, newer ones. null: never starts one."""
        self._every = every
        self._evaluate = evaluate
        self._say = say
        self._task: asyncio.Task[Evaluation] | None = None
        self._version = 0
        self._skipped = 0

    @property
    def metrics(self) -> dict[str, float]:
        """How many evaluations were skipped so far; empty if none can be."""
        return {} if self._every is None else {"evaluation/skipped": float(self._skipped)}

    def is_due(self, policy_version: int) -> bool:
        """Whether an evaluation starts at this version. One that is due while another is running counts as skipped."""
        if self._every is None or policy_version % self._every:
            return False
        if self._is_running:
            self._skipped += 1
            self._say(
                f"the evaluation of policy version {policy_version} is skipped, because that of version "
                f"{self._version} is still running"
            )
            return False
        return True

    def start(self, policy_version: int, owner: asyncio.TaskGroup) -> None:
        """Start the evaluation of this version as a task of `owner`."""
        self._version = policy_version
        name = f"evaluate policy version {policy_version}"
        self._task = owner.create_task(self._named(policy_version), name=name)

    def running(self, policy_version: int) -> asyncio.Task[Evaluation] | None:
        """The evaluation of this version, if it is running."""
        return self._task if self._is_running and self._version == policy_version else None

    async def ended(self) -> None:
        """Wait until no evaluation is running."""
        if self._task is not None and self._is_running:
            self._say(f"waiting for the evaluation of policy version {self._version}")
            await asyncio.wait([self._task])  # its prompts have time limits; an interrupt cancels it

    @property
    def _is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    async def _named(self, policy_version: int) -> Evaluation:
        """The evaluation; an error that names it."""
        try:
            return await self._evaluate(policy_version)
        except Exception as error:
            what = f"the evaluation of policy version {policy_version} failed"
            raise RunFailed(f"{what}: {first_error(error)}") from error
