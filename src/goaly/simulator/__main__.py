"""Forecasts a run before it starts.

    python -m goaly.simulator PROFILE --config FILE [--steps N] [--seeds N] [--json FILE] [key=value ...]

PROFILE is a `profile.json`, or the folder of a run, whose own metrics and spans are the profile. `docs/planner.md`
explains the numbers.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from goaly.base.config import load
from goaly.base.errors import ConfigError
from goaly.base.registry import function_at
from goaly.simulator.forecast import SEEDS, Forecast, simulate
from goaly.simulator.profile import Profile, read_profile, write_profile
from goaly.simulator.run_profile import profile_of_run
from goaly.simulator.simulated_run import SimulatedRun

MOST_STEPS = 200
CONFIG = "goaly.plan.run_config:RunConfig"
"""The schema of a config, by name: its room makes plans with this one."""


def content(forecast: Forecast) -> dict[str, object]:
    """The forecast as the content of a JSON file."""
    per_gpu = asdict(forecast.tokens_per_second_per_gpu)
    return {**asdict(forecast), "tokens_per_second_per_gpu": per_gpu, "bottleneck": forecast.bottleneck}


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, simulate, print; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m goaly.simulator", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("profile", type=Path, help="a profile.json, or the folder of a run")
    parser.add_argument("--config", required=True, help="the run's config")
    parser.add_argument("--steps", type=int, default=MOST_STEPS, help="most steps that are simulated")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="simulated runs, which give the intervals")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the forecast")
    parser.add_argument("--save-profile", type=Path, metavar="FILE", help="write the profile of a run's folder")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings in place of the config's")
    chosen = parser.parse_intermixed_args(arguments)
    try:
        profile = profile_at(chosen.profile)
        argv = ["--config", chosen.config, *chosen.overrides]
        config = load(function_at(CONFIG), argv, prog="", description="").config  # pyrefly: ignore[bad-argument-type]
        least = {"steps": chosen.steps, "seeds": chosen.seeds}
        if problems := [f"--{name}={count}: must be at least 1" for name, count in least.items() if count < 1]:
            raise ConfigError(problems)
        forecast = simulate(profile, SimulatedRun.of(config).of_steps(chosen.steps), seeds=chosen.seeds)
    except ConfigError as error:
        sys.stderr.writelines(f"python -m goaly.simulator: {problem}\n" for problem in error.problems)
        return 2
    print(forecast)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(content(forecast), indent=1) + "\n")
    if chosen.save_profile is not None:
        write_profile(chosen.save_profile, profile)
    return 0


def profile_at(path: Path) -> Profile:
    """The profile in this file, or of the run in this folder; ConfigError if there is none."""
    return profile_of_run(path) if path.is_dir() else read_profile(path)


if __name__ == "__main__":
    sys.exit(main())
