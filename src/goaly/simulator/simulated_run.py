"""The settings of a run that decide its speed: the sections of a run's config that a forecast reads."""

from dataclasses import dataclass, field, replace
from typing import Protocol

from goaly.backlog.settings import BacklogSettings
from goaly.generate.settings import GeneratorSettings
from goaly.rollout.settings import RolloutSettings
from goaly.train.settings import TrainerSettings


class RunSections(Protocol):
    """A run's config."""

    @property
    def steps(self) -> int: ...
    @property
    def backlog(self) -> BacklogSettings: ...
    @property
    def generator(self) -> GeneratorSettings: ...
    @property
    def rollout(self) -> RolloutSettings: ...
    @property
    def trainer(self) -> TrainerSettings: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """A run as the simulator sees it."""

    steps: int
    backlog: BacklogSettings = field(default_factory=BacklogSettings)
    generator: GeneratorSettings = field(default_factory=GeneratorSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)

    @classmethod
    def of(cls, config: RunSections) -> "SimulatedRun":
        """The run of this config."""
        return cls(
            steps=config.steps,
            backlog=config.backlog,
            generator=config.generator,
            rollout=config.rollout,
            trainer=config.trainer,
        )

    def of_steps(self, most: int) -> "SimulatedRun":
        """The same run with at most so many steps."""
        return replace(self, steps=min(self.steps, most))

    @property
    def gpus(self) -> int:
        """Ranks of the trainer, and processes of all replicas."""
        return self.trainer.ranks + self.generator.replicas * self.generator.tp
