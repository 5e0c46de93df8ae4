"""Does every recipe learn, and would this benchmark notice if one did not?

    python -m bench.recipes [--only A,B] [--seeds N] [--minutes M] [--runs FILE] [--json FILE] [--markdown FILE]

The recipes are `configs/recipes/*.yaml`, the two that they stand on, `configs/grpo/tiny.yaml` and
`configs/ppo/tiny.yaml`, and `configs/grpo/tiny_moe*.yaml`, whose models have experts. Three negative controls
(`bench/controls.py`) are `grpo/tiny` with its advantages shuffled within each group, with their sign flipped, or taken
from another group. Each is run to its end with several seeds, as a user runs it, from one warm start
(`python -m apps.sft.main --config configs/sft/tiny.yaml`), those with experts from that of the file with their name;
runs follow one another, since each uses the whole machine. A finished run is a line of the `--runs` file and is not
repeated under the same settings, seed and warm start. With `--minutes` no run starts after that time.

A recipe passes if every seed ends with a held-out pass@1 of at least 0.85, with experts 0.9, and the area under its
curve (the mean training pass rate over all steps) is above that of every control's run and above the pass@1 before
training, or it has unlearned most of what the warm start knows on its way. A control passes if no seed reaches 0.85.
The exit code is 1 if anything that was asked for has not passed.
"""

import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bench.report import append, digest, exit_on_terminate, finished, markdown_table, options, write

if TYPE_CHECKING:
    from apps.sft.config import SftConfig
    from goaly.plan.run_config import RunConfig

T = TypeVar("T")

CONFIGS = Path("configs")
RUNS = Path("runs/recipes")
PASS_AT_1, OF_EXPERTS = 0.85, 0.9
"""Held-out pass@1 of a recipe that learns, and of one whose model has experts."""
GOAL, GOAL_STEPS = 0.9, 8
RUN_SECONDS = 1800.0
"""A run that takes longer hangs, or might as well."""
WARM_START = CONFIGS / "sft" / "tiny.yaml"
TASKS = ("grpo/tiny", "ppo/tiny", "grpo/tiny_moe", "grpo/tiny_moe_shared")
"""Recipes outside of `configs/recipes`."""
WHERE_NOT_WHAT = ("run_dir", "hosts", "telemetry", "checkpoint", "save", "output", "checkpoint_every")
"""Parts of a config that its result does not depend on."""

CONTROL = "control/"
CONTROLS = ("shuffled", "flipped", "other_group")
"""Functions of `bench/controls.py`."""

