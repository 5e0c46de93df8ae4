"""How far generation may run ahead: real runs of the embedded task at several staleness bounds.

    python -m bench.bounds [--bounds N,N] [--seeds N] [--minutes M] [--runs FILE] [--json FILE] [--markdown FILE]

`configs/grpo/tiny.yaml` runs as a user runs it, with `backlog.max_staleness` set to each bound, from one warm start and
on the same prompts. Age and speed are what the machine makes of them (in `docs/results/staleness.md` every token is
exactly as old as its bound). Runs follow one another, bound by bound within a seed. A finished run is a
line of the `--runs` file and is not repeated. With `--minutes` no run starts after that time.

`area` is the mean training pass rate over all steps. `loss of area` is that of bound 0 minus this bound's, with the
same seed. Ranges are 95 % intervals over the seeds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.recipes import CONFIGS, Finished, latest, recipe, remaining, run_all
from bench.report import Interval, Machine, exit_on_terminate, finished, markdown_table, options, page, write

CONFIG = CONFIGS / "grpo" / "tiny.yaml"
FIRST_SEED = 100
"""Seeds that no setting was chosen on."""

Runs = Mapping[int, Sequence[Finished]]
"""The finished runs of each bound, by seed."""


def numbers(runs: Runs) -> dict[int, dict[str, Interval]]:
    """Means over the seeds that every bound has, by bound."""
    by_seed = {bound: {run.seed: run for run in of_bound} for bound, of_bound in runs.items()}
    seeds = sorted(set.intersection(*(set(of_seed) for of_seed in by_seed.values())))
    if not seeds:
        raise SystemExit("no seed has a finished run of every bound yet")
    return {
        bound: {
            "pass@1": Interval.of([of_seed[seed].pass_at_1 for seed in seeds]),
            "area": Interval.of([of_seed[seed].area for seed in seeds]),
            "loss of area": Interval.of([by_seed[min(by_seed)][seed].area - of_seed[seed].area for seed in seeds]),
            "seconds": Interval.of([of_seed[seed].seconds for seed in seeds]),
        }
        for bound, of_seed in by_seed.items()
    }


def markdown(found: Mapping[int, Mapping[str, Interval]], machine: Machine) -> str:
    """The page of the results."""
    columns = next(iter(found.values()))
    facts = (
        f"Seeds: {columns['area'].count}, from {FIRST_SEED} on. `seconds` are those of a whole run. "
        f"Machine at the start: {machine}."
    )
    rows = markdown_table(("bound", *columns), ([bound, *row.values()] for bound, row in found.items()))
    return page("bounds", "How far to run ahead", (__doc__ or "").split("\n\n", 2)[2].strip(), facts, rows)


def main() -> None:
    """Run what is missing, print, and write the files."""
    exit_on_terminate()
    parser = options(__doc__, "json", "markdown", seeds=5, minutes=600.0, runs=Path("docs/results/bounds.jsonl"))
    parser.add_argument("--bounds", default="0,2,8")
    arguments = parser.parse_args()
    machine = Machine.now()
    bounds = [int(bound) for bound in arguments.bounds.split(",")]
    asked = {
        bound: [
            recipe(f"bound/{bound}", CONFIG, f"backlog.max_staleness={bound}", seed=FIRST_SEED + number)
            for number in range(arguments.seeds)
        ]
        for bound in bounds
    }
    in_turns = [asked[bound][number] for number in range(arguments.seeds) for bound in bounds]
    run_all(remaining(in_turns, finished(arguments.runs, Finished)), arguments.runs, minutes=arguments.minutes)
    by_name = latest(in_turns, finished(arguments.runs, Finished))
    found = numbers({bound: by_name[f"bound/{bound}"] for bound in bounds})
    text = markdown(found, machine)
    print(text[text.index("| bound") :])
    result: dict[str, Any] = {"machine": machine.record()}
    result["bounds"] = {bound: {name: asdict(one) for name, one in row.items()} for bound, row in found.items()}
    write(arguments.json, result)
    write(arguments.markdown, text)


if __name__ == "__main__":
    main()
