"""Brings a run's actors up, and takes them down.

Invariants
    RN-1  Every task has an owner: the script's TaskGroup, or the run's.
    RN-2  The death of an actor that is not replaced ends the run with a RunFailed that names it.
    RN-3  When the block is left, however it is left, every admitted group is accounted for, `summary.json` is written,
          and the run's processes are stopped.
    RN-4  The policy is saved without the script's help (SV-1): after the last step, else when the block is left, unless
          an interrupt ends the run before its last step.
"""

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from goaly.backlog.queue import TrajectoryQueue
from goaly.errors import RunFailed, root_cause
from goaly.generate.actor import Generator
from goaly.generate.service import GeneratorService
from goaly.plan.dry_run import placed
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.reward.pool import RewardPool
from goaly.rollout.worker import RolloutWorker, pickled
from goaly.run.config import RunConfig
from goaly.run.hosts import Hosts
from goaly.run.meeting import meet
from goaly.run.processes import processes
from goaly.run.run import Run
from goaly.run.stages import Backlog, Critic, Reference, Rollouts, Trainer, ask
from goaly.run.waiting import all_of
from goaly.telemetry import spans
from goaly.telemetry.trace import merge
from goaly.train.critic import CriticModel
from goaly.train.reference import ReferenceModel
from goaly.train.trainer import PolicyTrainer
from goaly.weights import torchstore
from goaly.weights.store import WeightStore

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0
"""A stage that takes longer to close is left to die with the controller: Ctrl-C ends a run within ten seconds."""

SAVE_SECONDS = 600.0
"""A run that failed or was interrupted waits no longer for its policy to be saved."""
POLICY_FOLDER = "policy"

Episode = Callable[..., Awaitable[Any]]
Closers = dict[str, Callable[[], Awaitable[None]]]
"""How to close the stages that are up, by name."""


@asynccontextmanager
async def started(config: RunConfig, episode: Episode, run_dir: Path) -> AsyncIterator[Run]:
    """A run whose actors are up and whose generators serve the newest policy."""
    run = Run(config, run_dir)
    closers: Closers = {}
    actors: set[str] = set()

    def on_failure(actor: str, report: str) -> None:
        if actor in actors and not ("generators" in closers and run.generators.lost(actor, report)):
            run.lost(actor, report)  # RN-2

    hosts = Hosts(config.hosts, run_dir, on_failure, trace=config.telemetry.trace)
    status = "failed"
    try:
        async with asyncio.TaskGroup() as owned:  # RN-1
            watch = owned.create_task(run.alive())
            await _bring_up(run, hosts, episode, actors, closers)
            supervision = owned.create_task(run.generators.supervise())
            yield run
            await run.trainer.save_newest()  # RN-4: of a script that ends before the last step
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
            await _take_down(run, hosts, status, closers)


