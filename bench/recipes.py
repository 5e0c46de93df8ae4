"""Does every recipe learn? Each one is run to its end, as a user runs it, and has to pass on held-out prompts.

    python -m bench.recipes [--only A,B] [--minutes M] [--runs FILE] [--json FILE] [--markdown FILE]

The recipes are `configs/recipes/*.yaml` and the two that they stand on, `configs/grpo/tiny.yaml` and
`configs/ppo/tiny.yaml`. All start from one warm start (`python -m apps.sft.main --config configs/sft/tiny.yaml`) and
run one after the other, since each uses the whole machine. Each finished run is a line of the `--runs` file; what is
there already, under the same settings and from the same warm start, is not run again. With `--minutes` no run is begun
after that time. A recipe passes with a held-out pass@1 of at least 0.85; the exit code is 1 if one of those asked for
has not passed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.record import append, digest, finished

if TYPE_CHECKING:
    from goaly.run.config import RunConfig

CONFIGS = Path("configs")
RUNS = Path("runs/recipes")
PASS_AT_1 = 0.85
"""Held-out pass@1 of a recipe that learns."""
RUN_SECONDS = 1800.0
"""A run that takes longer hangs, or might as well."""
WHERE_NOT_WHAT = ("run_dir", "hosts", "telemetry")
"""Sections of a config that its result does not depend on."""

PAGE = """\
# Does every recipe learn?

    python -m bench.recipes --json docs/results/recipes.json --markdown docs/results/recipes.md

Each recipe was run once to its end, from the embedded warm start, by the command that its user types: a run of
actors on {cores} cores. pass@1 is that of held-out prompts, before the first step and after the last; {passed} of
{count} recipes have at least {least}. Rejected are groups that dynamic sampling replaced, and those still under way
when the last step was done. How long a run takes, and how old what it trains, depends on the machine.

{table}

Finished runs are the lines of [recipes.jsonl](recipes.jsonl); a run counts only under the settings and the warm
start that it was made with.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A config and the script that it is for."""

    name: str
    file: Path
    app: str
    settings: str
    """A digest of all that the result depends on but chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What one run of a recipe came to."""

    recipe: str
    settings: str
    pass_at_1_before: float
    pass_at_1: float
    """Held-out, of the last version."""
    seconds: float
    policy_version: int
    rejected: int
    """Groups that were sampled and not trained."""
    failed: int

    @property
    def passed(self) -> bool:
        """Whether the recipe learns."""
        return self.pass_at_1 >= PASS_AT_1


def files() -> dict[str, Path]:
    """The config of each recipe by name."""
    found = {f"{folder}/tiny": CONFIGS / folder / "tiny.yaml" for folder in ("grpo", "ppo")}
    return found | {file.stem: file for file in sorted((CONFIGS / "recipes").glob("*.yaml"))}


def chosen(only: str | None) -> dict[str, Path]:
    """The recipes that `--only` names, all of them where it names none; a ValueError that names what there is not."""
    found = files()
    names = only.split(",") if only else list(found)
    if unknown := [name for name in names if name not in found]:
        raise ValueError(f"--only={only}: there is no recipe {unknown[0]}; known are {', '.join(found)}")
    return {name: found[name] for name in names}


def recipe(name: str, file: Path, *overrides: str) -> Recipe:
    """The recipe in this file; ConfigError if it can't work."""
    from goaly.config import load
    from goaly.run.config import RunConfig

    config = load(RunConfig, [f"--config={file}", *overrides], prog="bench.recipes", description="").config
    app = "apps.grpo.main" if config.critic is None else "apps.ppo.main"
    return Recipe(name=name, file=file, app=app, settings=digest(settled(config), config.model.path))


def settled(config: "RunConfig") -> dict[str, Any]:
    """What the config decides that matters to the result, as plain values.

    Without what is at its default: a new setting that changes nothing where nobody sets it leaves old runs valid.
    """
    from goaly.configuration.plain import default_values, plain

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
    folder = RUNS / f"{one.name.replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder.mkdir(parents=True)
    log = folder / "output.log"
    command = [sys.executable, "-m", one.app, "--config", str(one.file), f"run_dir={folder}"]
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
    return outcome(one, json.loads((folder / "summary.json").read_text()))


