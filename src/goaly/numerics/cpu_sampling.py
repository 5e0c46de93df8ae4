"""vLLM's CPU kernels for the linear layers and the experts of a sampler, and its sampling and its start on a CPU.

torchtitan's norms and rotations take a fifth of a tiny model's decode step; its experts are a loop of matrix products,
half of a step. vLLM's kernels need one operation each. A linear layer whose weight is in the kernel's order takes half
the time of one whose weight is not. Results differ from torchtitan's in the last bits. These layers are for float32.

The kernels of experts and linear layers read a copy of the weights in their own order. `pack` makes it anew whenever
they change.

vLLM draws a token for each request of a step, and drops that of a prompt of which only a part is computed. On a GPU it
then sets the request's generator back by one draw, but a CPU's generator has no such operation. Here that request
draws without its generator. So a request with a seed gets the same draws, in however many steps its prompt is computed.

Importing this module does once what vLLM repeats at the start of each engine on CPUs: a fork server's forks have it.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import vllm.model_executor.layers.quantization.online.base  # noqa: F401 - imported by each engine's start
from torch import Tensor
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import RoutedExperts
from vllm import _custom_ops as kernels
from vllm.config.logging import LoggingConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.logger import configure_logging_if_needed
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.platforms import current_platform
from vllm.v1.sample import sampler

from goaly.numerics import KERNEL_WIDTH
from goaly.numerics.bitwise_expert_networks import INSTRUCTIONS, Packed, pack
from goaly.numerics.bitwise_layers import KernelRMSNorm, KernelRoPE
from goaly.numerics.cpu_training import packed_weight
from goaly.numerics.experts import Experts
from goaly.numerics.layer_replacement import of_kind, replace_layers

if current_platform.is_cpu():
    configure_logging_if_needed(LoggingConfig())
    register = cache(current_platform.register_triton_kernel_overrides)  # looks at all names of all modules
    register()
    current_platform.register_triton_kernel_overrides = register


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

    def forward(self, input: Tensor) -> Tensor:
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
        self, x_BLD: Tensor, topk_scores_BLK: Tensor, topk_expert_ids_BLK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> Tensor:
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
        replace_layers(decoder, {Linear: PackedLinear})
    decoder.norm = of_kind(KernelRMSNorm, decoder.norm)
    for layer in decoder.layers:
        attention = layer.attention
        layer.attention_norm = of_kind(KernelRMSNorm, layer.attention_norm)
        layer.ffn_norm = of_kind(KernelRMSNorm, layer.ffn_norm)
        if getattr(attention, "qk_norm", None) is not None:
            attention.qk_norm = of_kind(KernelRMSNorm, attention.qk_norm)
        if isinstance(getattr(attention, "rope", None), CosSinRoPE.Config):
            attention.rope = of_kind(KernelRoPE, attention.rope)
        if layer.moe is not None and _fits_kernel(layer.moe):
            layer.moe.routed_experts = of_kind(FusedExperts, layer.moe.routed_experts)


def _fits_kernel(moe: Any) -> bool:
    inner = moe.routed_experts.inner_experts
    plain = type(inner) is Experts.Config and get_tensor_model_parallel_world_size() == 1
    return plain and inner.dim % KERNEL_WIDTH == inner.hidden_dim % KERNEL_WIDTH == 0


def adapt_sampling(runner: Any) -> None:
    """Change how this model runner of vLLM's samples."""
    sampler.batched_count_greater_than = _rank_of_sample  # vLLM would spend seconds on compiling its own
    sample = runner.sample_tokens

    def sample_tokens(grammars: Any) -> Any:
        batch = runner.input_batch
        dropped = np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs]).tolist()
        unused = {row: batch.generators.pop(row) for row in dropped if row in batch.generators}
        try:
            return sample(grammars)
        finally:
            batch.generators.update(unused)

    runner.sample_tokens = sample_tokens


def _rank_of_sample(logprobs_TV: Tensor, sampled_T1: Tensor) -> Tensor:
    return (logprobs_TV >= sampled_T1).sum(-1)
