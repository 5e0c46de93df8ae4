"""How far generation may run ahead: real runs of the embedded task at several staleness bounds.

    python -m bench.bounds [--bounds N,N] [--rates LR,LR] [--longer] [--seeds N] [--first-seed N] [--minutes M]
        [--runs FILE] [--json FILE] [--markdown FILE]

`configs/grpo/tiny.yaml` runs as a user runs it, with `backlog.max_staleness` set to each bound, from one warm start and
on the same prompts. A bound may be the name of a file in `configs/recipes` in place of a number, such as `async_8`.
`--rates` repeats every arm with these learning rates, and `--longer` with a fifth of each rate over 400 steps. Age and
speed are what the machine makes of them (in `docs/results/staleness.md` every token is exactly as old as its bound).
Runs follow one another, bound by bound within a seed. A finished run is a line of the `--runs` file and is not
repeated. With `--minutes` no run starts after that time.

`area` is the mean training pass rate over all steps. `loss of area` is that of bound 0 minus this bound's, with the
same seed, rate and length. `steps to 0.9` is when the mean training pass rate of eight steps first was 0.9,
where all seeds got there. `least` is the lowest pass@1 of a seed. Ranges are 95 % intervals over the seeds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.recipes import CONFIGS, Finished, Recipe, latest, recipe, remaining, run_all
from bench.report import Interval, Machine, exit_on_terminate, finished, markdown_table, options, page, write

CONFIG = CONFIGS / "grpo" / "tiny.yaml"
FIRST_SEED = 100
"""Seeds that no setting was chosen on."""
RATE = 3e-4
"""The learning rate of CONFIG."""
LONGER_STEPS, LONGER_RATE = 400, 0.2
"""Steps of a run with `--longer`, and the share of its rate."""

Runs = Mapping[str, Sequence[Finished]]
"""The finished runs of each bound, by seed."""


def arm(bound: str, rate: float, *, seed: int, longer: bool) -> Recipe:
    """The runs of a bound, or of a recipe that has one, at this rate."""
    is_number = bound.isdigit()
    name, overrides = f"bound/{bound}" if is_number else bound, []
    if is_number:
        overrides.append(f"backlog.max_staleness={bound}")
    if longer:
        rate *= LONGER_RATE
        overrides += [f"steps={LONGER_STEPS}", f"trainer.schedule.total_steps={LONGER_STEPS}"]
    if rate != RATE:
        overrides.append(f"trainer.optimizer.lr={rate:g}")
        name += f"@{rate:g}"
    file = CONFIG if is_number else CONFIGS / "recipes" / f"{bound}.yaml"
    return recipe(name, file, *overrides, seed=seed, start=CONFIG.name)


def numbers(runs: Runs) -> dict[str, dict[str, Interval]]:
    """Means over the seeds that every bound has, by bound; the first one is compared with."""
    by_seed = {bound: {run.seed: run for run in of_bound} for bound, of_bound in runs.items()}
    seeds = sorted(set.intersection(*(set(of_seed) for of_seed in by_seed.values())))
    if not seeds:
        raise SystemExit("no seed has a finished run of every bound yet")
    first = next(iter(by_seed))
    return {
        bound: {
            "pass@1": Interval.of([of_seed[seed].pass_at_1 for seed in seeds]),
            "least": Interval.of([min(of_seed[seed].pass_at_1 for seed in seeds)]),
            "area": Interval.of([of_seed[seed].area for seed in seeds]),
            "loss of area": Interval.of([by_seed[first][seed].area - of_seed[seed].area for seed in seeds]),
            **steps_to_goal([of_seed[seed].steps_to_goal for seed in seeds]),
            "seconds": Interval.of([of_seed[seed].seconds for seed in seeds]),
        }
        for bound, of_seed in by_seed.items()
    }


def steps_to_goal(steps: Sequence[int | None]) -> dict[str, Interval]:
    """The column of the seeds that got to the goal, if all did: fewer would be compared with others."""
    known = [count for count in steps if count is not None]
    return {"steps to 0.9": Interval.of(known)} if len(known) == len(steps) else {}


def markdown(found: Mapping[str, Mapping[str, Interval]], machine: Machine, first_seed: int) -> str:
    """The page of the results."""
    columns = next(iter(found.values()))
    facts = (
        f"Seeds: {columns['area'].count}, from {first_seed} on. `seconds` are those of a whole run. "
        f"Machine at the start: {machine}."
    )
    rows = markdown_table(("bound", *columns), ([bound, *row.values()] for bound, row in found.items()))
    return page("bounds", "How far to run ahead", (__doc__ or "").split("\n\n", 2)[2].strip(), facts, rows)


def main() -> None:
    """Run what is missing, print, and write the files."""
    exit_on_terminate()
    parser = options(__doc__, "json", "markdown", seeds=5, minutes=600.0, runs=Path("docs/results/bounds.jsonl"))
    parser.add_argument("--bounds", default="0,2,8")
    parser.add_argument("--rates", default=str(RATE))
    parser.add_argument("--longer", action="store_true")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    arguments = parser.parse_args()
    machine = Machine.now()
    pairs = [(bound, float(rate)) for rate in arguments.rates.split(",") for bound in arguments.bounds.split(",")]
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    asked = {pair: [arm(*pair, seed=seed, longer=arguments.longer) for seed in seeds] for pair in pairs}
    in_turns = [asked[pair][number] for number in range(arguments.seeds) for pair in pairs]
    run_all(remaining(in_turns, finished(arguments.runs, Finished)), arguments.runs, minutes=arguments.minutes)
    by_name = latest(in_turns, finished(arguments.runs, Finished))
    found: dict[str, dict[str, Interval]] = {}
    for rate in dict.fromkeys(rate for _, rate in pairs):
        names = [asked[pair][0].name for pair in pairs if pair[1] == rate]
        found |= numbers({name.removeprefix("bound/"): by_name[name] for name in names})
    text = markdown(found, machine, arguments.first_seed)
    print(text[text.index("| bound") :])
    result: dict[str, Any] = {"machine": machine.record()}
    result["bounds"] = {bound: {name: asdict(one) for name, one in row.items()} for bound, row in found.items()}
    write(arguments.json, result)
    write(arguments.markdown, text)


if __name__ == "__main__":
    main()
