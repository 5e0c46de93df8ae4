"""The critic's value head, which takes the place of the output projection of the policy's model, and its training.

Shape suffixes: P predicted tokens, D model width.

The value of a token is computed from the hidden state that predicts it: the state before it is written. The critic
makes its steps on the same minibatches as the policy. Each step has the gradient of the mean loss over the minibatch's
trained tokens, on any packing, microbatches and ranks. A new head gives 0 for every state, whatever the trunk. All
tensor-parallel ranks hold the whole head and compute the same values.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.sharding import ShardingConfig

from goaly.losses.value_loss import ValueLoss, explained
from goaly.numerics.layer_replacement import of_rank
from goaly.train.model_engine import ModelEngine
from goaly.train.parallel_model import Head
from goaly.train.settings import CriticSettings
from goaly.trajectory import PackedRows


class ValueHead(Linear):
    """A linear layer of one output without bias, in float32 whatever the model computes in."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """A linear layer's."""

    def forward(self, input: Tensor, predicting_P: Tensor, *_: Any) -> tuple[Tensor]:
        """The values `[P]`, f32, of the hidden states numbered in `predicting_P`."""
        hidden_PD = of_rank(input).reshape(-1, input.shape[-1]).index_select(0, predicting_P)
        return (torch.nn.functional.linear(hidden_PD.float(), of_rank(self.weight).float()).squeeze(1),)


def _install(decoder: Any) -> None:
    norm_sharding = decoder.norm.sharding_config  # the head is sharded like the norm before it
    decoder.lm_head = ValueHead.Config(
        in_features=decoder.lm_head.in_features,
        out_features=1,
        param_init={"weight": torch.nn.init.zeros_},
        sharding_config=norm_sharding and ShardingConfig(state_shardings=norm_sharding.state_shardings),
    )
    decoder.enable_weight_tying = False  # so the embedding keeps its weight


VALUES = Head(of="critic", install=_install, in_folder=False)


def train_values(engine: ModelEngine, packed: PackedRows, critic: CriticSettings) -> dict[str, float]:
    """Make `epochs` passes over this rank's rows, with a step for each minibatch; the metrics of the global batch.

    The rows hold `values`, computed before the first step, and `returns`.
    """
    return explained(engine.train_step(packed, ValueLoss(critic.value_clip), epochs=critic.epochs))
