"""The gate of a run: joins its trainer, weight store, generators and the worker that serves (docs/gate.md).

The worker asks the canary problems, because no tokens pass through the controller; the gate gets judged answers.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from goaly.base.errors import GoalyError
from goaly.live.decision import OnRegression
from goaly.live.gate import Gate
from goaly.live.gate_records import GATE_FILE, GateLog, JudgedAnswer, gate_records
from goaly.live.gate_settings import GateSettings
from goaly.live.gated_policy import GATE_FOLDER, POLICY, Beside, GatedTrainer, GatedVersions, kept_version
from goaly.live.promotion import Promotion
from goaly.live.traffic_split import Arm, arm_of_replica
from goaly.models.settings import ModelSettings
from goaly.prompts.prompt import Prompt

if TYPE_CHECKING:
    from goaly.generate.generator import Generator
    from goaly.generate.service import GeneratorService
    from goaly.weights.store import WeightStore


logger = logging.getLogger(__name__)


class WorkerCalls(Protocol):
    """Calls of the worker that serves clients, and of those that replace it."""

    async def call(self, endpoint: str, call: Callable[[Any], Awaitable[JudgedAnswer | None]]) -> JudgedAnswer | None:
        """The answer of the present worker; an error if it dies meanwhile."""
        ...

    def broadcast(self, call: Callable[[Any], None]) -> None:
        """Make this call without an answer."""
        ...


class ServingWorker:
    """The worker that serves clients, as the gate sees it."""

    def __init__(self, worker: WorkerCalls):
        self._worker = worker

    async def answer(self, arm: Arm, version: int, prompt: Prompt, name: str) -> JudgedAnswer | None:
        """The judged answer of this arm; None if it could not be scored, also because the worker died."""
        try:
            return await self._worker.call(
                "rollout.canary", lambda worker: worker.canary.call_one(arm, version, prompt, name)
            )
        except GoalyError as error:
            logger.warning("%s has no answer: %s", name, error)
            return None

    def on_trial(self, candidate: int | None) -> None:
        """Send a share of the new conversations to this candidate, or to none."""
        self._worker.broadcast(lambda worker: worker.on_trial.broadcast(candidate))

    def went_back(self, served: int, newest: int) -> None:
        """The trainer, at version `newest`, has the weights of version `served` again."""
        self._worker.broadcast(lambda worker: worker.went_back.broadcast(served, newest))


class GatedRun:
    """The state of a run's gate, from before the generators start, and its loop once they have."""

    def __init__(self, run_dir: Path, settings: GateSettings, on_regression: OnRegression, replicas: int):
        """Reads the records of the run's gate from before a restart. `replicas` is `generator.replicas`."""
        self._folder = run_dir / GATE_FOLDER
        self._settings = settings
        self._replicas = replicas
        earlier = list(gate_records(run_dir / GATE_FILE))
        self._log = GateLog(run_dir / GATE_FILE)
        self.promotion = Promotion(settings, self._log.write, on_regression=on_regression, earlier=earlier)
        self._gate: Gate | None = None

    def start_of(self, name: str, model: ModelSettings) -> tuple[ModelSettings, dict[str, Any]]:
        """The model that the replica with this name starts with, the run's or the served version, and the options that
        name its track and this version."""
        arm, version = arm_of_replica(name, self._replicas), 0
        if self.promotion.is_open:
            folder = kept_version(self._folder, self.promotion.served) / POLICY
            if folder.is_dir():
                model, version = replace(model, path=str(folder)), self.promotion.served
        return model, {"track": arm.value, "version": version}

    async def open(
        self,
        canaries: Callable[[Sequence[str] | None], Sequence[Prompt]],
        trainer: GatedTrainer,
        generators: "GeneratorService",
        worker: ServingWorker,
        *,
        policy_version: int,
        store: "Callable[[], Awaitable[WeightStore]]",
        beside: Beside,
        after_return: Callable[[int], Awaitable[None]],
        same_weights: Callable[[int, int], Awaitable[None]],
        stop: Callable[[str], Awaitable[None]],
    ) -> None:
        """Serve the version that was promoted last, or, in a new run, `policy_version`, that of the trainer.

        To be called before the run trains. `canaries` gives the problems of the first of these evaluation sets.
        `beside` and `after_return` are as in `GatedVersions`. The queue hears by `same_weights` that the trainer, at
        the second version, has the weights of the first again. `stop` ends training for this reason."""

        def replicas(arm: Arm) -> "list[Generator]":
            found = generators.serving.items()
            return [replica for name, replica in found if arm_of_replica(name, self._replicas) is arm]

        async def tell(served: int, newest: int) -> None:
            await same_weights(served, newest)
            worker.went_back(served, newest)

        async def went_back(newest: int) -> None:
            await after_return(newest)
            await tell(self.promotion.served, newest)

        async def stopped() -> None:
            last = self.promotion.last
            await stop("a regression" if last is None else f"version {last.candidate} was {last.decision}, {last.why}")

        versions = GatedVersions(
            store,
            trainer,
            replicas,
            self._folder,
            beside=beside,
            after_return=went_back,
            on_trial=worker.on_trial,
            stop=stopped,
        )
        problems = canaries(None if self._settings.canary is None else [self._settings.canary])
        self._gate = Gate(self.promotion, self._settings, versions, problems, worker)
        await self._gate.open(policy_version)
        if (back := self.promotion.back) is not None and back.served == self.promotion.served:
            await tell(back.served, back.newest)

    async def run(self) -> None:
        """Decide on one candidate after the other, until cancelled, or until a regression stops training."""
        assert self._gate is not None, "open comes first"
        await self._gate.run()

    def close(self) -> None:
        """Close the file of records."""
        self._log.close()
