"""How well generation and training overlap, against the arms that a user would run without asynchrony.

    python -m bench.loop [--steps N] [--rounds N] [--tails task,2,5,20] [--runs FILE] [--json FILE] [--markdown FILE]
                         [key=value ...]

Arms, all on the same cores:

    divided/S     generator and trainer on a core each, max_staleness S = 0, 1, 8 (`configs/grpo/tiny.yaml`)
    colocated/0   synchronous: all cores generate (a replica a core), then all train (FSDP over as many ranks)

Loads: `task` is the embedded task as it is; a number is answers of 40 tokens on average, the longest of which have that
many times as many, the same in every arm (`bench/tail.py`). Arms take turns, round by round; numbers are medians over
rounds. `speedup` is the best synchronous arm's step time over that of divided/8. Every finished round of a load is a
line of the `--runs` file, and is not repeated with the same number of steps.

Measured beside them, in runs of their own on the divided cores: T_gen, the time that generation alone needs for a
step's groups, and T_train, the time that training alone needs. Overlap is max(T_gen, T_train) / step time: 1 is a step
that costs no more than its slower half. An update's cost is measured where it is paid: how long decoding stands still
for one, in decode steps (`update`), and how long the trainer is busy with publishing, as a share of its step
(`publish`).
"""

import asyncio
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from apps.grpo.main import collect, episode, train
from bench.report import Machine, append, markdown_table, options, write
from bench.tail import MEAN, EpisodeFunction, tail_episode
from goaly.base.config import load
from goaly.base.telemetry import process_logs
from goaly.plan.run_config import RunConfig
from goaly.run.run import Run

WARM_STEPS = 5
TASK = "task"
SYNCHRONOUS = ("divided/0", "colocated/0")
FASTEST = "divided/8"
GREATEST_STALENESS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A way to use the cores."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run of an arm."""

    load: str
    arm: str
    step_seconds: float
    tokens_per_second: float
    pass_rate: float
    age_mean: float
    update_steps: float
    publish_share: float
    machine: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One run of each half alone, and of each arm."""

    load: str
    steps: int
    t_gen: float
    t_train: float
    runs: tuple[Measured, ...]


def round_of(line: str) -> Round:
    """The round that this line records."""
    found = json.loads(line)
    return Round(**{**found, "runs": tuple(Measured(**run) for run in found["runs"])})


def lines_of(file: Path) -> list[str]:
    """The lines of the file; none if it does not exist."""
    return file.read_text().splitlines() if file.exists() else []


def arms(cores: int) -> list[Arm]:
    """The arms on this many cores."""
    divided = [Arm(name=f"divided/{bound}", overrides=(f"backlog.max_staleness={bound}",)) for bound in (0, 1, 8)]
    both = (f"generator.replicas={cores}", f"trainer.fsdp={cores}", "hosts.bind={}", "backlog.max_staleness=0")
    return [*divided, Arm(name="colocated/0", overrides=both)]


def load_of(name: str) -> EpisodeFunction:
    """The episode of a load."""
    return episode if name == TASK else tail_episode(float(name))


def room_for(name: str, model: Path, folder: Path) -> tuple[str, ...]:
    """The settings that make room for the answers of a load, with a copy of the model if its context is too short."""
    if name == TASK:
        return ()
    longest = round(float(name) * MEAN)
    room = max(256, longest + 64)
    settings = (f"sampling.max_tokens={longest}", f"generator.max_context={room}")
    settings += (f"backlog.row_length={max(1024, room)}",)
    path = with_context(room, model, folder)
    return settings if path == model else (*settings, f"model.path={path}")


def with_context(room: int, model: Path, folder: Path) -> Path:
    """The model's folder, or a copy whose context has room for this many tokens."""
    described = json.loads((model / "config.json").read_text())
    if described["max_position_embeddings"] >= room:
        return model
    longer = folder / f"model-{room}"
    if not longer.exists():
        shutil.copytree(model, longer)
        (longer / "config.json").write_text(json.dumps({**described, "max_position_embeddings": room}))
    return longer


