"""The critic's engine: the policy's model with a value head, its own optimizer, and a few steps on each batch.

Invariants
    VE-1  The value of a trained token is that of the state before it is written: of the hidden state that predicts it.
    VE-2  The gradient of a step is that of the mean loss over its trained tokens, whatever the packing, the
          microbatches and the ranks.
"""

import dataclasses
from statistics import fmean

import torch
from tensordict import TensorDict

from goaly.losses.value import ValueLoss, explained
from goaly.models.settings import ModelSettings
from goaly.train.engine import ModelEngine
from goaly.train.microbatch import Microbatch, split_rows
from goaly.train.parallel import Head
from goaly.train.settings import CriticSettings, TrainerSettings


class ValueEngine(ModelEngine):
    """A model that says what it expects before each trained token."""

    def __init__(self, model: ModelSettings, critic: CriticSettings, trainer: TrainerSettings):
        """Computes as the trainer does, in microbatches of its size."""
        if critic.path is not None:
            model = dataclasses.replace(model, path=critic.path)
        super().__init__(model, critic.engine_settings(trainer))
        self._critic = critic
        self._loss = ValueLoss(critic.value_clip)

    def values(self, rows: TensorDict) -> torch.Tensor:
        """Values `[R, L]` f32 of the trained tokens; 0 at all others."""
        return self._column(rows)

    def train_steps(self, rows: TensorDict) -> dict[str, float]:
        """The batch's optimizer steps, on this rank's rows; the metrics of all ranks' rows, averaged over the steps.

        The rows hold `values`, which were computed before the first step, and `returns`. All ranks have as many rows.
        """
        minibatches = min(self._critic.minibatches, len(rows))
        steps = []
        for _ in range(self._critic.epochs):
            for first in range(minibatches):
                steps.append(self._step(rows[first::minibatches]))  # rows are packed by length: each gets some of all
        return explained({name: fmean(step[name] for step in steps) for name in steps[0]})

    def _step(self, rows: TensorDict) -> dict[str, float]:
        microbatches = split_rows(rows, self._settings.microbatch_rows)
        return self.forward_backward(microbatches, self._loss, 1) | self.optimizer_step()  # VE-2: the loss counts

    def _head(self) -> Head:
        from goaly.train.value_head import VALUES

        return VALUES

    def _apply_head(self, hidden_1TD: torch.Tensor, batch: Microbatch) -> tuple[torch.Tensor, ...]:
        return (self._model.lm_head(hidden_1TD, batch.predicting_P),)  # VE-1

    @property
    def _what(self) -> str:
        return "critic"
