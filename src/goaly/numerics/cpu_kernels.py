"""vLLM's CPU kernels for the linear layers and the experts of a sampler, and with `kernel_layers.py` for all others.

torchtitan's norms and rotations take a fifth of a tiny model's decode step; its experts are a loop of matrix products,
half of a step. vLLM's kernels need one operation each. A linear layer whose weight is in the kernel's order takes half
the time of one whose weight is not. Results differ from torchtitan's in the last bits; `numerics: bitwise` has layers
of its own, which compute the same on both sides. These layers are for float32.

The kernels of experts and linear layers read a copy of the weights in their own order. `pack` makes it anew whenever
they change.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import RoutedExperts
from vllm import _custom_ops as kernels
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from goaly.models.experts import Experts
from goaly.models.titan_config import fields_of
from goaly.numerics.bitwise_networks import INSTRUCTIONS, PACKED, Packed, pack
from goaly.numerics.cpu_layers import packed_weight, replace_linears
from goaly.numerics.kernel_layers import KernelRMSNorm, KernelRoPE


class PackedLinear(Linear):
    """A linear layer by vLLM's kernel, which is oneDNN. Without gradients, on one rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """torchtitan's."""

    def __init__(self, config: Config):
        super().__init__(config)
        self._handler: Any = None

    def pack(self) -> None:
        """Copy the weight into the kernel's order."""
        self._handler = packed_weight(self.weight.detach())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The product with the weight."""
        return kernels.onednn_mm(self._handler, input, self.bias)


class FusedExperts(RoutedExperts):
    """All experts of a layer by vLLM's kernel. Without gradients, on one rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """torchtitan's."""

    def __init__(self, config: Config):
        super().__init__(config)
        self._packed: Packed | None = None

    def pack(self) -> None:
        """Copy the weights into the kernel's order."""
        weights: Any = self.inner_experts
        self._packed = pack(weights.w1_EFD.detach(), weights.w2_EDF.detach(), weights.w3_EFD.detach(), slices=1)

    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        """The weighted sum of each token's experts."""
        assert self._packed is not None, "weights are packed when they are loaded"
        x_TD = x_BLD.flatten(0, 1).contiguous()
        out_TD = torch.empty_like(x_TD)
        scores_TK = topk_scores_BLK.flatten(0, 1).float().contiguous()
        experts_TK = topk_expert_ids_BLK.flatten(0, 1).int().contiguous()
        kernels.cpu_fused_moe(
            out_TD,
            x_TD,
            self._packed.gates_and_ups,
            self._packed.downs,
            None,
            None,
            scores_TK,
            experts_TK,
            MoEActivation.SILU.value,
            INSTRUCTIONS,
        )
        return out_TD.view(x_BLD.shape)


def use_fused_kernels(decoder: Any) -> None:
    """Replace these layers in the config of a torchtitan decoder."""
    if get_tensor_model_parallel_world_size() == 1:
        replace_linears(decoder, PackedLinear)
    decoder.norm = _as(KernelRMSNorm, decoder.norm)
    for layer in decoder.layers:
        attention = layer.attention
        layer.attention_norm = _as(KernelRMSNorm, layer.attention_norm)
        layer.ffn_norm = _as(KernelRMSNorm, layer.ffn_norm)
        if getattr(attention, "qk_norm", None) is not None:
            attention.qk_norm = _as(KernelRMSNorm, attention.qk_norm)
        if isinstance(getattr(attention, "rope", None), CosSinRoPE.Config):
            attention.rope = _as(KernelRoPE, attention.rope)
        if layer.moe is not None and _fits_kernel(layer.moe):
            layer.moe.routed_experts = _as(FusedExperts, layer.moe.routed_experts)


def _fits_kernel(moe: Any) -> bool:
    inner = moe.routed_experts.inner_experts
    plain = type(inner) is Experts.Config and get_tensor_model_parallel_world_size() == 1
    return plain and inner.dim % PACKED == 0 and inner.hidden_dim % PACKED == 0


def _as(kind: Any, config: Any) -> Any:
    return kind.Config(**fields_of(config))
