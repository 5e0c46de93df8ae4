"""gpt-oss's experts for `model.numerics=bitwise`: a token gets the same bits, whatever is computed beside it.

Gradients are those of the ordinary experts.

Shape suffixes: R rows routed to experts, grouped by expert, D model dim, E experts, e those of this rank, F hidden
features, G = 2 * F of gate and up, which alternate, S slices of the hidden features that this rank has.

Invariants
    BG-1  A slice of an expert's output is the slice's exact product (BW-1) with the clamped activation, plus an equal
          part of the bias. So the sum over slices has the whole bias, whichever ranks have them (BE-2).
"""

from dataclasses import dataclass

import torch
from torchtitan.models.gpt_oss.moe import ScaleBiasForward

from goaly.models.bitwise import sigmoid
from goaly.models.bitwise_networks import by_expert
from goaly.models.experts import of_rank
from goaly.models.gpt_oss import SWIGLU_ALPHA
from goaly.models.gpt_oss_layers import ClampedExperts
from goaly.models.settings import SLICES


class BitwiseClampedExperts(ClampedExperts):
    """Gives each row its expert's output of each slice of the hidden features: rows `[R, S * D]`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ClampedExperts.Config):
        """The experts'."""

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """The slices' outputs of each row, side by side (BG-1)."""
        rows = num_tokens_per_expert_E.tolist()

        def of_rows(bias_eG: torch.Tensor) -> torch.Tensor:
            return bias_eG.repeat_interleave(num_tokens_per_expert_E, dim=0, output_size=len(x_RD))

        both_RG = by_expert(x_RD, of_rank(self.mlp1_weight_EGD), rows) + of_rows(of_rank(self.mlp1_bias_EG))
        slices = SLICES * both_RG.shape[1] // self._rows_of_both
        out_RG = by_expert(clamped_swiglu(both_RG, self.swiglu_limit), of_rank(self.mlp2_weight_EDF), rows, slices)
        ranks = SLICES // slices  # which divide each expert, and each have the whole gradient of the bias
        part_eD = ScaleBiasForward.apply(of_rank(self.mlp2_bias_ED) / slices, ranks, out_RG.dtype)
        return out_RG + of_rows(part_eD).repeat(1, slices)


def clamped_swiglu(both_RG: torch.Tensor, limit: float) -> torch.Tensor:
    """The activation of each pair of gate and up (BW-3)."""
    gate_RF, up_RF = both_RG[:, ::2].clamp(max=limit), both_RG[:, 1::2].clamp(-limit, limit)
    active_RF = gate_RF * sigmoid(SWIGLU_ALPHA * gate_RF)
    return active_RF + active_RF * up_RF
