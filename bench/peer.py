"""goaly against TRL's GRPOTrainer: the same task, warm start, prompts, reward, batch, optimizer and cores.

    make peer                      # installs TRL in an environment of its own, then runs this
    python -m bench.peer --peer-python FILE [--rounds N] [--steps N] [--json FILE] [--markdown FILE]

Both sides start from the embedded warm start and train the same prompts in the same order, 8 groups of 8 answers a
step; each round has prompts of its own. TRL generates with transformers and trains in one process with all cores
(`trl`), or in one process a core (`trl ddp`, data-parallel): its user would take the faster one, so ratios are taken
against that. goaly runs `configs/grpo/tiny.yaml` as it stands. Sides take turns. No side evaluates or saves.

Reported are seconds a step (median over the steps after the first 5), tokens a second, and the seconds until the mean
reward of 8 steps in a row is at least 0.9, from the first step (`learn`) and from the start of the command (`total`).
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.report import Machine, exit_on_terminate, markdown_table, options, write
from goaly.base.config import load
from goaly.base.json_text import read_lines
from goaly.plan.run_config import RunConfig

CONFIG = "configs/grpo/tiny.yaml"
GOAL, STEPS_IN_A_ROW = 0.9, 8
FIRST_SEED = 100
"""Prompts differ from round to round, and from those that the config's settings were chosen on."""
WARM_STEPS = 5
LIMIT_SECONDS = 900.0
"""A side that takes longer is stopped; what it reached by then counts."""
SIDES = ("trl", "trl ddp", "goaly")
GOALY, PEERS = "goaly", ("trl", "trl ddp")

PAGE = """\
# Against TRL

    make peer SETTINGS="--markdown docs/results/peer.md --json docs/results/peer.json"

{doc}
Machine at the start: {machine}; its host took {stolen:.2f} of the cores away in the worst run. TRL {version}. Each
number is the median over {rounds} rounds; the spread is in [peer.json](peer.json).

{table}

goaly's step rate is {rate:.1f} times that of the faster arm of TRL; it reaches the goal in {learn:.2f} of its time, and
in {total:.2f} of it with start-up.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run of one side."""

    side: str
    step_seconds: float
    tokens_per_second: float
    learn_seconds: float | None
    """From the first step to the goal; None if it was not reached."""
    total_seconds: float | None
    """From the start of the command to the goal."""
    goal_step: int | None
    steps: int
    rewards: list[float]
    """The mean reward of each step."""
    machine: dict[str, Any]


def result_of(side: str, lines: Sequence[Mapping[str, Any]], spawned_at: float, machine: Machine) -> Result:
    """The result of one side's run, from the lines of its `steps.jsonl`."""
    begin = next(line["at"] for line in lines if line.get("begin"))
    steps = [line for line in lines if "reward" in line]
    ends = [begin, *(step["at"] for step in steps)]
    seconds = [later - earlier for earlier, later in pairwise(ends)][WARM_STEPS:]
    rewards = [step["reward"] for step in steps]
    goal_step = goal_reached(rewards)
    reached_at = None if goal_step is None else steps[goal_step - 1]["at"]
    return Result(
        side=side,
        step_seconds=statistics.median(seconds),
        tokens_per_second=sum(step["tokens"] for step in steps[WARM_STEPS:]) / sum(seconds),
        learn_seconds=None if reached_at is None else reached_at - begin,
        total_seconds=None if reached_at is None else reached_at - spawned_at,
        goal_step=goal_step,
        steps=len(steps),
        rewards=[round(reward, 4) for reward in rewards],
        machine=machine.record(),
    )


def goal_reached(rewards: Sequence[float]) -> int | None:
    """After how many steps the mean reward of 8 steps in a row first is at least 0.9; None if it never is."""
    for end in range(STEPS_IN_A_ROW, len(rewards) + 1):
        if statistics.fmean(rewards[end - STEPS_IN_A_ROW : end]) >= GOAL:
            return end
    return None


