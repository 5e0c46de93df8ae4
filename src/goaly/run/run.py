"""A run as a script sees it: its stages, what it measured, and how it ended. `start.py` makes one and takes it down."""

import asyncio
import logging
import time
from pathlib import Path

from goaly.backlog.backlog import Wait
from goaly.backlog.batch import BatchHandle
from goaly.errors import RunFailed
from goaly.generate.service import GeneratorService
from goaly.prompts.evaluation import EvalResult
from goaly.prompts.mixture import held_out, prompt_mixture
from goaly.run.config import RunConfig
from goaly.run.stages import Backlog, Critic, Reference, Rollouts, Trainer
from goaly.telemetry.metrics import MetricsWriter
from goaly.telemetry.progress import Progress

logger = logging.getLogger(__name__)


class Run:
    """The stages of a run."""

    backlog: Backlog
    rollouts: Rollouts
    trainer: Trainer
    reference: Reference | None
    critic: Critic | None
    generators: GeneratorService

    def __init__(self, config: RunConfig, run_dir: Path):
        self.config = config
        self.run_dir = run_dir
        self.prompts = prompt_mixture(config.prompts)
        self.reference = None
        self.critic = None
        self.conclusion = ""
        self.evaluations: list[tuple[int, float]] = []
        self.lost_actors: set[str] = set()
        self.started = time.monotonic()
        self.metrics = MetricsWriter(run_dir, config.telemetry)
        self.progress = Progress(config.steps, config.telemetry)
        self._stepped = time.monotonic()
        self._died: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def policy_version(self) -> int:
        """The newest policy: how many steps are trained."""
        return self.trainer.policy_version if hasattr(self, "trainer") else 0

    @property
    def before(self) -> float | None:
        """The first evaluation's pass@1, if one came before the first step."""
        found = [pass_at_1 for version, pass_at_1 in self.evaluations if version == self.trainer.start_version]
        return found[0] if found else None

    @property
    def after(self) -> float | None:
        """The last evaluation's pass@1, if one came after a step."""
        found = [pass_at_1 for version, pass_at_1 in self.evaluations if version > self.trainer.start_version]
        return found[-1] if found else None

    async def evaluate(self) -> float:
        """The newest policy's pass@1 on held-out prompts."""
        version = self.policy_version
        settings = self.config.evaluation
        prompts = held_out(self.config.prompts, settings.prompts)
        rewards = await self.rollouts.rewards(prompts, settings.samples_per_prompt, settings.temperature, version)
        result = EvalResult.of(rewards)
        self.evaluations.append((version, result.pass_at_1))
        self.progress.note(f"held-out pass@1 at policy version {version}: {result.pass_at_1:.3f}")
        self._stepped = time.monotonic()
        self.progress.begin()
        return result.pass_at_1

    async def report(self, batch: BatchHandle, metrics: dict[str, float]) -> None:
        """Record a step's metrics and show its progress."""
        counts = await self.backlog.counts()
        replicas = await self.generators.stats()
        now = time.monotonic()
        seconds, self._stepped = now - self._stepped, now
        policy_version = batch.id + 1
        self.prompts.learn(batch.passes)
        shares = self.prompts.shares if len(self.prompts.shares) > 1 else {}
        step = {
            **batch.metrics,
            **metrics,
            **{f"mix/{source}": share for source, share in shares.items()},
            "step/seconds": seconds,
            "step/tokens": float(batch.tokens),
            "step/tokens_per_second": batch.tokens / seconds,
            "backlog/running": float(counts["running"]),
            "backlog/queued": float(counts["queued"]),
            "generator/version": float(min((stats.version for stats in replicas), default=0)),
            "generator/running": float(sum(stats.running for stats in replicas)),
            "generator/tokens": float(sum(stats.tokens for stats in replicas)),
            "generator/steps": float(sum(stats.steps for stats in replicas)),
            "generator/updates": float(sum(stats.updates for stats in replicas)),
            "generator/busy_seconds": sum(stats.busy_seconds for stats in replicas),
            "generator/stall_seconds": sum(stats.stall_seconds for stats in replicas),
            "run/seconds": now - self.started,
        }
        self.metrics.step(policy_version, step)
        self.progress.step(policy_version, step)

    async def tell_wait(self, seconds: float, wait: Wait) -> None:
        """Say what the training loop has been waiting for."""
        held = "prompts, no group is under way" if wait.ticket is None else await self.rollouts.describe(wait.ticket)
        self.say(f"waiting {seconds:.0f} s for {held}; {wait}")

    def say(self, text: str) -> None:
        """Show a line of text on the progress display and in the log."""
        logger.info(text)
        self.progress.note(text)

    def conclude(self, text: str) -> None:
        """Say what came out, as the run's last line."""
        self.conclusion = text

    def lost(self, actor: str, report: str) -> None:
        """Take note that an actor died that nothing replaces: the run ends with an error that names it."""
        self.lost_actors.add(actor)
        if not self._died.done():
            self._died.set_exception(RunFailed(f"{actor} died: {report}"))

    async def alive(self) -> None:
        """Wait for as long as the run's actors live; RunFailed when one is lost."""
        await self._died
