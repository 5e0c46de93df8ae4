"""The settings of a supervised run."""

from dataclasses import field

from goaly.config.settings import NonNegativeInt, PositiveInt, settings
from goaly.models.settings import ModelSettings
from goaly.models.tiny import TinyModel
from goaly.prompts.settings import ChatSettings, SupervisedSettings
from goaly.telemetry.settings import TelemetrySettings
from goaly.train.settings import TrainerSettings


@settings
class SftConfig:
    """A supervised run."""

    output: str
    """Hugging Face folder to write. `<output>.run` beside it holds the run's config, metrics and checkpoint."""
    steps: PositiveInt
    """Optimizer steps."""
    model: ModelSettings | None = None
    """Model to start from; null if `tiny` is given."""
    tiny: TinyModel | None = None
    """Start from a new tiny Qwen3 with random weights, of this size."""
    data: SupervisedSettings
    """Documents to train on."""
    chat: ChatSettings = field(default_factory=ChatSettings)
    """Chat template that turns chats into text."""
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    """Optimizer and parallelism. With more than one rank, start the app with torchrun."""
    checkpoint_every: NonNegativeInt = 0
    """Steps between checkpoints, from which an interrupted run resumes; 0 writes none."""
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    """Records and progress display of the run; a supervised run has no trace and no rollout journal."""

    def problems(self, prefix: str) -> list[str]:
        """One line for each combination of settings that cannot work."""
        found = []
        if (self.model is None) == (self.tiny is None):
            found.append(f"{prefix}model: set it, or {prefix}tiny, and not both")
        if self.data.rows_per_step % self.trainer.fsdp:
            found.append(
                f"{prefix}data.rows_per_step={self.data.rows_per_step}: must be a multiple of "
                f"{prefix}trainer.fsdp={self.trainer.fsdp}"
            )
        if self.trainer.minibatches != 1:
            found.append(
                f"{prefix}trainer.minibatches={self.trainer.minibatches}: must be 1 in a supervised run; "
                f"{prefix}data.rows_per_step is the size of a step"
            )
        found += self.trainer.device_problems(f"{prefix}trainer.")
        if self.checkpoint_every and self.trainer.ranks > 1:
            found.append(f"{prefix}checkpoint_every={self.checkpoint_every}: must be 0 with several ranks")
        if self.tiny is not None and self.data.row_length > self.tiny.max_context:
            found.append(
                f"{prefix}data.row_length={self.data.row_length}: must be at most "
                f"{prefix}tiny.max_context={self.tiny.max_context}"
            )
        if self.model is not None and not self.model.problems(""):
            from goaly.prompts.tokenizer import chat_problems  # imports jinja, which `--help` does not need

            found += chat_problems(self.chat, self.model.path, f"{prefix}chat.")
        return found
