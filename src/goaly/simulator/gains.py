"""The gains that would make a run faster: the same simulation with one part faster, or one limit higher."""

from dataclasses import replace
from enum import StrEnum

from goaly.simulator.profile import Profile
from goaly.simulator.simulated_run import SimulatedRun
from goaly.simulator.simulation import Simulation, Speeds
from goaly.simulator.steady_part import SteadyPart

FASTER = 1.2


class Lever(StrEnum):
    """A part of a run that may limit it."""

    TRAINER = "trainer"
    """Its steps."""
    GENERATOR = "generator"
    """The rates of the engines."""
    EPISODES = "episodes"
    """Environments, tools and verifiers."""
    UPDATES = "updates"
    """Copies of new weights, and the training loop beside its steps."""
    STALENESS = "staleness bound"
    """`backlog.max_staleness`: how far generation may run ahead."""
    WINDOW = "window"
    """`backlog.window`: how many groups may pass a slow one."""
    CONCURRENCY = "concurrency"
    """`generator.max_running` and `rollout.concurrency`."""

    @property
    def change(self) -> str:
        """The change whose effect its gain is."""
        return f"{self} {'x 2' if self in LIMITS else f'{FASTER:g} times as fast'}"


LIMITS = (Lever.STALENESS, Lever.WINDOW, Lever.CONCURRENCY)


def gains_of(profile: Profile, run: SimulatedRun, seed: int, before: SteadyPart) -> dict[Lever, float]:
    """For each part, the share of a step's seconds that its change saves; `before` has the numbers of this seed."""
    found = {}
    for part in Lever:
        changed, speeds = _changed(part, run)
        after = SteadyPart.of(changed, Simulation(profile, changed, seed, speeds).run())
        found[part] = 1 - after.step_seconds / before.step_seconds
    return found


def _changed(part: Lever, run: SimulatedRun) -> tuple[SimulatedRun, Speeds]:
    if part not in LIMITS:
        return run, Speeds(**{part.value: FASTER})
    backlog, generator = run.backlog, run.generator
    if part is Lever.STALENESS:
        run = replace(run, backlog=replace(backlog, max_staleness=2 * backlog.max_staleness or 1))
    elif part is Lever.WINDOW:
        if backlog.order == "windowed":
            run = replace(run, backlog=replace(backlog, window=2 * backlog.window))
    else:
        running = 2 * generator.most_running
        generator = replace(generator, max_running=running, max_step_tokens=max(running, generator.max_step_tokens))
        rollout = replace(run.rollout, concurrency=2 * run.rollout.most_episodes)
        run = replace(run, generator=generator, rollout=rollout)
    return run, Speeds()
