"""The split of the machines between training and generation, with what to expect from it.

    python -m goaly.plan.split --config FILE [--profile FILE | --from RUN] [--yaml FILE] [key=value ...]

It measures on this machine for about a minute and writes `profile.json`. `--profile` takes the service times from such
a file instead, which also plans machines that are not there (`hosts.imagine`); `--from` takes the episodes from the log
of a run. Then it simulates the splits that the placement allows, and prints the best one, its neighbours, and its
settings as YAML: a config that extends the given one.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from goaly.base.config import load
from goaly.base.errors import ConfigError
from goaly.plan.cluster import Cluster, imagined, one_host, this_machine
from goaly.plan.run_config import RunConfig
from goaly.plan.splits import (
    Shape,
    ahead,
    fastest,
    like,
    longer,
    narrowed,
    neighbours,
    seconds_of,
    simulated,
    splits,
)
from goaly.simulator.forecast import simulate
from goaly.simulator.profile import Profile, read_profile, write_profile
from goaly.simulator.run_profile import profile_of_run
from goaly.simulator.scaled_profile import scaled

PROFILE = Path("profile.json")
MINDS = (
    ("answers twice as long", {"answers": 2.0}),
    ("answers half as long", {"answers": 0.5}),
    ("environments and verifiers three times as slow", {"waits": 3.0}),
)
"""Changes of the episodes that may change the best split."""


def recommended(config: RunConfig, profile: Profile, cluster: Cluster) -> tuple[RunConfig, list[RunConfig]]:
    """The best config, and the splits among which it was chosen, in its other settings."""
    options = [ahead(one, profile) for one in splits(config, cluster)]
    best = narrowed(fastest(options, profile)[0], profile)
    return best, [like(best, one) for one in options]


def describe(config: RunConfig, cluster: Cluster) -> str:
    """The split in a line."""
    generating = config.generator.replicas * config.generator.tp
    gpus = len(cluster.hosts[0].gpus)
    if gpus and len(cluster.hosts) > 1:
        nodes = f"{generating / gpus:g} of {len(cluster.hosts)} nodes generate"
    else:
        nodes = f"{generating} of {config.trainer.ranks + generating} ranks generate"
    return (
        f"{nodes}: trainer of {config.trainer.ranks} ranks (fsdp={config.trainer.fsdp}), {config.generator.replicas} "
        f"replicas of {config.generator.tp}"
    )


def report(config: RunConfig, profile: Profile, cluster: Cluster, base: str) -> tuple[str, str]:
    """The recommendation as text, and its settings as YAML."""
    best, options = recommended(config, profile, cluster)
    forecast = simulate(profile, simulated(best))
    expected = (describe(best, cluster), *str(forecast).split("\n"))
    lines = ["recommended", *(f"  {line}" for line in expected), "neighbours"]
    for one in neighbours(options, best):
        lines.append(f"  {describe(one, cluster)}; {simulate(profile, simulated(one)).step_seconds} s a step")
    lines.append("what would change it")
    lines += [f"  {line}" for line in _minds(best, options, profile, cluster)]
    return "\n".join(lines), "\n".join(settings(best, base))


def _minds(best: RunConfig, options: Sequence[RunConfig], profile: Profile, cluster: Cluster) -> Iterator[str]:
    for words, change in MINDS:
        changed = scaled(profile, **change)
        if changed == profile:
            continue
        answers = change.get("answers", 1.0)
        other, seconds = fastest([longer(one, answers) for one in options], changed)
        stays = seconds_of(longer(best, answers), changed, Shape.of(changed, best))
        if other.generator.replicas == best.generator.replicas or seconds > 0.98 * stays:
            yield f"{words}: nothing, {stays:.3g} s a step"
        else:
            yield f"{words}: {describe(other, cluster)}; {seconds:.3g} s a step in place of {stays:.3g}"


def settings(config: RunConfig, base: str) -> Iterator[str]:
    """The lines of a config that extends `base` by this split."""
    backlog, generator = config.backlog, config.generator
    yield f"base: {json.dumps(base)}"
    yield f"trainer: {{fsdp: {config.trainer.fsdp}}}"
    yield (
        f"generator: {{replicas: {generator.replicas}, tp: {generator.tp}, max_running: {generator.max_running}, "
        f"max_step_tokens: {generator.max_step_tokens}}}"
    )
    window = f", window: {backlog.window}" if backlog.order == "windowed" else ""
    yield f"backlog: {{max_staleness: {backlog.max_staleness}{window}}}"
    yield f"rollout: {{concurrency: {config.rollout.most_episodes}}}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, measure if there is no profile, and print the recommendation."""
    parser = argparse.ArgumentParser(
        prog="python -m goaly.plan.split", description=(__doc__ or "").split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="the config of the run")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="service times, in place of a measurement")
    parser.add_argument("--from", dest="run", type=Path, metavar="RUN", help="the run whose log has the episodes")
    parser.add_argument("--write", type=Path, default=PROFILE, metavar="FILE", help="where a measured profile goes")
    parser.add_argument("--yaml", type=Path, metavar="FILE", help="write the settings to this file, too")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings in place of the config's")
    chosen = parser.parse_intermixed_args(arguments)
    try:
        argv = ["--config", str(chosen.config), *chosen.overrides]
        config = load(RunConfig, argv, prog=parser.prog, description="").config
        profile = _profile(config, chosen.profile, chosen.run, chosen.write)
        imagine = config.hosts.imagine
        cluster = one_host(this_machine()) if imagine is None else imagined(imagine)
        home = Path.cwd() if chosen.yaml is None else chosen.yaml.parent
        text, yaml = report(config, profile, cluster, os.path.relpath(chosen.config, home))
    except ConfigError as error:
        parser.error("; ".join(error.problems))
    if chosen.yaml is not None:
        chosen.yaml.write_text(yaml + "\n")
    sys.stdout.write(f"{text}\n\n{yaml}\n")
    return 0


def _profile(config: RunConfig, file: Path | None, run: Path | None, into: Path) -> Profile:
    if file is not None and run is not None:
        raise ConfigError(["--from: has no effect beside --profile, whose episodes are used"])
    if file is not None:
        return read_profile(file)
    if config.hosts.imagine is not None or config.hosts.job != "local":
        where = "hosts.imagine" if config.hosts.imagine is not None else f"hosts.job={config.hosts.job}"
        raise ConfigError([f"{where}: the measurement runs on this machine; give a profile by --profile"])
    from goaly.plan.measure import measured  # imports vLLM and torchtitan

    episodes = None if run is None else profile_of_run(run).episodes
    profile = asyncio.run(measured(config, lambda line: print(line, file=sys.stderr), episodes))
    write_profile(into, profile)
    sys.stderr.write(f"wrote {into}\n")
    return profile


if __name__ == "__main__":
    sys.exit(main())