async def _bring_up(run: Run, hosts: Hosts, episode: Episode, actors: set[str], closers: Closers) -> None:
    config = run.config

    def spawn(mesh: Any, name: str, kind: type, *args: Any, **kwargs: Any) -> Any:
        actors.add(name)
        return mesh.spawn(name, kind, *args, **kwargs)

    run.progress.note("starting")
    planned = {each.name: each for each in processes(config)}
    places = placed(config, await hosts.cluster())  # before anything is spawned that does not fit
    actors.update(planned)
    meshes = {name: hosts.spawn(each, places[name]) for name, each in planned.items()}
    hub, trainer_mesh = meshes["hub"], meshes["trainer"]
    tokenizer = ChatTokenizer(config.model.path)
    store = spawn(hub, "store", WeightStore, config.weights)
    verifiers, on_hub = config.evaluation.verifiers, config.reward.placement == "hub"
    shared_rewards = spawn(hub, "rewards", RewardPool, config.reward, verifiers) if on_hub else None
    queue = spawn(
        hub,
        "queue",
        TrajectoryQueue,
        config.backlog,
        config.advantages,
        config.trainer.fsdp,
        tokenizer.pad_token,
        config.steps,
        config.trainer.minibatches,
    )
    run.backlog = Backlog(queue, run.tell_wait)
    closers["backlog"] = run.backlog.close

    await _meet("trainer", trainer_mesh)
    if config.weights.transport == "torchstore":
        await torchstore.start(trainer_mesh)
        closers["torchstore"] = torchstore.stop
    run.trainer = Trainer(
        spawn(trainer_mesh, "trainer", PolicyTrainer, config.trainer, config.model, config.loss, config.weights, store),
        queue,
        run.say,
        steps=config.steps,
        folder=run.run_dir / POLICY_FOLDER,
    )
    closers["trainer"] = run.trainer.close

    def spawn_worker(index: int) -> Any:
        name = f"rollout-{index}"
        return spawn(
            meshes[name],
            name,
            RolloutWorker,
            name,
            config.rollout,
            pickled(episode),
            queue=queue,
            rewards=shared_rewards or config.reward,
            verifiers=verifiers,
            tokenizer=config.model.path,
            chat=config.chat,
            sampling=config.sampling,
            group_size=config.backlog.group_size,
            max_context=config.max_context,
            journal=run.run_dir / "rollouts.jsonl" if config.telemetry.journal else None,
            journal_tokens=config.telemetry.journal_tokens,
            first_replica=index,
        )

    run.rollouts = Rollouts([spawn_worker(index) for index in range(config.rollout.workers)], run.say)
    closers["rollouts"] = run.rollouts.close

    async def spawn_generator(name: str) -> Any:
        replica = int(name.split("-")[1])
        first = f"generator-{replica}"
        mesh = hosts.spawn(dataclasses.replace(planned[first], name=name), places[first])
        if config.generator.tp > 1:
            await meet(mesh)
        return spawn(mesh, name, Generator, config.generator, config.model, store, replica, config.weights)

    run.generators = GeneratorService(
        replicas=config.generator.replicas,
        spawn=spawn_generator,
        kill=hosts.kill,
        announce=run.rollouts.use,
        start_minutes=config.generator.start_minutes,
    )
    closers["generators"] = run.generators.close

    async def start_reference() -> None:
        mesh = meshes["reference"]
        await _meet("reference", mesh)
        arguments = (config.reference, config.trainer, config.model, config.weights, store)
        run.reference = Reference(spawn(mesh, "reference", ReferenceModel, *arguments), queue, run.say)
        closers["reference"] = run.reference.close
        await run.reference.start()

    async def start_critic() -> None:
        mesh = meshes["critic"]
        await _meet("critic", mesh)
        arguments = (config.critic, config.trainer, config.model)
        run.critic = Critic(spawn(mesh, "critic", CriticModel, *arguments), queue, run.say)
        closers["critic"] = run.critic.close
        await run.critic.start()

    starts: dict[str, Coroutine[Any, Any, Any]] = {
        "rollouts": run.rollouts.start(),
        "trainer": run.trainer.start(),
        "generators": run.generators.start(),
    }
    if shared_rewards is not None:
        starts["rewards"] = ask("rewards.start", shared_rewards.start.call())
    if config.uses_reference:
        starts["reference"] = start_reference()
    if config.critic is not None:
        starts["critic"] = start_critic()
    await all_of(starts, "starting", run.say)


async def _meet(name: str, mesh: Any) -> None:
    try:
        await meet(mesh)
    except Exception as error:  # Monarch's, which does not say whose processes these were to be
        raise RunFailed(f"{name} did not start: {root_cause(error)}") from error


async def _save_policy(run: Run, status: str) -> None:
    """Save what a failing or interrupted run has trained (RN-4)."""
    trainer = getattr(run, "trainer", None)
    if trainer is None or "trainer" in run.lost_actors or not trainer.has_unsaved:
        return
    if status == "interrupted" and not trainer.is_done:
        return
    run.progress.note("saving the policy")
    try:
        async with asyncio.timeout(SAVE_SECONDS):
            await trainer.save_newest()
    except Exception as error:  # the run ends with the error that it failed of
        logger.error("the policy was not saved: %s", str(error) or type(error).__name__)


async def _take_down(run: Run, hosts: Hosts, status: str, closers: Closers) -> None:
    run.progress.note("stopping")
    for first in ("rollouts", "backlog"):  # what the workers cancel is accounted for, then the accounting ends
        await _close(first, closers.pop(first, None))
    last = closers.pop("torchstore", None)  # the trainer's close takes its weights out of it
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
    except Exception as error:  # a stage that died can't be closed, and need not be
        logger.info("closing %s: %s", stage, error)


def write_summary(run: Run, status: str) -> None:
    """Write `summary.json`: how the run ended, what it learned, and where every prompt went."""
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