PAGE = """\
# Does every recipe learn?

    python -m bench.recipes --json docs/results/recipes.json --markdown docs/results/recipes.md

Each recipe was run to its end with {seeds} of prompts and sampling, from the embedded warm start or that of its own
model, by the command that its user types: a run of actors on {cores} cores. pass@1 is that of held-out prompts,
before the first step and after the last; area is the mean training pass rate over all steps, which tells fast
learning from slow. {passed} of {count} recipes pass: they reach {least} with every seed, and their area is above
every control's and above the pass@1 before training. The controls are `grpo/tiny` with one thing broken (advantages
shuffled within the group, with flipped sign, or of another group): they have to fail, or this table would prove
nothing.
Rejected are groups that dynamic sampling replaced, and those still under way after the last step. Run time, and the
age of the trained data, depend on the machine. Values are means and the range over seeds.

{table}

{complaints}

Finished runs are the lines of [recipes.jsonl](recipes.jsonl); a run counts only under the settings that it and its warm
start were made with. Warm starts of different processors differ in rounding.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A config, the script that it is for, and a seed."""

    name: str
    file: Path
    app: str
    settings: str
    """A digest of all that the result depends on but seed and chance."""
    seed: int = 0
    overrides: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, int]:
        """Tells one experiment from another."""
        return self.name, self.settings, self.seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The result of one run of a recipe."""

    recipe: str
    settings: str
    seed: int
    pass_at_1_before: float
    pass_at_1: float
    """Held-out, of the last version."""
    area: float
    """Mean training pass rate over all steps."""
    seconds: float
    policy_version: int
    rejected: int
    """Groups that were sampled and not trained."""
    failed: int
    steps_to_goal: int | None = None
    """Steps until the mean training pass rate of `GOAL_STEPS` steps was at least `GOAL`; None if it never was."""

    @property
    def learned(self) -> bool:
        """Whether the policy passes on held-out prompts."""
        return self.pass_at_1 >= self.least

    @property
    def least(self) -> float:
        """The pass@1 of a policy that passes."""
        return OF_EXPERTS if "_moe" in self.recipe else PASS_AT_1


Runs = Mapping[str, Sequence[Finished]]
"""The newest run of each seed, by recipe."""


def files() -> dict[str, Path]:
    """The config of each recipe and control by name."""
    found = {name: CONFIGS / f"{name}.yaml" for name in TASKS}
    found |= {file.stem: file for file in sorted((CONFIGS / "recipes").glob("*.yaml"))}
    return found | {CONTROL + name: found["grpo/tiny"] for name in CONTROLS}


def named(only: str | None, found: Mapping[str, T], kind: str) -> dict[str, T]:
    """Those that `--only` names, all of them where it names none; a ValueError that names what there is not."""
    names = only.split(",") if only else list(found)
    if unknown := [name for name in names if name not in found]:
        raise ValueError(f"--only={only}: there is no {kind} {unknown[0]}; known are {', '.join(found)}")
    return {name: found[name] for name in names}


def chosen(only: str | None) -> dict[str, Path]:
    """The recipes that `--only` names."""
    return named(only, files(), "recipe")


def recipe(name: str, file: Path, *overrides: str, seed: int = 0, start: str | None = None) -> Recipe:
    """The recipe in this file; ConfigError if it can't work. Its warm start has the file's name, or this one."""
    from goaly.base.config import load
    from goaly.plan.run_config import RunConfig

    if name.startswith(CONTROL):
        overrides = (*overrides, f"advantages.name=bench.controls:{name.removeprefix(CONTROL)}")
    config = load(RunConfig, [f"--config={file}", *overrides], prog="bench.recipes", description="").config
    return Recipe(
        name=name,
        file=file,
        app="apps.grpo.main" if config.critic is None else "apps.ppo.main",
        settings=digest({**settled(config), "warm_start": warm_start(start or file.name)}),
        seed=seed,
        overrides=(*overrides, f"prompts.seed={seed}", f"generator.seed={seed}"),
    )


@functools.cache
def warm_start(file: str) -> dict[str, Any]:
    """The settings that decide the model from which a recipe in a file of this name starts, up to rounding, which
    differs between processors."""
    from apps.sft.config import SftConfig
    from goaly.base.config import load

    own = CONFIGS / "sft" / file
    config = own if own.is_file() else WARM_START
    return settled(load(SftConfig, [f"--config={config}"], prog="bench.recipes", description="").config)


def settled(config: "RunConfig | SftConfig") -> dict[str, Any]:
    """The settings on which the result depends, as plain values.

    Defaults are left out: a new setting whose default changes nothing leaves old runs valid.
    """
    from goaly.base.config.schema import default_values, plain

    decided = _without(plain(config), default_values(type(config)))
    return {key: value for key, value in decided.items() if key not in WHERE_NOT_WHAT}


def _without(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in values.items() if key not in defaults or value != defaults[key]}
    for key, value in kept.items():
        if isinstance(value, dict) and isinstance(defaults.get(key), dict):
            kept[key] = _without(value, defaults[key])
    return kept


def run(one: Recipe) -> Finished | None:
    """Run it to its end; None, once the reason is printed, where it does not get there."""
    folder = RUNS / f"{one.name.replace('/', '-')}-{one.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder.mkdir(parents=True)
    log = folder / "output.log"
    command = [sys.executable, "-m", one.app, "--config", str(one.file), f"run_dir={folder}", *one.overrides]
    with log.open("w") as out:
        try:
            code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=RUN_SECONDS).returncode
        except subprocess.TimeoutExpired:
            code = None
    if code != 0:
        how = f"exit code {code}" if code is not None else f"not done after {RUN_SECONDS:.0f} s"
        said = "\n  ".join(log.read_text().splitlines()[-5:])
        print(f"{one.name:24} did not finish: {how}; the end of {log}:\n  {said}", flush=True)
        return None
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = [step["reward/pass_rate"] for step in steps]
    return outcome(one, json.loads((folder / "summary.json").read_text()), rates)


def outcome(one: Recipe, summary: Mapping[str, Any], pass_rates: Sequence[float]) -> Finished:
    """The result that a finished run's summary and the training pass rate of its steps give."""
    return Finished(
        recipe=one.name,
        settings=one.settings,
        seed=one.seed,
        pass_at_1_before=summary["pass_at_1_before"],
        pass_at_1=summary["pass_at_1_after"],
        area=round(statistics.fmean(pass_rates), 4),
        seconds=summary["seconds"],
        policy_version=summary["policy_version"],
        rejected=summary["rejected"],
        failed=summary["failed"],
        steps_to_goal=steps_to_goal(pass_rates),
    )


def steps_to_goal(pass_rates: Sequence[float]) -> int | None:
    """Steps until the mean of `GOAL_STEPS` successive training pass rates is at least `GOAL`; None if it never is."""
    ends = range(GOAL_STEPS, len(pass_rates) + 1)
    return next((end for end in ends if statistics.fmean(pass_rates[end - GOAL_STEPS : end]) >= GOAL), None)


def remaining(recipes: Sequence[Recipe], found: Sequence[Finished]) -> list[Recipe]:
    """The experiments that have no finished run yet."""
    known = {(run.recipe, run.settings, run.seed) for run in found}
    return [one for one in recipes if one.key not in known]


