"""A run as a script sees it: stages, metrics, evaluations and the conclusion. `start.py` brings it up and down."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from goaly.agents.listeners import Listeners
from goaly.backlog.batch import BatchHandle
from goaly.backlog.group_statistics import Wait
from goaly.backlog.run_guard import RunGuard
from goaly.base.errors import RunFailed
from goaly.base.json_text import read_lines
from goaly.base.process import watch_callbacks
from goaly.base.telemetry.metrics import EVALUATIONS_FILE, METRICS_FILE, MetricsWriter
from goaly.base.telemetry.progress import Progress
from goaly.generate.service import GeneratorService
from goaly.live.gated_run import GatedRun
from goaly.plan.run_config import RunConfig
from goaly.prompts.mixture import prompt_mixture
from goaly.rollout.episode_limit import EpisodeLimit
from goaly.rollout.evaluation import EvalResult, Evaluation, ProblemSets, warn_of_failures, warn_of_long_prompts
from goaly.rollout.group_runner import GroupSummary
from goaly.rollout.running_episodes import EvaluationFailed
from goaly.run.backlog_stage import BacklogStage
from goaly.run.periodic_evaluation import PeriodicEvaluation
from goaly.run.reference_stage import ReferenceStage
from goaly.run.replaceable_actors import ReplaceableActors
from goaly.run.rollout_stage import RolloutStage
from goaly.run.run_checkpoints import RunCheckpoints
from goaly.run.run_prompts import RunPrompts
from goaly.run.saved_policies import SavedPolicies
from goaly.run.trainer_stage import CriticStage, TrainerStage

logger = logging.getLogger(__name__)


class Run:
    """The stages of a run."""

    backlog: BacklogStage
    rollouts: RolloutStage
    trainer: TrainerStage
    reference: ReferenceStage | None = None
    critic: CriticStage | None = None
    generators: GeneratorService
    listeners: Listeners | None = None
    """Of the workers' endpoints, if all workers are on this host."""
    checkpoints: RunCheckpoints
    gate: GatedRun | None = None
    """Decides which versions are served, in a live run that has a gate."""
    tasks: asyncio.TaskGroup
    """Owns what the run does beside the script."""
    keepers: list[asyncio.Task[None]]
    """Those of `tasks` that replace processes."""
    replaceable: list[ReplaceableActors[Any]]
    episode_limit: EpisodeLimit | None = None
    """With `rollout.concurrency=auto`."""

    def __init__(self, config: RunConfig, run_dir: Path):
        self.config = config
        self.run_dir = run_dir
        self.keepers = []
        self.replaceable = []
        self.prompts = RunPrompts(prompt_mixture(config.prompts))
        self.problem_sets = ProblemSets(config.evaluation, config.prompts)
        self._earlier = list(self._recorded_evaluations())
        """The evaluations before the run was resumed."""
        self.evaluations = [*self._earlier]
        self._evaluated = self._ends = False
        self.failed_evaluations = 0
        """Evaluations without a result."""
        self.periodic = PeriodicEvaluation(config.evaluation.every, self._evaluate_beside_training, self.say)
        self.policies = SavedPolicies(run_dir / "policies", config.save, next(iter(config.evaluation.named)))
        self.lost_actors: set[str] = set()
        self.started = time.monotonic()
        known = run_dir / METRICS_FILE
        earlier = read_lines(known) if known.exists() else ()
        self.guard = RunGuard(config.guard, earlier, lambda bound: self.backlog.tighten(bound), self.say)
        self.metrics = MetricsWriter(run_dir, config.telemetry)
        self.progress = Progress(config.steps, config.telemetry)
        self._stepped = time.monotonic()
        self._stop: Callable[[], object] | None = None
        self._died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watch_callbacks(asyncio.get_running_loop(), self.failed)

    @property
    def policy_version(self) -> int:
        """The newest policy version: how many steps are trained."""
        return self.trainer.policy_version if hasattr(self, "trainer") else 0

    def pass_at_1(self, name: str) -> tuple[float | None, float | None]:
        """pass@1 on this set in the first evaluation before training, and in the last one of the newest version after a
        training step."""
        scores = [(one.policy_version, one.results[name].pass_at_1) for one in self.evaluations if name in one.results]
        scores.sort(key=lambda score: score[0])  # that of an older version may end last
        began = [self.trainer.start_version] if hasattr(self, "trainer") else []
        start = min([*began, *(one.policy_version for one in self._earlier)], default=0)
        before = [value for version, value in scores if version == start]
        after = [value for version, value in scores if version > start]
        return before[0] if before else None, after[-1] if after else None

    @property
    def conclusion(self) -> str:
        """The run's last line: the evaluations' pass@1, else the policy version."""
        found = []
        for name in self.config.evaluation.named:
            if known := [f"{value:.2f}" for value in self.pass_at_1(name) if value is not None]:
                found.append(f"{name.replace('_', '-')} pass@1: {' -> '.join(known)}")
        return ", ".join(found) or f"policy version {self.policy_version}"

    async def evaluate(self, sets: Iterable[str] | None = None) -> Evaluation:
        """Evaluate the newest policy on these sets of `evaluation.sets`, or on all of them, and record the results.
        If a periodic evaluation of this version is running, wait for its results instead of asking twice. A resumed run
        does not repeat an evaluation that it has recorded. One that fails has no results, and is not recorded."""
        version = self.policy_version
        running = self.periodic.running(version) if sets is None else None
        evaluation = self._recorded(version, self.config.evaluation.named if sets is None else sets)
        if evaluation is None:
            evaluation = await (self._evaluate(version, sets) if running is None else asyncio.shield(running))
        self._evaluated = True
        self._stepped = time.monotonic()
        self.progress.begin(version)
        return evaluation

    def _recorded(self, version: int, sets: Iterable[str]) -> Evaluation | None:
        """The recorded evaluation that this one would repeat: one of this version, or, for the first one of a resumed
        run before it trains, the newest."""
        found = [one for one in self._earlier if set(sets) <= one.results.keys()]
        of_version = [one for one in found if one.policy_version == version]
        first = not self._evaluated and version == self.trainer.start_version < self.config.steps
        return next(reversed(of_version or (found if first else [])), None)

    def _recorded_evaluations(self) -> Iterator[Evaluation]:
        file = self.run_dir / EVALUATIONS_FILE
        if file.exists():
            prompts = {one.name: len(one.prompts) for one in self.problem_sets.chosen(None)}
            for line in read_lines(file):
                yield Evaluation.recorded(line, prompts)

    async def _evaluate(self, version: int, sets: Iterable[str] | None = None) -> Evaluation:
        results = {}
        for one in self.problem_sets.chosen(sets):
            settings = one.settings
            try:
                rewards = await self.rollouts.rewards(
                    one.prompts, settings.samples_per_prompt, settings.sampling, version
                )
            except EvaluationFailed as error:
                self.failed_evaluations += 1
                logger.warning("the evaluation of policy version %d failed on %s: %s", version, one.name, error)
                self.progress.note(f"the evaluation of policy version {version} failed on {one.name}: {error}")
                return Evaluation(policy_version=version, results={})
            results[one.name] = EvalResult.of(rewards, pass_at=settings.pass_at)
            warn_of_failures(one.name, rewards)
            if not any(one.name in earlier.results for earlier in self.evaluations):
                warn_of_long_prompts(one.name, results[one.name])
        newest = self.policy_version if self.policy_version > version else None
        evaluation = Evaluation(policy_version=version, results=results, newest_version=newest)
        self.evaluations.append(evaluation)
        self.metrics.evaluation(version, evaluation.metrics)
        for name, result in results.items():
            self.progress.note(f"{name} pass@1 at policy version {version}: {result.pass_at_1:.3f}")
        return evaluation

    async def _evaluate_beside_training(self, version: int) -> Evaluation:
        evaluation = await self._evaluate(version)
        await self.policies.scored(evaluation)
        return evaluation

    async def report(self, batch: BatchHandle, metrics: dict[str, float]) -> None:
        """Record a step's metrics, show its progress, and save, evaluate and checkpoint the policy if that is due.

        A step that a resumed run trains again is not recorded again.
        """
        counts = await self.backlog.counts()
        replicas = await self.generators.stats()
        now = time.monotonic()
        seconds, self._stepped = now - self._stepped, now
        policy_version = batch.id + 1
        self.prompts.learn(batch.id, batch.passes)
        shares = self.prompts.shares if len(self.prompts.shares) > 1 else {}
        is_known = any(one.policy_version == policy_version for one in self._earlier)
        is_evaluated = not is_known and self.periodic.is_due(policy_version)
        step = {
            **batch.metrics,
            **metrics,
            **{f"mix/{source}": share for source, share in shares.items()},
            **self.periodic.metrics,
            **({} if self.episode_limit is None else {"rollout/concurrency": float(self.episode_limit.value)}),
            **({"evaluation/failed": float(self.failed_evaluations)} if self.failed_evaluations else {}),
            "step/seconds": seconds,
            "step/wait_seconds": self.backlog.waited_seconds,
            "step/tokens": float(batch.tokens),
            "step/tokens_per_second": batch.tokens / seconds,
            "backlog/running": float(counts["running"]),
            "backlog/queued": float(counts["queued"]),
            "generator/version": float(min((stats.version for stats in replicas), default=0)),
            "generator/running": float(sum(stats.running for stats in replicas)),
            "generator/queued": float(sum(stats.queued for stats in replicas)),
            "generator/max_running": float(sum(stats.max_running for stats in replicas)),
            "generator/preemptions": float(sum(stats.preemptions for stats in replicas)),
            "generator/tokens": float(sum(stats.tokens for stats in replicas)),
            "generator/steps": float(sum(stats.steps for stats in replicas)),
            "generator/updates": float(sum(stats.updates for stats in replicas)),
            "generator/verified_updates": float(sum(stats.verified_updates for stats in replicas)),
            "generator/busy_seconds": sum(stats.busy_seconds for stats in replicas),
            "generator/running_seconds": sum(stats.running_seconds for stats in replicas),
            "generator/cache_seconds": sum(stats.cache_seconds for stats in replicas),
            "generator/stall_seconds": sum(stats.stall_seconds for stats in replicas),
            "run/seconds": now - self.started,
        }
        if policy_version > self.metrics.newest:
            verdict = self.guard.observe(step)
            step["guard/alarm"] = float(verdict.is_collapse)
            self.metrics.step(policy_version, step)
            self.progress.step(policy_version, step)
            await self.guard.act(policy_version, verdict)
        await self.policies.save(policy_version, self.trainer, candidate=is_evaluated)
        if is_evaluated:
            self.periodic.start(policy_version, self.tasks)
        await self.checkpoints.after_step(policy_version)
        if self._stop is not None:
            await self.stopped()

    def episode_ended(self, group: GroupSummary) -> None:
        """Take the end of a group into account."""
        if self.episode_limit is not None:
            self.episode_limit.ended(group)

    async def follow_load(self) -> None:
        """Have the number of episodes under way follow the load of the engines from now on."""
        backlog = self.config.backlog
        sizes = {"groups_per_step": backlog.groups_per_step, "group_size": backlog.group_size}
        self.episode_limit = EpisodeLimit(self.rollouts, self.generators.stats, **sizes)
        await self.episode_limit.start()
        self.keepers.append(self.tasks.create_task(self.episode_limit.follow(), name="limit of episodes"))

    def stop_after_step(self, stop: Callable[[], object]) -> bool:
        """Call `stop` after the current step and a checkpoint of it. False if the run has not started."""
        if not hasattr(self, "checkpoints"):
            return False
        self._stop = stop
        self.backlog.end()
        if not self.backlog.is_giving_batches:
            self.tasks.create_task(self.stopped(), name="stop")
        return True

    async def stopped(self) -> None:
        """Take a checkpoint and end the run, if it was told to stop."""
        if self._stop is not None:
            await self.checkpoints.finish(self.policy_version)
            self._stop()
            await asyncio.Future()  # ended by the cancellation that `stop` causes

    async def report_wait(self, seconds: float, wait: Wait) -> None:
        """Report what the training loop waits for."""
        held = "prompts, no group is under way" if wait.ticket is None else await self.rollouts.describe(wait.ticket)
        self.say(f"waiting {seconds:.0f} s for {held}; {wait}")

    def say(self, text: str) -> None:
        """Show a line of text on the progress display and in the log."""
        logger.info(text)
        self.progress.note(text)

    def lost(self, actor: str, report: str) -> None:
        """Report the death of an actor that is not replaced: the run ends with an error that names it."""
        if self._ends:
            return
        self.lost_actors.add(actor)
        if not self._died.done():
            self._died.set_exception(RunFailed(f"{actor} died: {report}"))

    def ends(self) -> None:
        """Count no further death, and record no further end of a ticket: those are caused by the end of the run."""
        self._ends = True
        if hasattr(self, "backlog"):
            with suppress(Exception):  # its hub may be dead
                self.backlog.end()  # run-3

    def failed(self, what: str, error: BaseException) -> None:
        """Report that a part of the controller failed: the run ends with an error that names it."""
        logger.info("%s", what, exc_info=error)
        if not self._died.done():
            self._died.set_exception(RunFailed(f"the controller's {what}: {type(error).__name__}: {error}"))

    async def alive(self) -> None:
        """Wait while the run's actors live; RunFailed when one is lost or a part of the controller fails."""
        await self._died