def job_of(config: RunConfig, folder: Path, *, threads: int) -> dict[str, Any]:
    """The config's settings as the peer reads them, with its prompts written out."""
    from goaly.prompts.mixture import prompt_mixture
    from goaly.prompts.tokenizer import ChatTokenizer
    from goaly.train.settings import ScheduleSettings

    def factor(schedule: ScheduleSettings, step: int) -> float:
        warm, total = schedule.warmup_steps, schedule.total_steps or 1
        if step < warm:
            return (step + 1) / (warm + 1)
        left = max(0.0, (total - step) / (total - warm))
        return schedule.min_lr_factor + (1 - schedule.min_lr_factor) * left

    tokenizer, prompts = ChatTokenizer(config.model.path), prompt_mixture(config.prompts)
    drawn = [prompts.next() for _ in range(config.steps * config.backlog.groups_per_step)]
    file = folder / "prompts.jsonl"
    records = [{"prompt": tokenizer.render_text(prompt.messages), "answer": prompt.answer} for prompt in drawn]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    optimizer, schedule = config.trainer.optimizer, config.trainer.schedule
    return {
        "model": str(Path(config.model.path).absolute()),
        "prompts": str(file),
        "folder": str(folder / "trl"),
        "steps_file": str(folder / "steps.jsonl"),
        "seed": config.prompts.seed,
        "steps": config.steps,
        "groups_per_step": config.backlog.groups_per_step,
        "group_size": config.backlog.group_size,
        "max_tokens": config.sampling.max_tokens,
        "lr": optimizer.lr,
        "betas": [optimizer.beta1, optimizer.beta2],
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": config.trainer.max_grad_norm,
        "lr_factors": [factor(schedule, step) for step in range(config.steps + 1)],
        "threads": threads,
    }


def command_of(side: str, config: RunConfig, argv: Sequence[str], folder: Path, peer_python: Path) -> list[str]:
    """The command that runs the side and writes `steps.jsonl` into the folder."""
    if side == GOALY:
        return [sys.executable, "-m", "bench.peer", "--as-goaly", str(folder), *argv]
    cores = len(os.sched_getaffinity(0))
    job = folder / "job.json"
    job.write_text(json.dumps(job_of(config, folder, threads=1 if side == "trl ddp" else cores)))
    script = [str(Path(__file__).with_name("peer_trl.py")), str(job)]
    if side == "trl ddp":
        return [str(peer_python), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={cores}", *script]
    return [str(peer_python), *script]


def run_side(side: str, config: RunConfig, argv: Sequence[str], peer_python: Path) -> Result:
    """Run one side to its end; RuntimeError with the end of its output if it fails."""
    with tempfile.TemporaryDirectory(prefix="bench-peer-") as name:
        folder = Path(name)
        command = command_of(side, config, argv, folder, peer_python)
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "OMP_NUM_THREADS")}
        if side == GOALY:
            environment = dict(os.environ)
        machine, spawned_at = Machine.now(), time.time()
        with (folder / "output").open("w") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            try:
                code: int | None = process.wait(LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, 9)
                    process.wait()
        steps = folder / "steps.jsonl"
        lines = list(read_lines(steps)) if steps.exists() else []
        is_whole = len(lines) == 1 + config.steps  # a peer's ranks may abort while they end, after all is measured
        if not lines or (code not in (0, None) and not is_whole):
            raise RuntimeError(f"{side} ended with exit code {code}:\n{(folder / 'output').read_text()[-3000:]}")
        return result_of(side, lines, spawned_at, machine)


