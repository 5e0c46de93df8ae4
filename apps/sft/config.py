"""The settings of a supervised run."""

from collections.abc import Iterator
from dataclasses import field
from typing import TYPE_CHECKING

from goaly.base.config.settings import NonNegativeInt, PositiveInt, Section, Settings
from goaly.base.errors import ConfigError
from goaly.base.telemetry.settings import TelemetrySettings
from goaly.models.settings import ModelSettings
from goaly.models.tiny_model import TinyModel, model_config
from goaly.prompts.settings import ChatSettings, SupervisedSettings
from goaly.train.settings import TrainerSettings

if TYPE_CHECKING:
    from goaly.models.architecture import Architecture


class SftConfig(Settings):
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
    """Records and progress display of the run; a supervised run has no trace."""

    def _problems(self, at: Section) -> Iterator[str]:
        if (self.model is None) == (self.tiny is None):
            yield f"{at}model: set it, or {at}tiny, and not both"
        if self.data.rows_per_step % self.trainer.fsdp:
            yield f"{at.data.rows_per_step}: must be a multiple of {at.trainer.fsdp}"
        if self.trainer.minibatches != 1:
            size = f"{at}data.rows_per_step is the size of a step"
            yield f"{at.trainer.minibatches}: must be 1 in a supervised run; {size}"
        yield from self.trainer.device_problems(f"{at}trainer.")
        if self.checkpoint_every and self.trainer.ranks > 1:
            yield f"{at.checkpoint_every}: must be 0 with several ranks"
        if self.tiny is not None and self.data.row_length > self.tiny.max_context:
            yield f"{at.data.row_length}: must be at most {at.tiny.max_context}"
        if self.tiny is not None and not self.tiny.problems(""):
            from goaly.models.families import architecture  # imports torch, which `--help` does not need

            try:
                yield from self._shape_problems(at, architecture(model_config(self.tiny), where="tiny"), "tiny model")
            except ConfigError as error:
                yield from error.problems
        if self.model is not None and not self.model.problems(""):
            from goaly.models.catalog import shape_of
            from goaly.models.weight_files import weight_problems
            from goaly.prompts.tokenizer import chat_problems, tokenizer_problems  # imports jinja

            path = self.model.path
            try:
                shape = shape_of(self.model, at.model.path)
            except ConfigError as error:
                yield from error.problems
            else:
                yield from self._shape_problems(at, shape, "model")
                yield from weight_problems(path, shape, at.model.path)
                yield from tokenizer_problems(path, shape.vocab_size, self.chat, at.model.path)
            yield from chat_problems(self.chat, path, f"{at}chat.")
        yield from at.chat.idle("supervised training reads no answers", "tool_parser", "reasoning_parser")

    def _shape_problems(self, at: Section, shape: "Architecture", whose: str) -> Iterator[str]:
        trainer = Section(self.trainer, f"{at}trainer.")
        yield from self.trainer.shape_problems(trainer, shape, whose)
        yield from self.trainer.balance_problems(trainer, shape)
        if self.trainer.lora is not None:
            yield from self.trainer.lora.model_problems(trainer.lora, shape)
