"""Brings the actors of a run up, and takes them down. Every task belongs to the script's TaskGroup or to the run's.

Invariants
    RN-1  The death of an actor that is not replaced ends the run with a RunFailed that names it.
    RN-2  However the block is left, every admitted group is accounted for, `summary.json` is written, and the run's
          processes are stopped.
    RN-3  The policy is saved without the script's help (SV-1): after the last step, or when the block is left. An
          interrupt before the last step saves nothing.
"""

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from monarch.actor import ProcMesh

from goaly.actors import ask
from goaly.backlog.queue import TrajectoryQueue
from goaly.errors import RunFailed, root_cause
from goaly.generate.generator import Generator
from goaly.generate.service import GeneratorService
from goaly.plan.dry_run import placed
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.reward.pool import RewardPool
from goaly.rollout.episode import EpisodeFunction
from goaly.rollout.worker import RolloutWorker, pickled
from goaly.run.config import RunConfig
from goaly.run.hosts import Hosts
from goaly.run.placement import Placed, Processes, processes
from goaly.run.process_agent import rendezvous
from goaly.run.run import Run
from goaly.run.stages import BacklogStage, CriticStage, ReferenceStage, RolloutStage, TrainerStage
from goaly.run.waiting import run_all
from goaly.telemetry import spans
from goaly.telemetry.trace import merge
from goaly.train.critic import CriticModel
from goaly.train.reference import ReferenceModel
from goaly.train.trainer import PolicyTrainer
from goaly.weights import torchstore
from goaly.weights.store import WeightStore

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0
"""Longest wait for a stage to close. A slower one dies with the controller: Ctrl-C ends a run within ten seconds."""

SAVE_SECONDS = 600.0
"""Longest wait for the policy to be saved after a run failed or was interrupted."""

POLICY_FOLDER = "policy"

SomeActor = TypeVar("SomeActor")
Arguments = ParamSpec("Arguments")
Closers = dict[str, Callable[[], Awaitable[None]]]
"""How to close each stage that is up, by name."""


@asynccontextmanager
async def started(config: RunConfig, episode: EpisodeFunction, run_dir: Path) -> AsyncIterator[Run]:
    """A run whose actors are up and whose generators serve the newest policy."""
    run = Run(config, run_dir)
    closers: Closers = {}
    actors: set[str] = set()

    def on_failure(actor: str, report: str) -> None:
        if actor in actors and not ("generators" in closers and run.generators.lost(actor, report)):
            run.lost(actor, report)  # RN-1

    hosts = Hosts(config.hosts, run_dir, on_failure, trace=config.telemetry.trace)
    status = "failed"
    try:
        async with asyncio.TaskGroup() as owned:
            watch = owned.create_task(run.alive())
            await _bring_up(run, hosts, episode, actors, closers)
            supervision = owned.create_task(run.generators.supervise())
            yield run
            await run.trainer.save_newest()  # RN-3: if the script ended before the last step
            supervision.cancel()
            watch.cancel()
            status = "finished"
    except asyncio.CancelledError:
        status = "interrupted"
        raise
    finally:
        try:
            await _save_policy(run, status)
        finally:
            await _take_down(run, hosts, status, closers)  # RN-2


async def _bring_up(run: Run, hosts: Hosts, episode: EpisodeFunction, actors: set[str], closers: Closers) -> None:
    """Bring up every stage of the run. Adds the actors' names to `actors`, and each stage's close to `closers`."""
    config = run.config
    run.progress.note("starting")
    planned = {each.name: each for each in processes(config)}
    places = placed(config, await hosts.cluster())  # fails before any process is spawned if something does not fit
    actors.update(planned)
    stages = _Stages(run, hosts, planned, places, actors, closers)

    queue, store, rewards = stages.hub()
    await stages.trainer(queue, store)
    stages.rollouts(episode, queue, rewards)
    stages.generators(store)
    starts: dict[str, Coroutine[Any, Any, Any]] = {
        "rollouts": run.rollouts.start(),
        "trainer": run.trainer.start(),
        "generators": run.generators.start(),
    }
    if rewards is not None:
        starts["rewards"] = ask("rewards.start", rewards.start.call())
    if config.uses_reference:
        starts["reference"] = stages.reference(queue, store)
    if config.critic is not None:
        starts["critic"] = stages.critic(queue)
    await run_all(starts, "starting", run.say)


