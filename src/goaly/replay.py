"""Trains a run again from its log, without generators.

    python -m goaly.replay RUN [--to VERSION] [--check] [--into FOLDER] [key=value ...]

Each logged batch is trained as it was. Without `key=value` the weights of every version come out bit for bit as they
were, also those of an asynchronous run. `--check` begins at the first version, compares the digest of every version
with the recorded one, and names the first difference; the exit code is then 1. Without it the newest checkpoint up to
VERSION is the start. VERSION is the last one of the log unless `--to` says otherwise. With `checkpoint.keep_log=false`
the first version is that of the oldest checkpoint kept.

`--into FOLDER` keeps the result there: `policy/` as a Hugging Face folder, `metrics.jsonl` and `config.yaml`. With it,
`loss` and `trainer` settings may be changed: what the run would have learned from the same data with another loss or
learning rate. It then begins at the first version.
"""

import argparse
import asyncio
import math
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from goaly.base.actors import ask, spawn
from goaly.base.config import RUN_CONFIG, to_yaml
from goaly.base.config.check import check
from goaly.base.config.schema import plain
from goaly.base.errors import ConfigError, GoalyError, RunFailed, first_error
from goaly.base.telemetry import process_logs
from goaly.base.telemetry.metrics import MetricsWriter
from goaly.journal.checkpoint_folder import Checkpoint, Checkpoints
from goaly.journal.logged_queue import LoggedQueue
from goaly.journal.records import Resumed
from goaly.journal.run_log import LOG_FOLDER, first_version, trainers
from goaly.losses.settings import DistillSettings
from goaly.plan.dry_run import held_on_gpu
from goaly.plan.placement import place, processes
from goaly.plan.resumed_settings import changes
from goaly.plan.run_config import RunConfig, config_of
from goaly.run.hosts import Hosts
from goaly.run.rendezvous import rendezvous
from goaly.run.replaceable_actors import ReplaceableActors
from goaly.run.run_actors import policy_trainer, trajectory_queue
from goaly.run.start import CHECKPOINT_FOLDER, POLICY_FOLDER
from goaly.run.trainer_stage import TrainerStage
from goaly.train.settings import TrainerSettings
from goaly.weights.store import WeightStore

NEEDED = ("hub", "trainer")
MAY_CHANGE = ("loss", "trainer", "hosts", "telemetry")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The command line."""

    run_dir: Path
    config: RunConfig
    same: bool
    """Whether the training is the run's own."""
    to: int | None
    check: bool
    into: Path | None


@dataclass(slots=True, kw_only=True)
class Replayed:
    """The result of training again."""

    first: int
    version: int
    seconds: float = 0.0
    compared: int = 0
    difference: str | None = None
    """The first version with another digest than the recorded one."""

    def __str__(self) -> str:
        """The last line of the command."""
        if self.difference is not None:
            return self.difference
        trained = self.version - self.first
        rate = f", {self.seconds / trained:.3f} s a step" if trained else ""
        same = f"; {self.compared} digests are as recorded" if self.compared else ""
        return f"policy versions {self.first} to {self.version} in {self.seconds:.1f} s{rate}{same}"


def read_arguments(argv: Sequence[str]) -> Asked:
    """The command line; ConfigError with every problem."""
    parser = argparse.ArgumentParser(prog="python -m goaly.replay", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", type=int, metavar="VERSION")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--into", type=Path, metavar="FOLDER")
    parser.add_argument("overrides", nargs="*")
    line = parser.parse_intermixed_args(argv)
    before, after = (config_of(line.run, overrides) for overrides in ((), line.overrides))
    changed = [key for key, _, _ in changes(plain(before), plain(after))]
    used = trainers(line.run / LOG_FOLDER)
    if problems := list(_problems(line, changed, before, after, otherwise_from(used))):
        raise ConfigError(problems)
    if used and not any(key.startswith("trainer.") for key in changed):
        after = replace(after, trainer=check(TrainerSettings, used[0].trainer)[0])
    same = not any(key.partition(".")[0] in ("loss", "trainer") for key in changed)
    if not same:  # its policies are not those that sampled the log's tokens, which could not be compared
        after = replace(after, model=replace(after.model, numerics="fast"))
    return Asked(run_dir=line.run, config=after, same=same, to=line.to, check=line.check, into=line.into)


def _problems(
    line: argparse.Namespace, changed: Sequence[str], before: RunConfig, after: RunConfig, otherwise: int | None
) -> Iterator[str]:
    for key in changed:
        if key.partition(".")[0] not in MAY_CHANGE or key in ("trainer.minibatches", "trainer.temperature"):
            may = ", ".join(MAY_CHANGE)
            yield f"{key}: must stay as it was, because the logged batches depend on it; {may} may change"
    trains_otherwise = [key for key in changed if key.partition(".")[0] in ("loss", "trainer")]
    if trains_otherwise and line.check:
        yield f"--check: compares with the run's own digests, but {trains_otherwise[0]} is changed"
    if trains_otherwise and line.into is None:
        yield f"{trains_otherwise[0]}: needs --into FOLDER, because the result is another policy"
    if after.uses_kl and not before.uses_kl:
        yield f"loss.kl_coef={after.loss.kl_coef}: must be 0, because the log has no log-probs of a reference"
    yield from _teacher_problems(before.loss.distill, after.loss.distill)
    if line.to is not None and line.to < 1:
        yield f"--to={line.to}: must be at least 1"
    if not trains_otherwise and otherwise is not None and (line.to is None or line.to > otherwise):
        yield f"--to={line.to}: must be at most {otherwise}, from where the run went on with other trainer settings"
    if line.into is not None and (line.into / RUN_CONFIG).exists():
        yield f"--into={line.into}: holds a run already; name another folder"