def measure_arm(
    config: RunConfig,
    load_name: str,
    of_load: EpisodeFunction,
    arm: str,
    run_dir: Path,
    train_loop: Callable[[Run], Coroutine[Any, Any, None]] = train,
) -> Measured:
    """Run the loop; medians leave out the first steps and the drain of the last ones."""
    machine = Machine.now()

    async def script(run: Run) -> None:
        async with asyncio.TaskGroup() as loops:
            loops.create_task(collect(run))
            loops.create_task(train_loop(run))

    _run(config, of_load, script, run_dir)
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steady = steps[WARM_STEPS : len(steps) - config.backlog.max_staleness - 1]
    spent = {
        key: steady[-1][f"generator/{key}"] - steady[0][f"generator/{key}"]
        for key in ("busy_seconds", "stall_seconds", "steps", "updates")
    }
    seconds = sum(step["step/seconds"] for step in steady)
    return Measured(
        load=load_name,
        arm=arm,
        step_seconds=seconds / len(steady),
        tokens_per_second=sum(step["step/tokens"] for step in steady) / seconds,
        pass_rate=statistics.fmean(step["reward/pass_rate"] for step in steps[-WARM_STEPS:]),
        age_mean=statistics.fmean(step["age/mean"] for step in steady),
        update_steps=spent["stall_seconds"] / spent["updates"] / (spent["busy_seconds"] / spent["steps"]),
        publish_share=_span_seconds(run_dir, "publish") / _span_seconds(run_dir, "train"),
        machine=machine.record(),
    )


def _span_seconds(run_dir: Path, name: str) -> float:
    """The median length of the first trainer rank's spans of this name."""
    file = min((run_dir / "spans").glob("trainer*.jsonl"))
    recorded = [json.loads(line) for line in file.read_text().splitlines()]
    return statistics.median((one["stop_ns"] - one["start_ns"]) / 1e9 for one in recorded if one["name"] == name)


def measure_alone(config: RunConfig, of_load: EpisodeFunction, run_dir: Path) -> tuple[float, float]:
    """T_gen and T_train: seconds a step of each half without the other."""
    backlog = replace(config.backlog, max_staleness=config.steps)  # no update comes that could be waited for
    config = replace(config, backlog=backlog)
    seconds: dict[str, float] = {}

    async def generate_only(run: Run) -> None:
        finished: list[float] = []
        async for batch in run.backlog.batches(config.steps):
            finished.append(time.monotonic())
            if batch.id == config.steps - 1:
                train_seconds = []
                for _ in range(config.steps):  # as many steps as the run's last checkpoint expects
                    begun = time.monotonic()
                    await run.trainer.step(batch)
                    train_seconds.append(time.monotonic() - begun)
                seconds["train"] = statistics.fmean(train_seconds[WARM_STEPS:])
            await run.backlog.trained(batch, batch.id + 1)
        steady = finished[WARM_STEPS : len(finished) - GREATEST_STALENESS]  # at the end, few requests are left
        seconds["generate"] = (steady[-1] - steady[0]) / (len(steady) - 1)

    async def script(run: Run) -> None:
        async with asyncio.TaskGroup() as loops:
            loops.create_task(collect(run))
            loops.create_task(generate_only(run))

    _run(config, of_load, script, run_dir)
    return seconds["generate"], seconds["train"]


