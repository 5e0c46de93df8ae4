"""Layers with adapters (LoRA) for `model.numerics=bitwise`: a token gets the same bits, whatever is computed beside it.

Shape suffixes: R rows routed to experts, grouped by expert, D model dim, F hidden features, S slices of the hidden
features that this rank has.

Invariants
    LB-1  A slice of a layer's output is the slice's product with the weight plus scale times its product with both
          adapters, each an exact product (BW-1) rounded to the model's type, as are the scaled one and the sum. The
          output is the sum of the slices, as without adapters (BW-2, BN-2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from goaly.models.bitwise import linear, pack, packed_product, silu
from goaly.models.bitwise_networks import by_expert
from goaly.models.lora import A, B, LoraExperts, LoraLinear, own_part
from goaly.models.settings import SLICES

Factor = Any
"""A matrix, or the same in the order of vLLM's kernel."""


class BitwiseLoraLinear(LoraLinear):
    """A linear layer with adapters whose rows do not depend on each other's number."""

    @dataclass(kw_only=True, slots=True)
    class Config(LoraLinear.Config):
        """The layer's, and the parts in which its input features are summed (BW-2)."""

        slices: int = 1

    def __init__(self, config: Config):
        super().__init__(config)
        self._slices = config.slices
        self._packed: tuple[Sequence[Factor], Sequence[Factor], Factor] | None = None
        """The slices of the weight and of A, and B."""

    def pack(self) -> None:
        """Copy the matrices into the order of vLLM's kernel, for a sampler on one rank; again whenever they change."""
        weight, a, b = (getattr(self, f"weight{which}") for which in ("", A, B))
        if tuple(weight.shape) != (self.out_features, self.in_features) or weight.is_cuda:
            return
        weights = pack(weight.detach(), self._slices) if self._packed is None else self._packed[0]  # it never changes
        of_a, of_b = pack(a.detach(), self._slices), pack(b.detach(), 1)
        if weights is not None and of_a is not None and of_b is not None:
            self._packed = weights, of_a, of_b[0]

    def _output(self, x: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        dtype, slices = weight.dtype, self._slices * weight.shape[1] // self.in_features

        def times(rows: torch.Tensor, factor: Factor) -> torch.Tensor:
            if isinstance(factor, torch.Tensor):
                return linear(rows, factor, 1)
            return packed_product(rows, (factor,), dtype)

        weights, of_a, of_b = self._packed or (weight.chunk(slices, 1), a.chunk(slices, 1), b)
        parts = zip(x.chunk(slices, -1), weights, of_a, strict=True)
        sums = [times(part, w) + times(times(part, thin), of_b) * self._scale for part, w, thin in parts]
        return reduce(torch.add, sums)  # LB-1


class BitwiseLoraExperts(LoraExperts):
    """Gives each row its expert's output of each slice of the hidden features: rows `[R, S * D]`."""

    @dataclass(kw_only=True, slots=True)
    class Config(LoraExperts.Config):
        """The experts', with their adapters."""

    def __init__(self, config: Config):
        super().__init__(config)
        self._hidden_dim = config.hidden_dim

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """The slices' outputs of each row, side by side (LB-1)."""
        rows = num_tokens_per_expert_E.tolist()
        hidden_RF = silu(self._with_adapters(x_RD, "w1_EFD", rows, 1)) * self._with_adapters(x_RD, "w3_EFD", rows, 1)
        slices = SLICES * hidden_RF.shape[1] // self._hidden_dim
        return self._with_adapters(hidden_RF, "w2_EDF", rows, slices)

    def _with_adapters(self, x: torch.Tensor, name: str, rows: Sequence[int], slices: int) -> torch.Tensor:
        weight, a, b = (own_part(getattr(self, name + which)) for which in ("", A, B))
        thin = by_expert(x, a, rows, slices)
        change = torch.cat([by_expert(part, b, rows) for part in thin.chunk(slices, 1)], 1)
        return by_expert(x, weight, rows, slices) + change * self._scale