def _teacher_problems(logged: DistillSettings | None, distill: DistillSettings | None) -> Iterator[str]:
    """One line for each thing that the teacher of the log has not judged."""
    if distill is None:
        return
    if logged is None or logged.tokens != distill.tokens:
        yield "loss.distill: must be null, because the log has no log-probs of a teacher for these tokens"
    elif distill.uses_top and (not logged.uses_top or logged.top_k != distill.top_k):
        yield f"loss.distill.top_k={distill.top_k}: the log has no log-probs of so many tokens of the teacher"


def otherwise_from(used: Sequence[Resumed]) -> int | None:
    """The policy version from which the run went on with other trainer settings than those it began with; None if it
    did not."""
    return next((one.policy_version for one in used if one.trainer != used[0].trainer), None)


async def train_again(asked: Asked, folder: Path) -> Replayed:
    """Train the logged batches again, with logs and metrics in this folder."""
    start = start_of(asked)
    first = 0 if start is None else start.step
    found = Replayed(first=first, version=first)
    is_kept = asked.into is not None
    telemetry = replace(asked.config.telemetry, wandb=None, tensorboard=is_kept and asked.config.telemetry.tensorboard)
    metrics = MetricsWriter(folder, telemetry)
    async with _trainer(asked, folder) as (queue, trainer):
        await trainer.start(start)
        begun = time.monotonic()
        log = (asked.run_dir / LOG_FOLDER).absolute()
        while asked.to is None or found.version < asked.to:
            logged = await ask("queue.replayed", queue.replayed.call_one("replay", log, first))
            if logged is None:
                break
            batch, recorded = logged
            metrics.step(batch.id + 1, {**batch.metrics, **await trainer.step(batch)})
            found.version = batch.id + 1
            if asked.check and recorded is not None:
                found.compared += 1
                if (digest := await trainer.digest()) != recorded:
                    found.difference = (
                        f"policy version {found.version} has digest {digest}, the run recorded {recorded}"
                    )
                    break
        found.seconds = time.monotonic() - begun
        if asked.into is not None and found.difference is None:
            await trainer.save(asked.into / POLICY_FOLDER)
    metrics.close()
    if asked.to is not None and found.version < asked.to and found.difference is None:
        raise RunFailed(f"--to={asked.to}: the log ends at policy version {found.version}")
    if asked.check and not found.compared:
        raise RunFailed("--check: the log has no digest to compare with")
    return found


def start_of(asked: Asked) -> Checkpoint | None:
    """The checkpoint to start from; None is the run's first model."""
    checkpoints, begins = Checkpoints(asked.run_dir / CHECKPOINT_FOLDER), first_version(asked.run_dir / LOG_FOLDER)
    if not asked.check and asked.same:
        found = checkpoints.newest(at_most=asked.to)
    else:
        found = checkpoints.oldest(at_least=begins) if begins else None
    last = asked.to if asked.to is not None else math.inf
    if begins and (found is None or not begins <= found.step <= last):
        raise RunFailed(
            f"{asked.run_dir}: its log begins at policy version {begins}, and no checkpoint between it and "
            f"{'the end' if asked.to is None else f'version {asked.to}'} is left to start from"
        )
    return found


@asynccontextmanager
async def _trainer(asked: Asked, folder: Path) -> AsyncIterator[tuple[LoggedQueue, TrainerStage]]:
    """The hub's queue and the trainer of the run, without its other processes."""
    config = asked.config
    lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_failure(actor: str, report: str) -> None:
        if not lost.done():
            lost.set_exception(RunFailed(f"{actor} died: {report}"))

    async def alive() -> None:
        await lost

    hosts = Hosts(config.hosts, folder, on_failure, trace=False)
    try:
        async with asyncio.TaskGroup() as owned:
            watch = owned.create_task(alive())
            needed = [each for each in processes(config) if each.name in NEEDED]
            places = place(needed, config.hosts, await hosts.cluster(), held_on_gpu(config))
            meshes = {each.name: hosts.spawn(each, places[each.name]) for each in needed}
            store = spawn(meshes["hub"], "store", WeightStore, config.weights)
            queue = trajectory_queue(meshes["hub"], config)
            ranks = policy_trainer(meshes["trainer"], config, store, queue)
            await rendezvous(meshes["trainer"], "trainer")
            yield (
                queue,
                TrainerStage(
                    ReplaceableActors("trainer", ranks), steps=config.steps + 1, folder=folder / POLICY_FOLDER
                ),
            )
            watch.cancel()
    finally:
        await hosts.stop_all()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    try:
        asked = read_arguments(sys.argv[1:] if argv is None else argv)
    except GoalyError as error:
        sys.stderr.write(f"{error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    with tempfile.TemporaryDirectory(prefix="goaly-replay-") as scratch:
        folder = asked.into or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if asked.into is not None:
            (folder / RUN_CONFIG).write_text(to_yaml(asked.config))
        with process_logs.controller(folder / "logs" / "controller.log"):
            try:
                found = asyncio.run(train_again(asked, folder))
            except BaseExceptionGroup as group:
                error = first_error(group)
                if not isinstance(error, GoalyError):
                    raise
                sys.stderr.write(f"{error}\n")
                return 1
            except GoalyError as error:
                sys.stderr.write(f"{error}\n")
                return 1
    sys.stdout.write(f"{found}\n")
    return 0 if found.difference is None else 1


if __name__ == "__main__":
    from goaly.base.process import exit_quickly

    exit_quickly(main())