def outcome(one: Recipe, summary: Mapping[str, Any]) -> Finished:
    """What a finished run's summary says."""
    return Finished(
        recipe=one.name,
        settings=one.settings,
        pass_at_1_before=summary["pass_at_1_before"],
        pass_at_1=summary["pass_at_1_after"],
        seconds=summary["seconds"],
        policy_version=summary["policy_version"],
        rejected=summary["rejected"],
        failed=summary["failed"],
    )


def remaining(recipes: Sequence[Recipe], found: Sequence[Finished]) -> list[Recipe]:
    """What is still to be run."""
    known = {(run.recipe, run.settings) for run in found}
    return [one for one in recipes if (one.name, one.settings) not in known]


def run_all(work: Sequence[Recipe], file: Path, *, minutes: float) -> None:
    """Run these, and write each to the file as soon as it is done."""
    until = time.monotonic() + 60 * minutes
    for one in work:
        if time.monotonic() >= until:
            return
        done = run(one)
        if done is not None:
            append(file, done)
            print(f"{one.name:24} pass@1 {done.pass_at_1:.3f}  {done.seconds:.0f} s", flush=True)


def latest(recipes: Sequence[Recipe], found: Sequence[Finished]) -> dict[str, Finished | None]:
    """Each recipe's last run under its settings; None where there is none."""
    by_key = {(run.recipe, run.settings): run for run in found}
    return {one.name: by_key.get((one.name, one.settings)) for one in recipes}


def complaints(runs: Mapping[str, Finished | None]) -> list[str]:
    """What keeps the recipes from all being good, a line each."""
    lines = []
    for name, done in runs.items():
        if done is None:
            lines.append(f"{name}: has no finished run")
        elif not done.passed:
            lines.append(f"{name}: held-out pass@1 {done.pass_at_1:.3f}, must be at least {PASS_AT_1}")
    return lines


def table(runs: Mapping[str, Finished | None]) -> str:
    """The runs as a table in Markdown."""
    lines = [
        "| recipe | pass@1 before -> after | policy versions | groups rejected | seconds |",
        "|---|---|---|---|---|",
    ]
    for name, done in runs.items():
        if done is None:
            lines.append(f"| {name} | not finished | | | |")
            continue
        mark = "" if done.passed else " (too low)"
        lines.append(
            f"| {name} | {done.pass_at_1_before:.3f} -> {done.pass_at_1:.3f}{mark} | {done.policy_version} "
            f"| {done.rejected} | {done.seconds:.0f} |"
        )
    return "\n".join(lines)


def page(runs: Mapping[str, Finished | None]) -> str:
    """The table with what it says, for a reader who has not seen the command."""
    passed = sum(done is not None and done.passed for done in runs.values())
    return PAGE.format(cores=os.cpu_count(), passed=passed, count=len(runs), least=PASS_AT_1, table=table(runs))


def content(runs: Mapping[str, Finished | None]) -> dict[str, Any]:
    """The numbers for a file; `pass_at_1` is that after the last step, by recipe."""
    done = {name: run for name, run in runs.items() if run is not None}
    return {
        "pass_at_1": {name: run.pass_at_1 for name, run in done.items()},
        "recipes": {name: asdict(run) | {"passed": run.passed} for name, run in done.items()},
        "complaints": complaints(runs),
    }


def main() -> int:
    """Run what is missing, print the table, write what was asked for, and say what has not passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of recipes, such as dapo,grpo/tiny; all if not given")
    parser.add_argument("--minutes", type=float, default=90.0)
    parser.add_argument("--runs", type=Path, default=Path("docs/results/recipes.jsonl"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    from goaly.errors import ConfigError

    try:
        recipes = [recipe(name, file) for name, file in chosen(arguments.only).items()]
    except (ConfigError, ValueError) as error:
        parser.error(str(error))
    run_all(remaining(recipes, finished(arguments.runs, Finished)), arguments.runs, minutes=arguments.minutes)
    runs = latest(recipes, finished(arguments.runs, Finished))
    print(table(runs))
    if arguments.json:
        arguments.json.write_text(json.dumps(content(runs), indent=1) + "\n")
    if arguments.markdown:
        arguments.markdown.write_text(page(runs))
    found = complaints(runs)
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
