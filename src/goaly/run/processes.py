"""Which processes a run has: one list, for those who start them and for those who only plan them."""

from collections.abc import Iterator
from dataclasses import dataclass

from goaly.run.config import RunConfig

IMPORTS = {
    "hub": ("goaly.weights.store", "goaly.backlog.queue", "goaly.reward.pool"),
    "trainer": ("goaly.train.trainer", "goaly.train.rank", "goaly.train.parallel", "goaly.losses.objective"),
    "reference": ("goaly.train.reference", "goaly.train.parallel"),
    "critic": ("goaly.train.critic", "goaly.train.value", "goaly.train.parallel"),
    "generator": ("goaly.generate.actor", "goaly.generate.engine", "goaly.weights.subscriber"),
    "rollout": ("goaly.rollout.worker",),
}
"""What the actors of a role will import: their processes begin with it, and need not wait to be asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """Processes of one kind, spawned together."""

    name: str
    role: str
    count: int = 1
    threads: int = 1


def processes(config: RunConfig) -> Iterator[Processes]:
    """All that the run starts with, those that take the longest to start first."""
    generator, trainer, reference, critic = config.generator, config.trainer, config.reference, config.critic
    for replica in range(generator.replicas):
        yield Processes(name=f"generator-{replica}", role="generator", count=generator.tp, threads=generator.threads)
    yield Processes(name="trainer", role="trainer", count=trainer.ranks, threads=trainer.threads)
    if config.uses_reference:
        yield Processes(name="reference", role="reference", count=reference.ranks, threads=reference.threads)
    if critic is not None:
        yield Processes(name="critic", role="critic", count=critic.ranks, threads=critic.threads)
    yield Processes(name="hub", role="hub")
    for worker in range(config.rollout.workers):
        yield Processes(name=f"rollout-{worker}", role="rollout")