def as_goaly(argv: Sequence[str], folder: Path) -> None:
    """goaly's side: the loop of `apps.grpo.main` without its evaluations, with a line for each step."""
    from apps.grpo.main import collect, episode, train
    from goaly.base.telemetry import process_logs
    from goaly.run.run import Run
    from goaly.run.start import started

    config = _config(argv)
    run_dir = folder / "run"

    async def main() -> None:
        async with started(config, episode, run_dir) as run:
            begin = time.time()
            async with asyncio.TaskGroup() as loops:
                loops.create_task(collect(run))
                loops.create_task(train(run))
            write_lines(run, begin)

    def write_lines(run: Run, begin: float) -> None:
        run_started = time.time() - (time.monotonic() - run.started)
        recorded = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        lines: list[dict[str, Any]] = [{"at": begin, "begin": True}]
        for step in recorded:
            at = run_started + step["run/seconds"]
            lines.append({"at": at, "reward": step["reward/mean"], "tokens": step["step/tokens"]})
        (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    with process_logs.controller(run_dir / "logs" / "controller.log"):
        asyncio.run(main())


def medians(results: Sequence[Result]) -> dict[str, dict[str, float | None]]:
    """The median of each number by side; None where a run did not reach the goal."""

    def median(values: list[float | None]) -> float | None:
        return None if None in values else statistics.median(value for value in values if value is not None)

    keys = ("step_seconds", "tokens_per_second", "learn_seconds", "total_seconds", "goal_step")
    return {
        side: {key: median([getattr(one, key) for one in results if one.side == side]) for key in keys}
        for side in dict.fromkeys(one.side for one in results)
    }


def ratios(by_side: Mapping[str, Mapping[str, float | None]]) -> dict[str, float | None]:
    """goaly's step rate over the faster peer's, and its shares of the quicker peer's times to the goal."""
    ours, peers = by_side[GOALY], [by_side[side] for side in PEERS if side in by_side]

    def share(key: str) -> float | None:
        reached = [value for peer in peers if (value := peer[key]) is not None]
        mine = ours[key]
        return None if mine is None or not reached else mine / min(reached)

    step = share("step_seconds")
    return {
        "step_rate": None if step is None else 1 / step,
        "learn": share("learn_seconds"),
        "total": share("total_seconds"),
    }


def table(by_side: Mapping[str, Mapping[str, float | None]]) -> str:
    """The medians as a table in Markdown."""

    def cell(value: float | None, form: str) -> str:
        return "not reached" if value is None else format(value, form)

    columns = ("side", "s a step", "tokens/s", "steps to 0.9", "learn s", "total s")
    numbers = {"step_seconds": ".3f", "tokens_per_second": ".0f", "goal_step": ".0f", "learn_seconds": ".1f"}
    numbers |= {"total_seconds": ".1f"}
    rows = ([side, *(cell(one[key], form) for key, form in numbers.items())] for side, one in by_side.items())
    return markdown_table(columns, rows)


def _config(argv: Sequence[str]) -> RunConfig:
    return load(RunConfig, list(argv), prog="bench.peer", description="").config


def main() -> None:
    """Run the sides in turns, print the table, and write what was asked for."""
    parser = options(__doc__, "json", "markdown", rounds=3, steps=100, sides=",".join(SIDES))
    parser.add_argument("--peer-python", type=Path, help="the Python of an environment with TRL; `make peer` makes one")
    parser.add_argument("--as-goaly", type=Path, help=argparse.SUPPRESS)
    arguments, rest = parser.parse_known_args()
    exit_on_terminate()
    if arguments.as_goaly:
        as_goaly(rest, arguments.as_goaly)
        return
    if arguments.peer_python is None or not arguments.peer_python.exists():
        parser.error(
            f"--peer-python={arguments.peer_python}: must be the Python of an environment with TRL; run `make peer`"
        )
    sides = arguments.sides.split(",")
    if unknown := [side for side in sides if side not in SIDES]:
        parser.error(f"--sides={arguments.sides}: no side {unknown[0]!r}; sides are {', '.join(SIDES)}")
    argv = ["--config", CONFIG, f"steps={arguments.steps}", "telemetry.progress=off", "telemetry.trace=false", *rest]
    first, results = Machine.now(), []
    for round_number in range(arguments.rounds):
        seed = FIRST_SEED + round_number
        seeded = [*argv, f"prompts.seed={seed}", f"generator.seed={seed}"]
        for side in sides:
            one = run_side(side, _config(seeded), seeded, arguments.peer_python)
            results.append(one)
            print(
                f"round {round_number}  {side:8} {one.step_seconds:.3f} s a step, 0.9 after {one.total_seconds} s",
                flush=True,
            )
    by_side = medians(results)
    found = ratios(by_side) if GOALY in by_side and len(by_side) > 1 else {}
    print(f"\n{first}\n\n{table(by_side)}\n\n{found}")
    content = {"machine": first.record(), "medians": by_side, "ratios": found, "runs": [asdict(one) for one in results]}
    write(arguments.json, content)
    if arguments.markdown:
        stolen = max(one.machine["stolen_cores"] for one in results)
        arguments.markdown.write_text(_page(first, stolen, by_side, found, arguments))


def _page(
    machine: Machine, stolen: float, by_side: Any, found: Mapping[str, Any], arguments: argparse.Namespace
) -> str:
    version = subprocess.run(
        [arguments.peer_python, "-c", "import importlib.metadata as m; print(m.version('trl'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    doc = (__doc__ or "").split("\n\n", 2)[2]
    return PAGE.format(
        doc=doc,
        machine=machine,
        stolen=stolen,
        version=version,
        rounds=arguments.rounds,
        table=table(by_side),
        rate=found["step_rate"],
        learn=found["learn"],
        total=found["total"],
    )


if __name__ == "__main__":
    main()
