"""Brings the actors of a run up, and takes them down. Every task belongs to the script's TaskGroup or to the run's.

The policy is saved without the script's help (run-1): after the last step, or when the block is left. An interrupt
before the last step saves nothing. A hub's death replaces all roles that call the hub, but for the generators: they
follow the next hub's weight store. It counts once, as the hub's.

    run-12: Processes of the roles in `replaced_roles` are replaced when they die (`replaceable_actors.py`), generators
        by their service. The death of any other actor ends the run with a RunFailed that names it.
    run-2: However the block is left, every admitted group is accounted for, `summary.json` is written, and the run's
        processes are stopped.
    run-3: However a run ends, its folder holds all that a resumed run needs (docs/durability.md).
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from goaly.agents.listeners import Listeners
from goaly.agents.session_files import SESSIONS_FOLDER, forget_sessions
from goaly.base.actors import ask
from goaly.base.atomic_files import put_file, writing
from goaly.base.config.schema import plain
from goaly.base.telemetry import spans
from goaly.base.telemetry.perfetto import merge
from goaly.base.wait_reports import run_all
from goaly.generate.service import GeneratorService
from goaly.journal.checkpoint_folder import Checkpoints
from goaly.journal.run_log import LOG_FOLDER, delete_before
from goaly.live.decision import OnRegression
from goaly.live.gated_run import GatedRun, ServingWorker
from goaly.plan.dry_run import placed, spare_on
from goaly.plan.placement import Processes, processes
from goaly.plan.run_config import RunConfig
from goaly.plan.spare_memory import with_spare
from goaly.rollout.episode import EpisodeFunction, is_resumable
from goaly.rollout.rollout_worker import RolloutWorker, pickled
from goaly.run.backlog_stage import BacklogStage
from goaly.run.hosts import Hosts
from goaly.run.policy_source import offer, withdraw
from goaly.run.reference_stage import ReferenceStage
from goaly.run.replaceable_actors import ReplaceableActors, Restarts
from goaly.run.rollout_stage import RolloutStage
from goaly.run.run import Run
from goaly.run.run_actors import Hub, RunActors, process_of, replaced_roles
from goaly.run.run_checkpoints import RunCheckpoints, Stateful
from goaly.run.trainer_stage import CriticStage, TrainerStage
from goaly.train.reference import ReferenceModel
from goaly.train.trainer import PolicyTrainer
from goaly.weights import torchstore
from goaly.weights.store import WeightStore

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0
"""Longest wait for a stage to close. A slower one dies with the controller: Ctrl-C ends a run within ten seconds."""

SAVE_SECONDS = 600.0
"""Longest wait for the policy to be saved after a run failed or was interrupted."""

REPORT_SECONDS = 10.0
"""Longest time from the error of an actor that the death of one on this host causes to the report of that death."""
REMOTE_REPORT_SECONDS = 45.0
"""The same with several hosts: Monarch reports a death there up to half a minute later."""

POLICY_FOLDER = "policy"
CHECKPOINT_FOLDER = "checkpoints"
REFERENCE_FOLDER = "reference"


@asynccontextmanager
async def started(
    config: RunConfig, episode: EpisodeFunction, run_dir: Path, created: Callable[[Run], None] = lambda run: None
) -> AsyncIterator[Run]:
    """A run whose actors are up. It goes on from what its folder holds: from nothing, or from where it ended (run-3).

    `created` gets the run before anything is started.
    """
    with writing(f"run_dir={run_dir}"):
        run = Run(config, run_dir)
    created(run)
    planned = {each.name: each for each in processes(config)}

    def on_failure(actor: str, report: str) -> None:
        actor = process_of(actor)
        is_replaced = hasattr(run, "generators") and run.generators.lost(actor, report)
        is_replaced = is_replaced or any(one.lost(actor, report) for one in run.replaceable)
        if actor in planned and not is_replaced:
            run.lost(actor, report)  # run-12

    hosts = Hosts(config.hosts, run_dir, on_failure, trace=config.telemetry.trace)
    status = "failed"
    try:
        async with asyncio.TaskGroup() as owned:
            run.tasks = owned
            watch = owned.create_task(run.alive())
            await _bring_up(run, hosts, planned, episode)
            run.keepers.append(owned.create_task(run.generators.supervise()))
            if run.gate is not None:
                run.keepers.append(owned.create_task(run.gate.run(), name="gate"))
            yield run
            await run.trainer.save_newest()  # if the script ended before the last step
            await run.periodic.ended()
            await run.checkpoints.finish(run.policy_version)
            for task in (watch, *run.keepers):
                task.cancel()
            status = "finished"
    except asyncio.CancelledError:
        status = "interrupted"
        raise
    finally:
        run.ends()
        try:
            await _save_policy(run, status)
        finally:
            await _take_down(run, hosts, status)  # run-2


async def _bring_up(run: Run, hosts: Hosts, planned: Mapping[str, Processes], episode: EpisodeFunction) -> None:
    """Spawn all processes, create the stages from the hub to the generators, and start them all at once."""
    config = run.config
    checkpoints = Checkpoints(run.run_dir / CHECKPOINT_FOLDER)
    verified = run.tasks.create_task(asyncio.to_thread(checkpoints.newest), name="verify the newest checkpoint")
    run.progress.note("starting")
    cluster = await hosts.cluster()
    places = placed(config, cluster)  # fails before any process is spawned if something does not fit
    if (spare := spare_on(config, cluster)) is not None:
        logger.info("%s", spare)
        config = with_spare(config, spare.chosen)
    sessions = (run.run_dir / SESSIONS_FOLDER).absolute()
    forget_sessions(sessions)
    endpoint = config.rollout.endpoint
    if endpoint is not None and config.hosts.job == "local":
        run.listeners = Listeners(endpoint, config.rollout.workers)
    has_address = endpoint is not None and (run.listeners is not None or endpoint.port != 0)
    goes_on = is_resumable(episode)
    roles = RunActors(
        config, hosts, planned, places, pickled(episode), sessions, run.listeners.names if run.listeners else ()
    )

    if config.live is not None and (gate := config.live.gate) is not None:
        on_regression = OnRegression(config.live.on_regression)
        run.gate = roles.gate = GatedRun(run.run_dir, gate, on_regression, config.generator.replicas)

    trainer, reference, critic = await asyncio.gather(roles.trainer(), roles.reference(), roles.critic())

    # The stages.
    run.backlog = BacklogStage(roles.hub, run.report_wait, run.stopped)
    run.trainer = TrainerStage(
        ReplaceableActors("trainer", trainer),
        run.say,
        steps=config.steps,
        folder=run.run_dir / POLICY_FOLDER,
        record=run.backlog.record,
    )
    if reference is not None:
        folder = None if config.reference.refresh_every is None else run.run_dir / REFERENCE_FOLDER
        run.reference = ReferenceStage(ReplaceableActors("reference", reference), run.say, folder)
    if critic is not None:
        run.critic = CriticStage(ReplaceableActors("critic", critic), run.say)
    workers = {f"rollout-{index}": await roles.rollout(index) for index in range(config.rollout.workers)}
    run.rollouts = RolloutStage(
        [ReplaceableActors(*one) for one in workers.items()],
        run.say,
        run.backlog,
        fixed=has_address or goes_on,
        sessions=sessions if endpoint is not None or goes_on else None,
        on_end=run.episode_ended,
    )
    run.generators = GeneratorService(
        replicas=config.generator.replicas,
        spawn=roles.generator,
        kill=hosts.kill,
        announce=run.rollouts.use,
        start_minutes=config.generator.start_minutes,
    )

    # Start them all.
    hub = await roles.hub.present()
    checkpoint = await verified
    step = 0 if checkpoint is None else checkpoint.step
    recovered = await run.backlog.open((run.run_dir / LOG_FOLDER).absolute(), step, plain(config.trainer))
    run.prompts.begin(recovered, run.backlog.record)
    run.trainer.expect(recovered.digests)
    await asyncio.to_thread(offer, run.run_dir, hub.store)
    if config.weights.transport == "torchstore":
        await torchstore.start(roles.mesh("trainer"))
    starts: dict[str, Coroutine[Any, Any, Any]] = {
        "rollouts": run.rollouts.start(),
        "trainer": run.trainer.start(checkpoint),
        "generators": run.generators.start(),
    }
    if hub.rewards is not None:
        starts["rewards"] = ask("rewards.start", hub.rewards.start.call())
    for name, stage in (("reference", run.reference), ("critic", run.critic)):
        if stage is not None:
            starts[name] = stage.start(checkpoint)
    await run_all(starts, "starting", run.say)
    if config.rollout.concurrency == "auto":
        await run.follow_load()
    if checkpoint is not None:
        await run.trainer.publish()  # generators begin with the model's folder
        run.say(f"resumed at policy version {step}; the log has {recovered.policy_version} trained batches")

    stateful: dict[str, Stateful] = {"trainer": run.trainer}
    if run.critic is not None:
        stateful["critic"] = run.critic
    if run.reference is not None and config.reference.refresh_every is not None:
        stateful["reference"] = run.reference
    run.checkpoints = RunCheckpoints(
        checkpoints,
        config.checkpoint,
        stateful,
        newest=step,
        durable=run.backlog.durable,
        delete_log=partial(delete_before, run.run_dir / LOG_FOLDER),
        create_task=run.tasks.create_task,
        say=run.say,
    )
    _keep(run, hosts, roles, checkpoints)
    if run.gate is not None:
        await _open_gate(run, run.gate, roles.hub)


async def _open_gate(run: Run, gate: GatedRun, hub: ReplaceableActors[Hub]) -> None:
    async def store() -> WeightStore:
        return (await hub.present()).store

    async def stop(why: str) -> None:
        run.say(f"training has stopped: {why}")
        run.backlog.end()

    await gate.open(
        lambda names: run.problem_sets.chosen(names)[0].prompts,
        run.trainer,
        run.generators,
        ServingWorker(run.rollouts.workers[0]),
        policy_version=run.policy_version,
        store=store,
        beside=run.checkpoints.beside,
        after_return=run.checkpoints.replace,
        same_weights=run.backlog.went_back,
        stop=stop,
    )


def _keep(run: Run, hosts: Hosts, roles: RunActors, checkpoints: Checkpoints) -> None:
    """Replace processes that die from now on, and let the new ones catch up with the run (run-12)."""
    restarts = Restarts(run.config.checkpoint.restarts, lambda: run.policy_version)
    replaced = replaced_roles(run.config)
    seconds = REPORT_SECONDS if run.config.hosts.job == "local" else REMOTE_REPORT_SECONDS

    def keep(
        one: ReplaceableActors[Any],
        replace: Callable[[str], Coroutine[Any, Any, Any]],
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        run.replaceable.append(one)
        kept = one.keep(
            replace,
            kill=hosts.kill,
            restarts=restarts,
            say=run.say,
            report_seconds=seconds,
            has_peers=roles.count(one.role) > 1,
            on_death=on_death,
        )
        run.keepers.append(run.tasks.create_task(kept, name=f"keep {one.role}"))

    def lose_callers() -> None:
        for one in run.replaceable:
            report = "the hub died, which it calls"
            if one is not roles.hub and not one.lost(one.name, report, is_own=False):
                run.lost(one.name, report)

    async def replace_hub(name: str) -> Hub:
        hub = roles.new_hub(name)
        if hub.rewards is not None:
            await ask("rewards.start", hub.rewards.start.call())
        await run.generators.follow(hub.store)
        run.prompts.begin(await run.backlog.restore(hub), run.backlog.record)
        await asyncio.to_thread(offer, run.run_dir, hub.store)
        return hub

    async def new_trainer(name: str) -> PolicyTrainer:
        await roles.hub.call("store.lose_writers", lambda hub: hub.store.lose_writers.call_one())
        return await roles.trainer(name)

    async def replace_trained(
        stage: TrainerStage | CriticStage, new: Callable[[str], Coroutine[Any, Any, Any]], name: str
    ) -> Any:
        ranks, newest = await asyncio.gather(new(name), asyncio.to_thread(checkpoints.newest))
        await stage.restore(ranks, newest, run.backlog.again)
        return ranks

    async def replace_reference(stage: ReferenceStage, name: str) -> ReferenceModel:
        ranks = await roles.reference(name)
        assert ranks is not None, "the run has a reference"
        await stage.restore(ranks)
        return ranks

    async def replace_worker(index: int, name: str) -> RolloutWorker:
        worker = await roles.rollout(index, name)
        await run.rollouts.restore(worker)
        return worker

    if "hub" in replaced:
        keep(roles.hub, replace_hub, on_death=lose_callers)
    if "trainer" in replaced:
        keep(run.trainer.ranks, partial(replace_trained, run.trainer, new_trainer))
    if run.critic is not None and "critic" in replaced:
        keep(run.critic.ranks, partial(replace_trained, run.critic, roles.critic))
    if run.reference is not None and "reference" in replaced:
        keep(run.reference.ranks, partial(replace_reference, run.reference))
    if "rollout" in replaced:
        for index, worker in enumerate(run.rollouts.workers):
            keep(worker, partial(replace_worker, index))


async def _save_policy(run: Run, status: str) -> None:
    """Save the newest policy of a run that failed or was interrupted."""
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


async def _take_down(run: Run, hosts: Hosts, status: str) -> None:
    run.progress.note("stopping")
    withdraw(run.run_dir)
    if run.listeners is not None:
        run.listeners.close()
    for first in ("rollouts", "backlog"):  # the workers' cancelled groups are accounted for first
        await _close(first, getattr(run, first, None))
    others = ("trainer", "reference", "critic", "generators")
    await asyncio.gather(*(_close(other, getattr(run, other, None)) for other in others))
    if run.config.weights.transport == "torchstore":  # the trainer has removed its weights from it
        await _close("torchstore", torchstore)
    await hosts.stop_all()
    await asyncio.to_thread(forget_sessions, run.run_dir / SESSIONS_FOLDER)
    run.policies.close()
    if run.gate is not None:
        run.gate.close()
    await asyncio.to_thread(run.metrics.close, failed=status != "finished")
    spans.flush()
    try:
        if run.config.telemetry.trace:
            merge(run.run_dir)
        write_summary(run, status)
    except OSError as error:  # the disk is full: the run still ends with its own status
        logger.error("the records in %s are not complete: %s", run.run_dir, error)
    run.progress.close()


async def _close(name: str, stage: Any) -> None:
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            if stage is not None:
                await stage.close()
    except Exception as error:  # a dead stage cannot be closed and need not be
        logger.info("closing %s: %s", name, error)


def write_summary(run: Run, status: str) -> None:
    """Write `summary.json`: the end status, the evaluations, and how many groups ended in each state."""
    before, after = run.pass_at_1(next(iter(run.config.evaluation.named)))
    backlog = getattr(run, "backlog", None)
    counts = {} if backlog is None else backlog.final_counts
    summary = {
        "status": status,
        "pass_at_1_before": before,
        "pass_at_1_after": after,
        "evaluations": [evaluation.summary for evaluation in run.evaluations],
        "failed_evaluations": run.failed_evaluations,
        "seconds": round(time.monotonic() - run.started, 1),
        "policy_version": run.policy_version,
        **{key: counts.get(key) for key in ("admitted", "trained", "rejected", "failed")},
        "reasons": {} if backlog is None else backlog.final_reasons,
    }
    put_file(run.run_dir / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
