"""One number for a hidden state, where the model's output projection stands.

Shape suffixes: T tokens of a microbatch, P predicted tokens, D model width.

Invariants
    VH-1  Begins at 0 for every state, whatever the trunk: what a critic says first is what it has learned.
    VH-2  All tensor-parallel ranks hold the whole weight and compute the same.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.sharding import ShardingConfig

from goaly.train.parallel import Head


class ValueHead(Linear):
    """A linear layer of one output without bias, in float32 whatever the model computes in."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """A linear layer's."""

    @classmethod
    def in_place_of(cls, config: Linear.Config, norm_sharding: ShardingConfig | None) -> "ValueHead.Config":
        """The config of a head on the same hidden states; its weight is laid out as that of the norm before it."""
        return cls.Config(
            in_features=config.in_features,
            out_features=1,
            param_init={"weight": torch.nn.init.zeros_},  # VH-1
            sharding_config=norm_sharding and ShardingConfig(state_shardings=norm_sharding.state_shardings),
        )

    def forward(self, input: torch.Tensor, states_P: torch.Tensor) -> torch.Tensor:
        """The values `[P]`, f32, of the hidden states numbered in `states_P`."""
        weight = self.weight
        if isinstance(weight, DTensor):
            weight = weight.to_local()  # VH-2
        if isinstance(input, DTensor):
            input = input.to_local()
        hidden_PD = input.reshape(-1, input.shape[-1]).index_select(0, states_P)
        return torch.nn.functional.linear(hidden_PD.float(), weight.float()).squeeze(1)


def _install(decoder: Any) -> None:
    decoder.lm_head = ValueHead.in_place_of(decoder.lm_head, decoder.norm.sharding_config)
    decoder.enable_weight_tying = False  # the embedding stays what it is


VALUES = Head(install=_install, in_folder=False)
