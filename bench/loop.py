"""How well generation and training overlap: the tiny run at several staleness bounds, same processes and threads.

    python -m bench.loop [--steps N] [--json FILE] [--config FILE]

For each bound: the step time, and the pass rate after the same number of steps. Measured beside it, in a run of its
own on the same processes: T_gen, the time that generation alone needs for a step's groups (batches are taken and
dropped untrained), and T_train, the time that training alone needs (one batch again and again, nothing generated).
Overlap is max(T_gen, T_train) / step time: 1 is a step that costs no more than its slower half.

An update's cost is measured where it is paid: how long decoding stands still for one, in decode steps (`update_steps`),
and how long the trainer is busy with publishing, as a share of its step (`publish_share`).
"""

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from apps.grpo.main import collect, episode, train
from goaly.config import load
from goaly.run.config import RunConfig
from goaly.run.run import Run
from goaly.telemetry import logs

STALENESS = (0, 1, 8)
WARM_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """What one staleness bound came to."""

    max_staleness: int
    step_seconds: float
    pass_rate: float
    age_mean: float
    update_steps: float
    publish_share: float


def measure_arm(config: RunConfig, max_staleness: int, folder: Path) -> Arm:
    """Run the loop at this bound; medians leave out the first steps and the drain of the last ones."""
    config.backlog = replace(config.backlog, max_staleness=max_staleness)
    run_dir = folder / f"staleness-{max_staleness}"

    async def script(run: Run) -> None:
        async with asyncio.TaskGroup() as loops:
            loops.create_task(collect(run))
            loops.create_task(train(run))

    _run(config, script, run_dir)
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steady = steps[WARM_STEPS : len(steps) - max_staleness - 1]
    last = steps[-WARM_STEPS:]
    spent = {
        key: steady[-1][f"generator/{key}"] - steady[0][f"generator/{key}"]
        for key in ("busy_seconds", "stall_seconds", "steps", "updates")
    }
    return Arm(
        max_staleness=max_staleness,
        step_seconds=statistics.fmean(step["step/seconds"] for step in steady),
        pass_rate=statistics.fmean(step["reward/pass_rate"] for step in last),
        age_mean=statistics.fmean(step["age/mean"] for step in steady),
        update_steps=spent["stall_seconds"] / spent["updates"] / (spent["busy_seconds"] / spent["steps"]),
        publish_share=_span_seconds(run_dir, "publish") / _span_seconds(run_dir, "train"),
    )


def _span_seconds(run_dir: Path, name: str) -> float:
    """The median length of the trainer's spans of this name."""
    recorded = [json.loads(line) for line in (run_dir / "spans" / "trainer.jsonl").read_text().splitlines()]
    return statistics.median((one["stop_ns"] - one["start_ns"]) / 1e9 for one in recorded if one["name"] == name)


def measure_alone(config: RunConfig, folder: Path) -> tuple[float, float]:
    """T_gen and T_train: seconds a step of each half without the other."""
    config.backlog = replace(config.backlog, max_staleness=config.steps)  # no update comes that could be waited for
    seconds: dict[str, float] = {}

    async def generate_only(run: Run) -> None:
        finished: list[float] = []
        async for batch in run.backlog.batches(config.steps):
            finished.append(time.monotonic())
            if batch.id == config.steps - 1:
                train_seconds = []
                for _ in range(WARM_STEPS + 10):
                    begun = time.monotonic()
                    await run.trainer.step(batch)
                    train_seconds.append(time.monotonic() - begun)
                seconds["train"] = statistics.fmean(train_seconds[WARM_STEPS:])
            await run.backlog.trained(batch, batch.id + 1)
        steady = finished[WARM_STEPS : len(finished) - max(STALENESS)]  # at the end, few requests are left
        seconds["generate"] = (steady[-1] - steady[0]) / (len(steady) - 1)

    async def script(run: Run) -> None:
        async with asyncio.TaskGroup() as loops:
            loops.create_task(collect(run))
            loops.create_task(generate_only(run))

    _run(config, script, folder / "alone")
    return seconds["generate"], seconds["train"]


def _run(config: RunConfig, script: Any, run_dir: Path) -> None:
    from goaly.run.start import started

    async def main() -> None:
        async with started(config, episode, run_dir) as run:
            await script(run)

    with logs.controller(run_dir / "logs" / "controller.log"):
        asyncio.run(main())


def report(arms: list[Arm], generate: float, trained: float) -> tuple[str, dict[str, Any]]:
    """The table and its numbers."""
    by_bound = {arm.max_staleness: arm for arm in arms}
    result: dict[str, Any] = {"t_gen": generate, "t_train": trained}
    lines = [f"T_gen alone {generate:.3f} s   T_train alone {trained:.3f} s", ""]
    lines.append("max_staleness  step s  steps/s  overlap  pass rate   age  update, decode steps  publish, of a step")
    for arm in arms:
        overlap = max(generate, trained) / arm.step_seconds
        lines.append(
            f"{arm.max_staleness:13d}  {arm.step_seconds:6.3f}  {1 / arm.step_seconds:7.3f}  {overlap:7.3f}"
            f"  {arm.pass_rate:9.3f}  {arm.age_mean:4.2f}  {arm.update_steps:20.2f}  {arm.publish_share:18.3f}"
        )
        bound = arm.max_staleness
        result |= {
            f"step_seconds_{bound}": arm.step_seconds,
            f"overlap_{bound}": overlap,
            f"pass_rate_{bound}": arm.pass_rate,
            f"update_steps_{bound}": arm.update_steps,
            f"publish_share_{bound}": arm.publish_share,
        }
    result["speedup_8_vs_0"] = by_bound[0].step_seconds / by_bound[8].step_seconds
    lines += ["", f"speedup of 8 over 0: {result['speedup_8_vs_0']:.2f}"]
    return "\n".join(lines), result


def main() -> None:
    """Measure, print, and write the numbers where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/grpo/tiny.yaml")
    parser.add_argument("--steps", type=int, default=72)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value settings of the run")
    arguments = parser.parse_args()
    argv = ["--config", arguments.config, f"steps={arguments.steps}", "telemetry.progress=off", *arguments.overrides]
    folder = Path(tempfile.mkdtemp(prefix="bench-loop-"))
    try:

        def config() -> RunConfig:
            return load(RunConfig, argv, prog="bench.loop", description="").config

        generate, trained = measure_alone(config(), folder)
        arms = [measure_arm(config(), bound, folder) for bound in STALENESS]
    finally:
        shutil.rmtree(folder)
    table, result = report(arms, generate, trained)
    print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
