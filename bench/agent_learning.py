"""Do the agents that ship learn what they are for?

    make calculator guessing    # once: the warm starts, and OpenEnv's virtual environment
    python -m bench.agent_learning [--only A,B] [--seeds N] [--runs FILE] [--json FILE]

The calculator is learned by an agent of OpenAI's client and by one of `openai-agents`, the guessing game by GRPO with a
reward for each turn and by PPO with a critic. Each is run to its end with several seeds, as a user runs it, from the
warm start of its name; a finished run is a line of the `--runs` file and is not repeated under the same settings, seed
and warm start. The settings were chosen with seed 0 (the game's with 10 to 12), so seeds begin at 1.

A calculator passes if held-out pass@1 goes from under 0.4 to at least 0.9 within ten minutes, with every seed. The
game passes if it goes from under 0.43, the share that a player wins who only never repeats a guess, to at least 0.8.
The exit code is 1 if anything has not passed.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from bench.recipes import Finished, Recipe, Runs, latest, named, recipe, remaining, run_all, table
from bench.report import Machine, exit_on_terminate, finished, options, write

FILES = Path("configs/agent")


class Agent(NamedTuple):
    """An agent that ships, and what it must reach: that of a calculator if nothing else is said."""

    file: Path
    overrides: tuple[str, ...] = ()
    app: str = "apps.agent.main"
    most_before: float = 0.4
    least_after: float = 0.9
    most_seconds: float = 600.0


GAME = {"app": "apps.agent.guessing", "most_before": 3 / 7, "least_after": 0.8}
AGENTS: Mapping[str, Agent] = {
    "calculator": Agent(FILES / "calculator.yaml"),
    "calculator-agents": Agent(FILES / "calculator.yaml", ("agent.function=apps.agent.calculator:with_agents",)),
    "guessing": Agent(FILES / "guessing.yaml", **GAME),
    "guessing-ppo": Agent(FILES / "guessing_ppo.yaml", **GAME),
}


def chosen(only: str | None) -> list[str]:
    """The agents that `--only` names."""
    return list(named(only, AGENTS, "agent"))


def experiment(name: str, seed: int) -> Recipe:
    """One run of an agent."""
    agent = AGENTS[name]
    start = f"{name.partition('-')[0]}.yaml"
    return replace(recipe(name, agent.file, *agent.overrides, seed=seed, start=start), app=agent.app)


def complaints(runs: Runs, seeds: int) -> list[str]:
    """The reasons why not all agents pass, a line each."""
    lines = []
    for name, of_name in runs.items():
        must = AGENTS[name]
        if len(of_name) < seeds:
            lines.append(f"{name}: has {len(of_name)} finished runs, must have {seeds}")
        for run in of_name:
            where = f"{name}, seed {run.seed}"
            if run.pass_at_1_before >= must.most_before:
                lines.append(f"{where}: begins with {run.pass_at_1_before:.3f}, must be under {must.most_before:.2f}")
            if run.pass_at_1 < must.least_after:
                lines.append(f"{where}: ends with {run.pass_at_1:.3f}, must be at least {must.least_after}")
            if run.seconds > must.most_seconds:
                lines.append(f"{where}: took {run.seconds:.0f} s, must take at most {must.most_seconds:.0f}")
    return lines


def report(runs: Runs, seeds: int) -> Mapping[str, object]:
    """The numbers for a file; `pass_at_1` is the least over seeds of that after the last step, by agent."""
    return {
        "pass_at_1": {name: min(run.pass_at_1 for run in of_name) for name, of_name in runs.items() if of_name},
        "seconds": {name: max(run.seconds for run in of_name) for name, of_name in runs.items() if of_name},
        "runs": {name: [asdict(run) for run in of_name] for name, of_name in runs.items()},
        "complaints": complaints(runs, seeds),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, print the table, write what was asked for, and say what has not passed."""
    parser = options(__doc__, "json", seeds=3, runs=Path("docs/results/agent_learning.jsonl"))
    parser.add_argument("--only", help="names of agents, such as calculator,guessing; all if not given")
    arguments = parser.parse_args(argv)
    exit_on_terminate()
    try:
        work = [experiment(name, seed) for seed in range(1, arguments.seeds + 1) for name in chosen(arguments.only)]
    except ValueError as error:  # a ConfigError is one
        parser.error(str(error))
    run_all(remaining(work, finished(arguments.runs, Finished)), arguments.runs, minutes=float("inf"))
    runs = latest(work, finished(arguments.runs, Finished))
    print(f"{Machine.now()}\n\n{table(runs)}")
    write(arguments.json, report(runs, arguments.seeds))
    found = complaints(runs, arguments.seeds)
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
