"""The settings of a supervised run."""

from dataclasses import dataclass, field

from goaly.models.settings import ModelSettings
from goaly.models.tiny import TinyModel
from goaly.prompts.settings import ChatSettings, SupervisedSettings
from goaly.telemetry.settings import TelemetrySettings
from goaly.train.settings import TrainerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """A supervised run."""

    output: str
    """The Hugging Face folder to write. Beside it, `<output>.run` holds the run's config, metrics and checkpoint."""
    steps: int
    """Optimizer steps."""
    model: ModelSettings | None = None
    """The model to start from; null where `tiny` is given."""
    tiny: TinyModel | None = None
    """Start from a new tiny Qwen3 with random weights, which goaly makes itself."""
    data: SupervisedSettings
    """What is imitated."""
    chat: ChatSettings = field(default_factory=ChatSettings)
    """How chats become text."""
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    """How it is trained. With more than one rank, start the app through torchrun."""
    checkpoint_every: int = 0
    """Steps between checkpoints, from which an interrupted run goes on; 0 writes none."""
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    """What the run records and shows; a supervised run has no trace and no rollout journal."""

    def problems(self, prefix: str) -> list[str]:
        """What only the combination of settings can get wrong, a line each."""
        found = []
        if self.steps < 1:
            found.append(f"{prefix}steps={self.steps}: must be at least 1")
        if (self.model is None) == (self.tiny is None):
            found.append(f"{prefix}model: set it, or {prefix}tiny, and not both")
        if self.data.rows_per_step % self.trainer.fsdp:
            found.append(
                f"{prefix}data.rows_per_step={self.data.rows_per_step}: must be a multiple of "
                f"{prefix}trainer.fsdp={self.trainer.fsdp}"
            )
        if self.trainer.minibatches != 1:
            found.append(
                f"{prefix}trainer.minibatches={self.trainer.minibatches}: must be 1 in a supervised run, where "
                f"{prefix}data.rows_per_step says how large a step is"
            )
        found += self.trainer.device_problems(f"{prefix}trainer.")
        if self.checkpoint_every < 0:
            found.append(f"{prefix}checkpoint_every={self.checkpoint_every}: must be at least 0")
        if self.checkpoint_every and self.trainer.ranks > 1:
            found.append(f"{prefix}checkpoint_every={self.checkpoint_every}: must be 0 where there are several ranks")
        if self.tiny is not None and self.data.row_length > self.tiny.max_context:
            found.append(
                f"{prefix}data.row_length={self.data.row_length}: must be at most "
                f"{prefix}tiny.max_context={self.tiny.max_context}"
            )
        if self.model is not None and not self.model.problems(""):
            from goaly.prompts.tokenizer import chat_problems  # imports jinja, which `--help` can do without

            found += chat_problems(self.chat, self.model.path, f"{prefix}chat.")
        return found
