"""What staleness does to learning: the same short run at several bounds and learning rates, corrected or not.

    python -m bench.staleness [--seeds N] [--other-seeds N] [--minutes M] [--processes N]
                              [--runs FILE] [--json FILE] [--plot FILE]

Every group is as old as the bound allows (`bench/lagged.py`): harsher than a run, and independent of the machine. All
runs start from one warm start (`python -m apps.sft.main --config configs/sft/tiny.yaml`) and, seed by seed, get the
same prompts. Seeds count from 100: settings were chosen on seeds 0 to 4, which are not reported. At staleness 0 every
ratio is 1, so all losses are one, and only the default is run.

Each finished run is a line of the `--runs` file and is not repeated under the same settings and warm start. With
`--minutes` no run starts after that time. Intervals are 95 % t-intervals over seeds; a difference is taken seed by seed
from the run at staleness 0 with the same learning rate.
"""

import multiprocessing
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.chart import line_chart
from bench.report import Interval, append, digest, finished, options, write
from goaly.base.process import die_with
from goaly.losses.settings import LossSettings, Rejection

if TYPE_CHECKING:
    from bench.lagged import Laboratory, LaggedSettings

DEFAULT, PAPER, RECOMMENDED, UNCORRECTED = "default", "paper clip", "recommended", "uncorrected"
FIRST_SEED = 100
LEARNING_RATES = (2e-4, 4e-4)
LOSSES: Mapping[str, LossSettings] = {
    DEFAULT: LossSettings(),
    PAPER: LossSettings(name="grpo", options={"clip_low": 0.2, "clip_high": 0.2}),
    RECOMMENDED: LossSettings(
        name="reinforce",
        proximal="trainer",
        importance="sequence",
        importance_cap=2.0,
        rejections=(Rejection(measure="ratio", level="token", low=0.5),),
    ),
    UNCORRECTED: LossSettings(name="bench.lagged:uncorrected"),
    "by answer": LossSettings(name="reinforce", proximal="trainer", importance="sequence", importance_cap=2.0),
    "by token": LossSettings(name="reinforce", proximal="trainer", importance_cap=2.0),
    "dapo": LossSettings(name="dapo"),
    "cispo": LossSettings(name="cispo"),
    "sapo": LossSettings(name="sapo"),
    "dppo": LossSettings(name="dppo"),
    "a3po": LossSettings(name="ppo", proximal="interpolated", importance_cap=2.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A loss at a staleness bound and a learning rate."""

    loss: str
    max_staleness: int
    lr: float

    @property
    def name(self) -> str:
        """As tables and files call it."""
        return f"{self.loss}/{self.max_staleness}"


COMPARED = (DEFAULT, PAPER, RECOMMENDED, UNCORRECTED)
MAIN = tuple(
    Arm(loss=loss, max_staleness=bound, lr=lr)
    for lr in LEARNING_RATES
    for bound, losses in ((0, (DEFAULT,)), (8, COMPARED), (32, COMPARED))
    for loss in losses
)
OTHERS = (
    *(Arm(loss=loss, max_staleness=bound, lr=LEARNING_RATES[0]) for bound in (1, 2, 4) for loss in (DEFAULT, PAPER)),
    *(Arm(loss=loss, max_staleness=8, lr=LEARNING_RATES[0]) for loss in LOSSES if loss not in COMPARED),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What one run of an arm came to."""

    arm: str
    lr: float
    seed: int
    settings: str
    """A digest of all that the result depends on but the seed."""
    pass_at_1: float
    """Held-out, of the last version."""
    area: float
    """Mean held-out pass@1 over the run."""
    effective_sample_size: float
    """Mean over the steps."""
    age_mean: float
    age_max: float
    stopped_at: int | None
    """The version at which a loss or gradient was not finite; None where all went well."""
    curve: list[tuple[int, float]]
    seconds: float


_laboratory: "Laboratory"


def _start(settings: "LaggedSettings", cores: Any, parent_pid: int) -> None:
    """In a process of its own: one core, one thread, one generator."""
    die_with(parent_pid)
    global _laboratory
    import torch

    from bench.lagged import Laboratory

    os.sched_setaffinity(0, {cores.get()})
    torch.set_num_threads(1)
    _laboratory = Laboratory(settings)


def _run(arm: Arm, seed: int, settings: str) -> Finished:
    began = time.monotonic()
    outcome = _laboratory.run(LOSSES[arm.loss], arm.max_staleness, seed, arm.lr)
    return Finished(
        arm=arm.name,
        lr=arm.lr,
        seed=seed,
        settings=settings,
        pass_at_1=outcome.pass_at_1,
        area=outcome.area,
        effective_sample_size=statistics.fmean(step["effective_sample_size"] for step in outcome.metrics),
        age_mean=statistics.fmean(step["age/mean"] for step in outcome.metrics),
        age_max=max(step["age/max"] for step in outcome.metrics),
        stopped_at=outcome.stopped_at,
        curve=outcome.curve,
        seconds=time.monotonic() - began,
    )


def settings_of(arm: Arm, settings: "LaggedSettings") -> str:
    """A digest of all that a run's result depends on but its seed: settings, loss and the weights of the warm start."""
    warm_start = sha256((Path(settings.model) / "model.safetensors").read_bytes()).hexdigest()
    described = {**asdict(settings), **asdict(arm), "objective": asdict(LOSSES[arm.loss])}
    return digest({**described, "warm_start": warm_start})


def remaining(
    found: Sequence[Finished], settings: "LaggedSettings", seeds: int, other_seeds: int
) -> list[tuple[Arm, int]]:
    """What is still to be run: the main arms first, seed by seed, so that all arms have about as many at any time."""
    wanted = [(arm, seed) for seed in range(FIRST_SEED, FIRST_SEED + seeds) for arm in MAIN]
    wanted += [(arm, seed) for seed in range(FIRST_SEED, FIRST_SEED + other_seeds) for arm in OTHERS]
    known = {(run.seed, run.settings) for run in found}
    return [(arm, seed) for arm, seed in wanted if (seed, settings_of(arm, settings)) not in known]


def run_all(
    work: Sequence[tuple[Arm, int]], settings: "LaggedSettings", file: Path, *, processes: int, minutes: float
) -> None:
    """Run these, and write each to the file as soon as it is done."""
    until = time.monotonic() + 60 * minutes
    context = multiprocessing.get_context("spawn")
    cores = context.Queue()
    for core in sorted(os.sched_getaffinity(0))[:processes]:
        cores.put(core)
    upcoming = iter(work)
    with ProcessPoolExecutor(processes, context, _start, (settings, cores, os.getpid())) as pool:
        running: set[Future[Finished]] = set()
        while True:
            while len(running) < processes and time.monotonic() < until and (item := next(upcoming, None)):
                arm, seed = item
                running.add(pool.submit(_run, arm, seed, settings_of(arm, settings)))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for run in (future.result() for future in done):
                append(file, run)
                print(
                    f"{run.arm:16} lr {run.lr:g}  seed {run.seed}  pass@1 {run.pass_at_1:.3f}  {run.seconds:.0f} s",
                    flush=True,
                )


def summary(runs: Sequence[Finished]) -> dict[str, Any]:
    """The numbers of one learning rate by arm: means, intervals, and differences from staleness 0."""
    by_arm: dict[str, dict[int, Finished]] = defaultdict(dict)
    for run in runs:
        by_arm[run.arm][run.seed] = run
    arms: dict[str, Any] = {}
    for name in sorted(by_arm, key=_place):
        of_arm = by_arm[name]
        base = by_arm.get(f"{DEFAULT}/0", {})
        common = [] if base is of_arm else sorted(of_arm.keys() & base.keys())
        arms[name] = {
            "seeds": len(of_arm),
            "pass_at_1": Interval.of([run.pass_at_1 for run in of_arm.values()]),
            "area": Interval.of([run.area for run in of_arm.values()]),
            "difference": _difference([of_arm[seed].pass_at_1 - base[seed].pass_at_1 for seed in common]),
            "area_difference": _difference([of_arm[seed].area - base[seed].area for seed in common]),
            "effective_sample_size": statistics.fmean(run.effective_sample_size for run in of_arm.values()),
            "age_mean": statistics.fmean(run.age_mean for run in of_arm.values()),
            "age_max": max(run.age_max for run in of_arm.values()),
            "not_finite": sum(run.stopped_at is not None for run in of_arm.values()),
            "curve": [
                (points[0][0], statistics.fmean(pass_at_1 for _, pass_at_1 in points))
                for points in zip(*(run.curve for run in of_arm.values()), strict=True)
            ],
        }
    return arms


def _difference(seed_by_seed: Sequence[float]) -> Interval | None:
    return Interval.of(seed_by_seed) if seed_by_seed else None


def _place(name: str) -> tuple[int, int]:
    loss, _, bound = name.partition("/")
    return list(LOSSES).index(loss), int(bound)


def table(arms: Mapping[str, Any]) -> str:
    """The arms as a table in Markdown."""
    lines = [
        "| loss / max_staleness | seeds | pass@1 | from 0 | area | from 0 | ESS | mean age | greatest age |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, arm in arms.items():
        learned = f"{arm['pass_at_1']} | {arm['difference'] or ''} | {arm['area']} | {arm['area_difference'] or ''}"
        age = f"{arm['effective_sample_size']:.3f} | {arm['age_mean']:.1f} | {arm['age_max']:.0f}"
        lines.append(f"| {name} | {arm['seeds']} | {learned} | {age} |")
    return "\n".join(lines)


def content(arms: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers for a file; `pass_at_1` is the mean by arm."""

    def plain(value: Any) -> Any:
        return asdict(value) if isinstance(value, Interval) else value

    return {
        "pass_at_1": {name: arm["pass_at_1"].mean for name, arm in arms.items()},
        "arms": {name: {key: plain(value) for key, value in arm.items()} for name, arm in arms.items()},
    }


def plot(arms: Mapping[str, Any]) -> str:
    """Held-out pass@1 of the main arms over the run, as SVG."""
    names = sorted({arm.name for arm in MAIN if arm.name in arms}, key=_place)
    return line_chart(
        {name: arms[name]["curve"] for name in names},
        title="Held-out pass@1, mean over seeds",
        x_label="policy version",
        y_label="pass@1",
        floor=None,
    )


def main() -> None:
    """Run what is missing, print the table, and write what was asked for."""
    arguments = options(
        __doc__,
        "json",
        "plot",
        seeds=5,
        other_seeds=3,
        minutes=90.0,
        processes=2,
        runs=Path("docs/results/staleness.jsonl"),
    ).parse_args()
    from bench.lagged import LaggedSettings

    settings = LaggedSettings()
    work = remaining(finished(arguments.runs, Finished), settings, arguments.seeds, arguments.other_seeds)
    run_all(work, settings, arguments.runs, processes=arguments.processes, minutes=arguments.minutes)
    current = {settings_of(arm, settings) for arm in (*MAIN, *OTHERS)}
    runs = [run for run in finished(arguments.runs, Finished) if run.settings in current]
    by_rate = {lr: summary([run for run in runs if run.lr == lr]) for lr in LEARNING_RATES}
    for lr, arms in by_rate.items():
        print(f"\nlr {lr:g}\n\n{table(arms)}")
    write(arguments.json, {f"{lr:g}": content(by_rate[lr]) for lr in by_rate})
    if arguments.plot:
        arguments.plot.write_text(plot(by_rate[LEARNING_RATES[0]]))


if __name__ == "__main__":
    main()
