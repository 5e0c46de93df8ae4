"""The parts of gpt-oss in which goaly differs from torchtitan.

Its attention adds sinks to the kernel's output, and the GPU's kernel loses a part of their gradient
(`attention.py`). Its experts compute in bfloat16 only, and the bias of its output projection has a fraction of
its gradient with several tensor-parallel ranks. Its adapter of folders knows other names than its model has, and drops
the experts.

Shape suffixes: R rows routed to experts, grouped by expert, D model dim, E experts, F an expert's hidden dim, G = 2 * F
of gate and up, which alternate, X any.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard
from torchtitan.models.common.linear import ScaledBiasRowwiseLinear
from torchtitan.models.gpt_oss.model import Attention
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, ScaleBiasForward, swiglu
from torchtitan.models.gpt_oss.state_dict_adapter import GptOssStateDictAdapter

from goaly.numerics.experts import Experts
from goaly.numerics.layer_replacement import of_rank


class AttentionWithSinks(Attention):
    """Attention whose inner attention knows the sinks."""

    @dataclass(kw_only=True, slots=True)
    class Config(Attention.Config):
        """torchtitan's."""

    def forward(self, x: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None = None) -> torch.Tensor:
        """The layer's output, of the shape of `x`."""
        q_BLNH, k_BLNH, v_BLNH = self.qkv_linear(x)
        q_BLNH, k_BLNH = self.rope(q_BLNH, k_BLNH, positions)
        out_BLNH = self.inner_attention(
            q_BLNH,
            k_BLNH,
            v_BLNH,
            attention_masks=attention_masks,
            scale=self.softmax_scale,
            sinks_N=of_rank(self.sinks),
        )
        return self.wo(out_BLNH.reshape(*x.shape[:2], -1).contiguous())


class ClampedExperts(Experts, GptOssGroupedExperts):
    """Gated feed-forward networks with biases and clamped activations, in the type of their parameters."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        """torchtitan's."""

    def __init__(self, config: Config):
        super().__init__(config)
        self._rows_of_both = 2 * config.hidden_dim

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Each token's output of the expert that it is routed to."""
        ends_E = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        rest_1 = len(x_RD) - ends_E[-1:]  # rows of no expert
        counts_E1 = torch.cat([num_tokens_per_expert_E.long(), rest_1.long()])

        def bias(name: str) -> torch.Tensor:
            bias_EX = of_rank(getattr(self, name))
            padded_E1X = torch.cat([bias_EX, bias_EX.new_zeros(1, bias_EX.shape[1])])
            return padded_E1X.repeat_interleave(counts_E1, dim=0, output_size=len(x_RD))

        both_RG = self._product(x_RD, "mlp1_weight_EGD", ends_E) + bias("mlp1_bias_EG")
        hidden_RF = swiglu(both_RG, limit=self.swiglu_limit)
        out_RD = self._product(hidden_RF, "mlp2_weight_EDF", ends_E)
        parts = self._rows_of_both // both_RG.shape[1]  # the ranks that divide each expert, whose outputs are added
        return out_RD + ScaleBiasForward.apply(bias("mlp2_bias_ED"), parts, out_RD.dtype)


class RowwiseLinear(ScaledBiasRowwiseLinear):
    """A linear layer whose inputs tensor-parallel ranks divide, with a bias that has its whole gradient on each."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledBiasRowwiseLinear.Config):
        """torchtitan's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """This rank's summand."""
        weight, bias = of_rank(self.weight), of_rank(self.bias)
        return F.linear(input, weight, ScaleBiasForward.apply(bias, self.tp_degree, weight.dtype))


class FolderAdapter(GptOssStateDictAdapter):
    """Names and layouts of folders whose experts are not quantized."""

    def __init__(self, model_config: Any, hf_assets_path: str | None):
        super().__init__(model_config, hf_assets_path)
        theirs, ours = "model.layers.{}.mlp.experts.", "layers.{}.moe.routed_experts.inner_experts."
        named = {name: held for name, held in self.from_hf_map.items() if not name.startswith(theirs)}
        self.from_hf_map = named | {
            f"{theirs}gate_up_proj": f"{ours}mlp1_weight_EGD",
            f"{theirs}gate_up_proj_bias": f"{ours}mlp1_bias_EG",
            f"{theirs}down_proj": f"{ours}mlp2_weight_EDF",
            f"{theirs}down_proj_bias": f"{ours}mlp2_bias_ED",
        }

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The tensors by their names in a folder, which share the memory of these."""
        found = super().to_hf(state_dict)
        if len(found) != len(state_dict):
            raise AssertionError(f"{len(state_dict) - len(found)} of {sorted(state_dict)} have no name in a folder")
        return _turned(found)

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """The model's tensors of those of a folder."""
        return super().from_hf(_turned(hf_state_dict))


def _turned(tensors: dict[str, Any]) -> dict[str, Any]:
    """The same with experts' inputs and outputs exchanged: folders have the inputs first."""
    stacks = (".experts.gate_up_proj", ".experts.down_proj")
    return {name: _transposed(one) if name.endswith(stacks) else one for name, one in tensors.items()}


def _transposed(stack: torch.Tensor) -> torch.Tensor:
    """A view with the last two of three dims exchanged, divided among the same ranks."""
    if not isinstance(stack, DTensor):
        return stack.transpose(1, 2)
    placements = [
        Shard(3 - one.dim) if isinstance(one, Shard) and one.dim > 0 else one for one in stack.placements
    ]  # of experts too, in several ways
    shape, stride = stack.shape, stack.stride()
    return DTensor.from_local(
        stack.to_local().transpose(1, 2),
        stack.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size((shape[0], shape[2], shape[1])),
        stride=(stride[0], stride[2], stride[1]),
    )
