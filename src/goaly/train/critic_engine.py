"""The critic's engine: the policy's model with a value head in place of the output projection, and its own optimizer.

Shape suffixes: T tokens of a microbatch, P predicted tokens, D model width.

The value of a token is computed from the hidden state that predicts it: the state before it is written. The critic
makes its steps on the same minibatches as the policy. Each step has the gradient of the mean loss over the minibatch's
trained tokens, on any packing, microbatches and ranks. A new head gives 0 for every state, whatever the trunk. All
tensor-parallel ranks hold the whole head and compute the same values.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.sharding import ShardingConfig

from goaly.losses.value_loss import ValueLoss, explained
from goaly.models.settings import ModelSettings
from goaly.train.microbatch import Microbatch
from goaly.train.model_engine import ModelEngine
from goaly.train.parallel_model import Head
from goaly.train.settings import CriticSettings, TrainerSettings
from goaly.trajectory import PackedRows, TensorDict


class CriticEngine(ModelEngine):
    """A model that predicts the return at each trained token."""

    _not_finite = "critic {} is {} after {} batches"

    def __init__(self, model: ModelSettings, critic: CriticSettings, trainer: TrainerSettings):
        """Precision, microbatches and checkpointing are the trainer's."""
        if critic.path is not None:
            model = dataclasses.replace(model, path=critic.path)
        super().__init__(model, critic.engine_settings(trainer))
        self._epochs = critic.epochs
        self._loss = ValueLoss(critic.value_clip)

    def values(self, rows: TensorDict) -> torch.Tensor:
        """Values `[R, L]` f32 of the trained tokens; 0 at all others."""
        return self._column(rows)

    def train_steps(self, packed: PackedRows) -> dict[str, float]:
        """`epochs` passes over this rank's rows, with a step for each minibatch; the metrics of the global batch.

        The rows hold `values`, computed before the first step, and `returns`.
        """
        minibatches = packed.split() * self._epochs
        return explained(self._train(minibatches, self._loss, lambda minibatch: minibatch.batch_trained_tokens))

    def _head(self) -> Head:
        return VALUES

    def _apply_head(self, hidden_1TD: torch.Tensor, batch: Microbatch) -> tuple[torch.Tensor, ...]:
        return (self._model.lm_head(hidden_1TD, batch.predicting_P),)


class ValueHead(Linear):
    """A linear layer of one output without bias, in float32 whatever the model computes in."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """A linear layer's."""

    def forward(self, input: torch.Tensor, states_P: torch.Tensor) -> torch.Tensor:
        """The values `[P]`, f32, of the hidden states numbered in `states_P`."""
        weight = self.weight
        if isinstance(weight, DTensor):
            weight = weight.to_local()
        if isinstance(input, DTensor):
            input = input.to_local()
        hidden_PD = input.reshape(-1, input.shape[-1]).index_select(0, states_P)
        return torch.nn.functional.linear(hidden_PD.float(), weight.float()).squeeze(1)


def _install(decoder: Any) -> None:
    norm_sharding = decoder.norm.sharding_config  # the head is sharded like the norm before it
    decoder.lm_head = ValueHead.Config(
        in_features=decoder.lm_head.in_features,
        out_features=1,
        param_init={"weight": torch.nn.init.zeros_},
        sharding_config=norm_sharding and ShardingConfig(state_shardings=norm_sharding.state_shardings),
    )
    decoder.enable_weight_tying = False  # so the embedding keeps its weight


VALUES = Head(install=_install, in_folder=False)