class _Stages:
    """Spawns the processes of a run, and then the actors of each stage."""

    def __init__(
        self,
        run: Run,
        hosts: Hosts,
        planned: Mapping[str, Processes],
        places: Mapping[str, Placed],
        actors: set[str],
        closers: Closers,
    ):
        self._run = run
        self._config = run.config
        self._hosts = hosts
        self._planned = planned
        self._places = places
        self._actors = actors
        self._closers = closers
        self._meshes = {name: hosts.spawn(each, places[name]) for name, each in planned.items()}
        self._tokenizer = ChatTokenizer(run.config.model.path)

    def hub(self) -> tuple[TrajectoryQueue, WeightStore, RewardPool | None]:
        """The actors of the hub process. The reward pool is None if each rollout worker has its own."""
        config, mesh = self._config, self._meshes["hub"]
        store = self._spawn(mesh, "store", WeightStore, config.weights)
        rewards = None
        if config.reward.placement == "hub":
            rewards = self._spawn(mesh, "rewards", RewardPool, config.reward, config.evaluation.verifiers)
        queue = self._spawn(
            mesh,
            "queue",
            TrajectoryQueue,
            config.backlog,
            config.advantages,
            dp_ranks=config.trainer.fsdp,
            pad_token=self._tokenizer.pad_token,
            steps=config.steps,
            minibatches=config.trainer.minibatches,
        )
        self._run.backlog = BacklogStage(queue, self._run.report_wait)
        self._closers["backlog"] = self._run.backlog.close
        return queue, store, rewards

    async def trainer(self, queue: TrajectoryQueue, store: WeightStore) -> None:
        """The trainer's ranks, which can find each other."""
        config, mesh = self._config, await self._joined("trainer")
        if config.weights.transport == "torchstore":
            await torchstore.start(mesh)
            self._closers["torchstore"] = torchstore.stop
        ranks = self._spawn(
            mesh, "trainer", PolicyTrainer, config.trainer, config.model, config.loss, config.weights, store, queue
        )
        folder = self._run.run_dir / POLICY_FOLDER
        self._run.trainer = TrainerStage(ranks, self._run.say, steps=config.steps, folder=folder)
        self._closers["trainer"] = self._run.trainer.close

    def rollouts(self, episode: EpisodeFunction, queue: TrajectoryQueue, rewards: RewardPool | None) -> None:
        """The rollout workers, which run the script's episode."""
        config, run = self._config, self._run

        def spawn_worker(index: int) -> RolloutWorker:
            name = f"rollout-{index}"
            return self._spawn(
                self._meshes[name],
                name,
                RolloutWorker,
                name,
                config.rollout,
                pickled(episode),
                queue=queue,
                rewards=rewards or config.reward,
                verifiers=config.evaluation.verifiers,
                tokenizer=config.model.path,
                chat=config.chat,
                sampling=config.sampling,
                group_size=config.backlog.group_size,
                max_context=config.max_context,
                journal=run.run_dir / "rollouts.jsonl" if config.telemetry.journal else None,
                journal_tokens=config.telemetry.journal_tokens,
                first_replica=index,
            )

        run.rollouts = RolloutStage([spawn_worker(index) for index in range(config.rollout.workers)], run.say)
        self._closers["rollouts"] = run.rollouts.close

    def generators(self, store: WeightStore) -> None:
        """The generator service, which spawns replicas and replaces those that die."""
        config, hosts = self._config, self._hosts

        async def spawn_replica(name: str) -> Generator:
            replica = int(name.split("-")[1])
            first = f"generator-{replica}"  # a replacement takes the place of the first one
            mesh = hosts.spawn(dataclasses.replace(self._planned[first], name=name), self._places[first])
            if config.generator.tp > 1:
                await rendezvous(mesh)
            return self._spawn(mesh, name, Generator, config.generator, config.model, store, replica, config.weights)

        self._run.generators = GeneratorService(
            replicas=config.generator.replicas,
            spawn=spawn_replica,
            kill=hosts.kill,
            announce=self._run.rollouts.use,
            start_minutes=config.generator.start_minutes,
        )
        self._closers["generators"] = self._run.generators.close

    async def reference(self, queue: TrajectoryQueue, store: WeightStore) -> None:
        """The reference model's ranks, with their model loaded."""
        config, mesh = self._config, await self._joined("reference")
        arguments = (config.reference, config.trainer, config.model, queue, config.weights, store)
        ranks = self._spawn(mesh, "reference", ReferenceModel, *arguments)
        self._run.reference = ReferenceStage(ranks, self._run.say)
        self._closers["reference"] = self._run.reference.close
        await self._run.reference.start()

    async def critic(self, queue: TrajectoryQueue) -> None:
        """The critic's ranks, with their model built."""
        config, mesh = self._config, await self._joined("critic")
        assert config.critic is not None, "the critic is brought up only if the config has one"
        ranks = self._spawn(mesh, "critic", CriticModel, config.critic, config.trainer, config.model, queue)
        self._run.critic = CriticStage(ranks, self._run.say)
        self._closers["critic"] = self._run.critic.close
        await self._run.critic.start()

    def _spawn(
        self,
        mesh: ProcMesh,
        name: str,
        actor: Callable[Arguments, SomeActor],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> SomeActor:
        """Spawn an actor of this class in each process of the mesh. The type checker sees the constructor's arguments,
        which `ProcMesh.spawn` hides from it."""
        self._actors.add(name)
        spawn: Callable[..., SomeActor] = mesh.spawn
        return spawn(name, actor, *args, **kwargs)

    async def _joined(self, name: str) -> ProcMesh:
        """The processes of this name, which can form a torch process group."""
        mesh = self._meshes[name]
        try:
            await rendezvous(mesh)
        except Exception as error:  # Monarch's error, which does not name these processes
            raise RunFailed(f"{name} did not start: {root_cause(error)}") from error
        return mesh


async def _save_policy(run: Run, status: str) -> None:
    """Save the newest policy of a run that failed or was interrupted (RN-3)."""
    trainer = getattr(run, "trainer", None)
    if trainer is None or "trainer" in run.lost_actors or not trainer.has_unsaved:
        return
    if status == "interrupted" and not trainer.is_done:
        return
    run.progress.note("saving the policy")
    try:
        async with asyncio.timeout(SAVE_SECONDS):
            await trainer.save_newest()
    except Exception as error:  # the run still ends with its first error
        logger.error("the policy was not saved: %s", str(error) or type(error).__name__)


async def _take_down(run: Run, hosts: Hosts, status: str, closers: Closers) -> None:
    run.progress.note("stopping")
    for first in ("rollouts", "backlog"):  # the workers' cancelled groups are accounted for first
        await _close(first, closers.pop(first, None))
    last = closers.pop("torchstore", None)  # the trainer removes its weights from it when it closes
    await asyncio.gather(*(_close(stage, close) for stage, close in closers.items()))
    await _close("torchstore", last)
    await hosts.stop_all()
    run.metrics.close()
    spans.flush()
    if run.config.telemetry.trace:
        merge(run.run_dir)
    write_summary(run, status)
    run.progress.close()


async def _close(stage: str, close: Callable[[], Awaitable[None]] | None) -> None:
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            if close is not None:
                await close()
    except Exception as error:  # a dead stage cannot be closed and need not be
        logger.info("closing %s: %s", stage, error)


def write_summary(run: Run, status: str) -> None:
    """Write `summary.json`: the end status, the evaluations, and how many groups ended in each state."""
    before, after = run.pass_at_1(next(iter(run.config.evaluation.named)))
    counts = run.backlog.final_counts if hasattr(run, "backlog") else {}
    summary = {
        "status": status,
        "pass_at_1_before": before,
        "pass_at_1_after": after,
        "evaluations": [evaluation.summary for evaluation in run.evaluations],
        "seconds": round(time.monotonic() - run.started, 1),
        "policy_version": run.policy_version,
        **{key: counts.get(key) for key in ("admitted", "trained", "rejected", "failed")},
        "reasons": run.backlog.final_reasons if hasattr(run, "backlog") else {},
    }
    (run.run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