def run_all(work: Sequence[Recipe], file: Path, *, minutes: float) -> None:
    """Run these, and write each to the file as soon as it is done."""
    until = time.monotonic() + 60 * minutes
    for one in work:
        if time.monotonic() >= until:
            return
        done = run(one)
        if done is not None:
            append(file, done)
            learned = f"pass@1 {done.pass_at_1:.3f}  area {done.area:.3f}"
            print(f"{one.name:24} seed {one.seed}  {learned}  {done.seconds:.0f} s", flush=True)


def latest(recipes: Sequence[Recipe], found: Sequence[Finished]) -> dict[str, list[Finished]]:
    """The newest run of each seed under its recipe's settings; what is missing is left out."""
    by_key = {(run.recipe, run.settings, run.seed): run for run in found}
    return {
        name: [by_key[one.key] for one in recipes if one.name == name and one.key in by_key]
        for name in dict.fromkeys(one.name for one in recipes)
    }


def complaints(runs: Runs, seeds: int) -> list[str]:
    """The reasons why not all recipes and controls pass, a line each."""
    controls = [run for name, of_name in runs.items() if name.startswith(CONTROL) for run in of_name]
    best_control = max((run.area for run in controls), default=None)
    lines = []
    for name, of_name in runs.items():
        if len(of_name) < seeds:
            lines.append(f"{name}: has {len(of_name)} finished runs, must have {seeds}")
        for run in of_name:
            where = f"{name}, seed {run.seed}"
            if name.startswith(CONTROL):
                if run.learned:
                    lines.append(f"{where}: a control learned, held-out pass@1 {run.pass_at_1:.3f}")
            elif not run.learned:
                lines.append(f"{where}: held-out pass@1 {run.pass_at_1:.3f}, must be at least {run.least}")
            elif run.area <= run.pass_at_1_before:
                lines.append(
                    f"{where}: area {run.area:.3f}, must be above pass@1 before training ({run.pass_at_1_before:.3f})"
                )
            elif best_control is not None and run.area <= best_control:
                lines.append(f"{where}: area {run.area:.3f}, must be above that of every control ({best_control:.3f})")
    return lines


def table(runs: Runs) -> str:
    """The runs as a table in Markdown."""
    columns = ("recipe", "seeds", "pass@1 before -> after", "area", "policy versions", "groups rejected", "seconds")
    return markdown_table(columns, (_cells(name, of_name) for name, of_name in runs.items()))


def _cells(name: str, runs: Sequence[Finished]) -> Sequence[object]:
    if not runs:
        return name, 0, "not finished", "", "", "", ""

    def mean(values: Iterable[float]) -> float:
        return statistics.fmean(values)

    learned = f"{mean(run.pass_at_1_before for run in runs):.3f} -> {_spread([run.pass_at_1 for run in runs])}"
    area, version = _spread([run.area for run in runs]), runs[0].policy_version
    rejected, seconds = mean(run.rejected for run in runs), mean(run.seconds for run in runs)
    return name, len(runs), learned, area, version, f"{rejected:.0f}", f"{seconds:.0f}"


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def page(runs: Runs, seeds: int) -> str:
    """The table with its meaning, for a reader who has not seen the command."""
    recipes = {name: of_name for name, of_name in runs.items() if not name.startswith(CONTROL)}
    found = complaints(runs, seeds)
    passed = sum(not any(line.startswith((f"{name}:", f"{name},")) for line in found) for name in recipes)
    return PAGE.format(
        cores=os.cpu_count(),
        seeds="one seed" if seeds == 1 else f"{seeds} seeds",
        passed=passed,
        count=len(recipes),
        least=PASS_AT_1,
        table=table(runs),
        complaints="\n".join(["What did not pass:\n", *(f"- {line}" for line in found)]) if found else "All passed.",
    )


def content(runs: Runs, seeds: int) -> dict[str, Any]:
    """The numbers for a file; `pass_at_1` is the least over seeds of that after the last step, by recipe."""
    return {
        "pass_at_1": {name: min(run.pass_at_1 for run in of_name) for name, of_name in runs.items() if of_name},
        "recipes": {name: [asdict(run) for run in of_name] for name, of_name in runs.items()},
        "complaints": complaints(runs, seeds),
    }


def main() -> int:
    """Run what is missing, print the table, write what was asked for, and say what has not passed."""
    parser = options(__doc__, "json", "markdown", seeds=3, minutes=90.0, runs=Path("docs/results/recipes.jsonl"))
    parser.add_argument("--only", help="names of recipes, such as dapo,grpo/tiny,control/flipped; all if not given")
    arguments = parser.parse_args()
    exit_on_terminate()
    from goaly.base.errors import ConfigError

    try:
        work = [
            recipe(name, file, seed=seed)
            for seed in range(arguments.seeds)
            for name, file in chosen(arguments.only).items()
        ]
    except (ConfigError, ValueError) as error:
        parser.error(str(error))
    run_all(remaining(work, finished(arguments.runs, Finished)), arguments.runs, minutes=arguments.minutes)
    runs = latest(work, finished(arguments.runs, Finished))
    print(table(runs))
    write(arguments.json, content(runs, arguments.seeds))
    write(arguments.markdown, page(runs, arguments.seeds))
    found = complaints(runs, arguments.seeds)
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
