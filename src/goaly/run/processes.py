"""Which processes a run has: one list, for those who start them and for those who only plan them."""

from collections.abc import Iterator
from dataclasses import dataclass

from goaly.run.config import RunConfig
from goaly.train.settings import CriticSettings, ReferenceSettings, TrainerSettings

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
    group: int = 1
    """Ranks of a tensor-parallel group, which follow each other."""


def processes(config: RunConfig) -> Iterator[Processes]:
    """All that the run starts with, those that take the longest to start first."""
    generator, trainer, reference, critic = config.generator, config.trainer, config.reference, config.critic
    for replica in range(generator.replicas):
        tp, threads = generator.tp, generator.threads
        yield Processes(name=f"generator-{replica}", role="generator", count=tp, threads=threads, group=tp)
    yield _ranks("trainer", trainer)
    if config.uses_reference:
        yield _ranks("reference", reference)
    if critic is not None:
        yield _ranks("critic", critic)
    yield Processes(name="hub", role="hub")
    for worker in range(config.rollout.workers):
        yield Processes(name=f"rollout-{worker}", role="rollout")


def _ranks(role: str, settings: TrainerSettings | ReferenceSettings | CriticSettings) -> Processes:
    return Processes(name=role, role=role, count=settings.ranks, threads=settings.threads, group=settings.tp)