def _run(config: RunConfig, of_load: EpisodeFunction, script: Any, run_dir: Path) -> None:
    from goaly.run.start import started

    async def main() -> None:
        async with started(config, of_load, run_dir) as run:
            await script(run)

    with process_logs.controller(run_dir / "logs" / "controller.log"):
        asyncio.run(main())


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians by load and arm, with overlap and speedups."""
    found = [one for each in rounds for one in each.runs]
    numbers = ("step_seconds", "tokens_per_second", "pass_rate", "age_mean", "update_steps", "publish_share")
    result: dict[str, Any] = {}
    for load_name in dict.fromkeys(one.load for one in found):
        of_load = [one for one in found if one.load == load_name]
        by_arm: dict[str, Any] = {}
        for arm in dict.fromkeys(one.arm for one in of_load):
            of_arm = [one for one in of_load if one.arm == arm]
            by_arm[arm] = {key: statistics.median(getattr(one, key) for one in of_arm) for key in numbers}
            by_arm[arm]["step_seconds_range"] = [
                min(one.step_seconds for one in of_arm),
                max(one.step_seconds for one in of_arm),
            ]
        of_rounds = [one for one in rounds if one.load == load_name]
        generate = statistics.median(one.t_gen for one in of_rounds)
        trained = statistics.median(one.t_train for one in of_rounds)
        for of_arm in by_arm.values():
            of_arm["overlap"] = max(generate, trained) / of_arm["step_seconds"]
        best = min(by_arm[arm]["step_seconds"] for arm in SYNCHRONOUS if arm in by_arm)
        fastest = by_arm[FASTEST]["step_seconds"]
        result[load_name] = {
            "t_gen": generate,
            "t_train": trained,
            "arms": by_arm,
            "speedup": best / fastest,
            "speedup_8_vs_0": by_arm["divided/0"]["step_seconds"] / fastest,
        }
    return result


def table(result: Mapping[str, Any]) -> str:
    """The numbers as a table in Markdown."""
    arms = [
        (
            load_name,
            arm,
            "{:.3f} ({:.3f} to {:.3f})".format(one["step_seconds"], *one["step_seconds_range"]),
            f"{one['tokens_per_second']:.0f}",
            *(f"{one[key]:.2f}" for key in ("overlap", "pass_rate", "age_mean", "update_steps")),
            f"{one['publish_share']:.3f}",
        )
        for load_name, of_load in result.items()
        for arm, one in of_load["arms"].items()
    ]
    columns = (
        "load",
        "arm",
        "s a step (range)",
        "tokens/s",
        "overlap",
        "pass rate",
        "mean age",
        "update, steps",
        "publish",
    )
    halves = [
        (name, f"{one['t_gen']:.3f}", f"{one['t_train']:.3f}", f"{one['speedup']:.2f}", f"{one['speedup_8_vs_0']:.2f}")
        for name, one in result.items()
    ]
    of_halves = "load", "T_gen s", "T_train s", "speedup over the best synchronous arm", "over divided/0"
    return f"{markdown_table(columns, arms)}\n\n{markdown_table(of_halves, halves)}"


def _machines(rounds: Sequence[Round]) -> str:
    """One sentence on the machine of these runs, and how busy it was."""
    seen = [run.machine for one in rounds for run in one.runs]
    speeds = sorted(one["gflops"] for one in seen)
    return (
        f"{seen[0]['cores']} cores of {speeds[0]:.0f} to {speeds[-1]:.0f} GFLOP/s. At the start of the worst of "
        f"{len(seen)} runs {max(one['busy_cores'] for one in seen):.2f} cores were busy with other work; the host took "
        f"{max(one['stolen_cores'] for one in seen):.2f} away. Steps a run: {rounds[0].steps}."
    )


def main() -> None:
    """Measure, print, and write the numbers where asked."""
    parser = options(
        __doc__,
        "json",
        "markdown",
        config="configs/grpo/tiny.yaml",
        steps=60,
        rounds=3,
        runs=Path("docs/results/loop.jsonl"),
    )
    parser.add_argument("--tails", default=f"{TASK},2,5,20", help="loads, separated by commas")
    parser.add_argument("overrides", nargs="*", help="key=value settings of every arm")
    arguments = parser.parse_args()
    argv = ["--config", arguments.config, f"steps={arguments.steps}", "telemetry.progress=off", *arguments.overrides]
    folder = Path(tempfile.mkdtemp(prefix="bench-loop-"))

    def config(*overrides: str) -> RunConfig:
        return load(RunConfig, [*argv, *overrides], prog="bench.loop", description="").config

    try:
        model = Path(config().model.path)
        loads = {name: room_for(name, model, folder) for name in arguments.tails.split(",")}
        for room in loads.values():
            config(*room)  # a load without room is refused before the first run
        finished = [round_of(line) for line in lines_of(arguments.runs)]
        rounds = [one for one in finished if one.load in loads and one.steps == arguments.steps]
        for load_name, room in loads.items():
            for number in range(sum(one.load == load_name for one in rounds), arguments.rounds):
                place = folder / f"{load_name}-{number}"
                generate, trained = measure_alone(config(*room), load_of(load_name), place / "alone")
                runs = []
                for arm in arms(len(os.sched_getaffinity(0))):
                    settings = config(*room, *arm.overrides)
                    runs.append(measure_arm(settings, load_name, load_of(load_name), arm.name, place / arm.name))
                    print(f"{load_name:5} {arm.name:12} {runs[-1].step_seconds:.3f} s a step", flush=True)
                one = Round(load=load_name, steps=arguments.steps, t_gen=generate, t_train=trained, runs=tuple(runs))
                append(arguments.runs, one)
                rounds.append(one)
    finally:
        shutil.rmtree(folder)
    result = summary(rounds)
    text = f"{_machines(rounds)}\n\n{table(result)}\n"
    print(f"\n{text}")
    content = {"loads": result, "rounds": [asdict(one) for one in rounds]}
    write(arguments.json, content)
    if arguments.markdown:
        asked = f"--steps {arguments.steps} --tails {arguments.tails}"
        command = f"    python -m bench.loop {asked} --json docs/results/loop.json --markdown docs/results/loop.md"
        doc = (__doc__ or "").partition("Arms, all")[2]
        arguments.markdown.write_text(f"# Overlap\n\n{command}\n\nArms, all{doc}\n{text}")


if __name__ == "__main__":
    main()
