"""Variable-length attention as plans see it: the tensors that the GPU's kernel keeps, on a machine that has none."""

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.protocols.module import Module

from goaly.models.attention import widened
from goaly.models.context_parallel import SharedDocuments


class FlashShapes(Module):
    """Keeps queries, keys, values, output and a normalizer for each head and token, as flash attention does."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """torchtitan's."""

    def __init__(self, config: Config):
        super().__init__()

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: SharedDocuments | None,
        sinks_N: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """A tensor of the output's size."""
        if attention_masks is not None:
            k_BLNH, v_BLNH = map(attention_masks.selected, attention_masks.gathered(k_BLNH, v_BLNH))
        width = v_BLNH.shape[-1]
        return _Kernel.apply(q_BLNH, k_BLNH, widened(v_BLNH, q_BLNH.shape[-1]), sinks_N)[..., :width]


class _Kernel(torch.autograd.Function):
    """The kernel's inputs and outputs, without values."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, sinks, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, *_ = ctx.saved_tensors
        return *map(torch.empty_like, (q, k, v)), None if sinks is None else torch.empty_like(sinks)
