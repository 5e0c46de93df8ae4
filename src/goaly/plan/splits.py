"""The splits of a cluster between a trainer and generators, and the one that a profile makes the fastest.

A split is a config of the run: `trainer.fsdp` and `generator.replicas` vary, and all other axes stay. Splits that the
placement refuses are left out. The balance of both sides orders them, and the simulator decides among the best.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import fmean

import numpy as np

from goaly.base.config.check import all_problems
from goaly.base.errors import ConfigError
from goaly.plan.cluster import Cluster
from goaly.plan.placement import place, processes
from goaly.plan.run_config import RunConfig
from goaly.simulator.episode_draws import EpisodeDraws
from goaly.simulator.profile import Profile
from goaly.simulator.simulated_run import SimulatedRun
from goaly.simulator.simulation import Simulation
from goaly.simulator.steady_part import SteadyPart

SIMULATED = 6
"""Splits that are simulated, the best by their balance."""
STEADY_STEPS = 24
AS_FAST = 1.03
"""A setting that is cheaper in staleness or memory is taken if a step takes at most so many times as long."""
STALENESS = (1, 2, 4, 8)
WINDOWS = (1, 2, 4, 8)
"""Windows to try, in steps."""
CACHE_SHARE = 0.7
"""Share of the key-value cache that running requests may need on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The work of one step, from the episodes of a profile."""

    tokens: float
    """Tokens that are trained, prompts included."""
    answer_tokens: float
    context: float
    """Tokens of an episode when half of its answers are written."""

    @classmethod
    def of(cls, profile: Profile, config: RunConfig) -> "Shape":
        """The mean over many drawn groups."""
        size = config.backlog.group_size
        draws = EpisodeDraws(profile.episodes, size, np.random.default_rng(0))
        drawn = [one for _ in range(max(4, 2000 // size)) for one in draws.group()]
        tokens, answers = fmean(one.tokens for one in drawn), fmean(one.answer_tokens for one in drawn)
        episodes = config.backlog.groups_per_step * size
        return cls(tokens=episodes * tokens, answer_tokens=episodes * answers, context=tokens - answers / 2)


def splits(config: RunConfig, cluster: Cluster) -> list[RunConfig]:
    """The config with each split of the cluster, the fewest replicas first. ConfigError if nothing fits."""
    config = _free(config)
    total = _places(config, cluster)
    unit = config.trainer.ranks // config.trainer.fsdp
    others = sum(
        each.count
        for each in processes(config)
        if each.role in ("reference", "critic") and config.hosts.of(each.role).share_with is None
    )
    found: dict[int, RunConfig] = {}
    problems: list[str] = []
    for fsdp in range(1, total // unit + 1):
        replicas = (total - others - fsdp * unit) // config.generator.tp
        if replicas < 1:
            break
        try:
            found[replicas] = _placed(config, cluster, fsdp, replicas)  # of equal ones the largest trainer
        except ConfigError as error:
            problems = problems or error.problems
    if not found:
        least = f"{unit} ranks of the trainer, {others} of other models and {config.generator.tp} of a replica"
        raise ConfigError(problems or [f"hosts: {total} places are too few for {least}"])
    return [found[replicas] for replicas in sorted(found)]


def _free(config: RunConfig) -> RunConfig:
    """The config without the sizes that its own split has."""
    hosts = config.hosts
    trainer, generator = (replace(one, hosts=None, gpus=None) for one in (hosts.trainer, hosts.generator))
    return replace(config, hosts=replace(hosts, trainer=trainer, generator=generator))


def _places(config: RunConfig, cluster: Cluster) -> int:
    """GPUs; on hosts without GPUs cores, in units of the trainer's threads."""
    gpus = sum(len(host.gpus) for host in cluster.hosts)
    cores = sum(len(cores) for host in cluster.hosts for cores in host.nodes.values())
    return gpus or max(2, cores // max(config.trainer.threads, config.generator.threads))


def _placed(config: RunConfig, cluster: Cluster, fsdp: int, replicas: int) -> RunConfig:
    trainer, generator = replace(config.trainer, fsdp=fsdp), replace(config.generator, replicas=replicas)
    changed = replace(config, trainer=trainer, generator=generator)
    if any(host.gpus for host in cluster.hosts):
        place(list(processes(changed)), changed.hosts, cluster)
    if problems := [line for line in all_problems(changed) if "trainer." in line or "generator." in line]:
        raise ConfigError(problems)
    return changed


def balance(config: RunConfig, profile: Profile, shape: Shape) -> float:
    """Seconds of a step in which both sides overlap wholly."""
    training, engine = profile.training_at(config.trainer), profile.engine_at(config.generator)
    train = training.fixed_seconds + training.seconds_per_token * shape.tokens / config.trainer.fsdp
    running = max(1, round(min(config.generator.most_running, _under_way(config) / config.generator.replicas)))
    rate = config.generator.replicas * running / engine.step_seconds(running)
    return max(train + profile.updates.stage_seconds, shape.answer_tokens / rate)


def _under_way(config: RunConfig) -> int:
    """Most episodes that the schedule admits."""
    backlog = config.backlog
    return (backlog.max_staleness + 1) * backlog.groups_per_step * backlog.group_size


def steady(config: RunConfig, profile: Profile, seed: int = 0) -> SteadyPart:
    """One simulation of this config."""
    run = simulated(config)
    return SteadyPart.of(run, Simulation(profile, run, seed).run())


def simulated(config: RunConfig) -> SimulatedRun:
    """The run, with as many steps as its steady part needs."""
    return SimulatedRun.of(config).of_steps(6 + config.backlog.max_staleness + STEADY_STEPS)


def seconds_of(config: RunConfig, profile: Profile, shape: Shape) -> float:
    """Simulated seconds of a step with the mean number of tokens: those of few steps would vary by their lengths."""
    return shape.tokens / steady(config, profile).tokens_per_second


def fastest(options: Sequence[RunConfig], profile: Profile) -> tuple[RunConfig, float]:
    """The split whose step is the shortest, with its seconds; of equal ones that with the fewest replicas."""
    shape = Shape.of(profile, options[0])
    ordered = sorted(options, key=lambda one: balance(one, profile, shape))[:SIMULATED]
    timed = [(seconds_of(one, profile, shape), one.generator.replicas, one) for one in ordered]
    seconds, _, best = min(timed, key=lambda one: one[:2])
    return best, seconds


def ahead(config: RunConfig, profile: Profile) -> RunConfig:
    """The config with every limit as high as it may become, so that the split alone decides."""
    backlog, generator = config.backlog, config.generator
    most = _most_running(config, profile)
    window = max(backlog.window, WINDOWS[-1] * backlog.groups_per_step) if backlog.order == "windowed" else 8
    return replace(
        config,
        backlog=replace(backlog, max_staleness=max(STALENESS), window=window),
        generator=replace(generator, max_running=most, max_step_tokens=max(most, generator.max_step_tokens)),
        rollout=replace(config.rollout, concurrency=config.rollout.most_episodes),
    )


def _most_running(config: RunConfig, profile: Profile) -> int:
    """The requests that the cache of a replica holds on average; no more than were measured."""
    engine, shape = profile.engine_at(config.generator), Shape.of(profile, config)
    most = max(engine.decode[-1].running, 1)
    if engine.kv_tokens_per_gib is not None:
        tokens = CACHE_SHARE * engine.kv_tokens_per_gib * config.generator.kv_cache_gib
        most = min(most, int(tokens / max(1.0, shape.context)))
    return max(1, most)


def narrowed(config: RunConfig, profile: Profile) -> RunConfig:
    """The config with the smallest staleness bound, window and number of running requests that are as fast."""
    shape = Shape.of(profile, config)
    limit = AS_FAST * seconds_of(config, profile, shape)
    for choose in (_with_staleness, _with_window, _with_running):
        for option in choose(config):
            if seconds_of(option, profile, shape) <= limit:
                config = option
                break
    return config


def _with_staleness(config: RunConfig) -> Iterator[RunConfig]:
    for bound in STALENESS:
        yield replace(config, backlog=replace(config.backlog, max_staleness=bound))


def _with_window(config: RunConfig) -> Iterator[RunConfig]:
    backlog = config.backlog
    if backlog.order == "windowed":
        for steps in WINDOWS:
            yield replace(config, backlog=replace(backlog, window=steps * backlog.groups_per_step))


def _with_running(config: RunConfig) -> Iterator[RunConfig]:
    running, most = 8, config.generator.most_running
    while running < most:
        yield replace(config, generator=replace(config.generator, max_running=running))
        running = ceil(1.5 * running)


def neighbours(options: Sequence[RunConfig], chosen: RunConfig) -> list[RunConfig]:
    """The splits with a replica less and more than this one, and its other settings."""
    replicas = [one.generator.replicas for one in options]
    at = replicas.index(chosen.generator.replicas)
    return [like(chosen, options[other]) for other in (at - 1, at + 1) if 0 <= other < len(options)]


def like(chosen: RunConfig, split: RunConfig) -> RunConfig:
    """The settings of the first with the split of the second."""
    trainer = replace(chosen.trainer, fsdp=split.trainer.fsdp)
    return replace(chosen, trainer=trainer, generator=replace(chosen.generator, replicas=split.generator.replicas))


def longer(config: RunConfig, answers: float) -> RunConfig:
    """The config with room for answers so many times as long."""
    backlog = config.backlog
    return replace(config, backlog=replace(backlog, row_length=ceil(max(1.0, answers) * backlog.row_length)))
