"""The critic's engine: the policy's model with a value head, its own optimizer, and a few steps on each batch.

Invariants
    VE-1  The value of a trained token is that of the state before it is written: of the hidden state that predicts it.
    VE-2  The steps on a batch are those of the policy's parts of it, each with the gradient of the mean loss over its
          trained tokens: the same whatever the packing, the microbatches and the ranks.
"""

import dataclasses

import torch
from tensordict import TensorDict

from goaly.losses.value import ValueLoss, explained
from goaly.models.settings import ModelSettings
from goaly.train.engine import ModelEngine
from goaly.train.measured import Measured, together
from goaly.train.microbatch import Microbatch, split_rows
from goaly.train.parallel import Head
from goaly.train.settings import CriticSettings, TrainerSettings
from goaly.trajectory import PackedRows


class ValueEngine(ModelEngine):
    """A model that says what it expects before each trained token."""

    def __init__(self, model: ModelSettings, critic: CriticSettings, trainer: TrainerSettings):
        """Computes as the trainer does, in microbatches of its size."""
        if critic.path is not None:
            model = dataclasses.replace(model, path=critic.path)
        super().__init__(model, critic.engine_settings(trainer))
        self._epochs = critic.epochs
        self._loss = ValueLoss(critic.value_clip)

    def values(self, rows: TensorDict) -> torch.Tensor:
        """Values `[R, L]` f32 of the trained tokens; 0 at all others."""
        return self._column(rows)

    def train_steps(self, packed: PackedRows) -> dict[str, float]:
        """An optimizer step for each part of this rank's share of a batch, `epochs` times; the global batch's metrics.

        The rows hold `values`, which were computed before the first step, and `returns`.
        """
        parts = packed.split() * self._epochs
        steps = [self._step(part, last=number == len(parts)) for number, part in enumerate(parts, 1)]
        return explained(together(steps).metrics)

    def _step(self, part: PackedRows, *, last: bool) -> Measured:
        microbatches = split_rows(part.rows, self._settings.microbatch_rows)
        found = self._accumulate(microbatches, self._loss, part.batch_trained_tokens)  # VE-2
        found.means |= self.optimizer_step(last=last)
        return found

    def _head(self) -> Head:
        from goaly.train.value_head import VALUES

        return VALUES

    def _apply_head(self, hidden_1TD: torch.Tensor, batch: Microbatch) -> tuple[torch.Tensor, ...]:
        return (self._model.lm_head(hidden_1TD, batch.predicting_P),)  # VE-1

    @property
    def _what(self) -> str:
        return "critic"
