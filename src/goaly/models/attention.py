"""The trainer's inner attention: on GPUs torchtitan's variable-length attention by torch's own kernel, and with the
gradients of sinks; on CPUs that of `numerics/cpu_attention.py`.

torchtitan scales the kernel's output by what the log of the sums says of the sink, but the kernel's backward pass drops
the gradient of these logs, so that of queries and keys lacks the sink's share. Here the kernel's backward pass gets the
output and the sums with the sink, which are those of one softmax over all tokens and the sink. On a GPU this has not
run yet: tests on CPUs stand in for the kernel.

Shape suffixes: B rows, L tokens of a row, T = B * L, N query heads, K key heads, H head dim.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import current_flash_attention_impl
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
from torchtitan.models.common.rope import RoPE
from torchtitan.protocols.module import Module

from goaly.numerics.cpu_attention import PackedAttention

_kernel = torch.ops.torch_attn._varlen_attn
_kernel_gradients = torch.ops.torch_attn._varlen_attn_backward


def inner_attention(device: str, *, sinks: bool = False) -> Module.Config:
    """The inner attention for a kind of device, of heads with sinks or without."""
    if device != "cuda":
        return PackedAttention.Config()
    return SinkVarlenAttention.Config() if sinks else BuiltInVarlenAttention.Config()


def share_angles(model: torch.nn.Module) -> None:
    """Let all layers that turn positions by the same angles use one table of them. torchtitan makes one for each layer:
    with the 94 layers and 40,960 positions of Qwen3-235B-A22B they would take 3.7 GiB of every rank."""
    tables: dict[str, torch.Tensor] = {}
    for module in model.modules():
        if isinstance(module, RoPE):
            module.cache = tables.setdefault(repr((type(module), module.config)), module.cache)


def document_masks(model: Any, positions_BL: torch.Tensor) -> Any:
    """The attention masks that keep the documents of packed rows apart."""
    attention = model.config.first_attention.inner_attention
    if isinstance(attention, PackedAttention.Config):
        return attention.documents(positions_BL)
    return model.get_attention_masks(positions_BL)


def splits() -> int | None:
    """Parts into which the kernel may divide the keys; None: it chooses. As torchtitan: where FA2 chooses, it gives NaN
    now and then."""
    return 1 if current_flash_attention_impl() in (None, "FA2") else None


def widened(values: torch.Tensor, width: int) -> torch.Tensor:
    """The values with zeros after them, in heads of this width: kernels and caches have one for keys and values."""
    missing = width - values.shape[-1]
    return F.pad(values, (0, missing)) if missing > 0 else values


class BuiltInVarlenAttention(VarlenAttention):
    """torchtitan's variable-length attention by the kernel that torch has: torchtitan's own needs a package of newer
    ones on recent GPUs."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """torchtitan's."""

    def __init__(self, config: Config):
        Module.__init__(self)
        self.window_size = config.window_size

    def forward(self, q_BLNH: torch.Tensor, k_BLNH: torch.Tensor, v_BLNH: torch.Tensor, **options: Any) -> torch.Tensor:
        """Causal attention within each document. The kernel has one width for keys and values."""
        width = v_BLNH.shape[-1]
        v_BLNH = widened(v_BLNH, q_BLNH.shape[-1])
        return super().forward(q_BLNH, k_BLNH, v_BLNH, **options)[..., :width]


class SinkVarlenAttention(BuiltInVarlenAttention):
    """Inner attention of heads with sinks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BuiltInVarlenAttention.Config):
        """Variable-length attention's."""

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float,
        sinks_N: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """Causal attention within each document, over the layer's window."""
        # As torchtitan: the kernel has no float32.
        q, k, v = (one.flatten(0, 1).to(torch.bfloat16) for one in (q_BLNH, k_BLNH, v_BLNH))
        out_TNH = VarlenWithSinks.apply(q, k, v, sinks_N, attention_masks, scale, self.window_size)
        return out_TNH.view(q_BLNH.shape).to(q_BLNH.dtype)


class VarlenWithSinks(torch.autograd.Function):
    """Attention of packed documents, each with the sinks of the heads."""

    @staticmethod
    def forward(
        ctx: Any,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        sinks_N: torch.Tensor,
        documents: VarlenMetadata,
        scale: float,
        window: tuple[int, int],
    ) -> torch.Tensor:
        ends, longest = (documents.cu_seq_q, documents.cu_seq_k), (documents.max_q, documents.max_k)
        options = (window == (-1, 0), scale, list(window), q_TNH.shape[1] != k_TKH.shape[1], None, None, splits())
        plain_TNH, sums_NT, state = _kernel(q_TNH, k_TKH, v_TKH, *ends, *longest, *options)
        sink_N1 = sinks_N.float()[:, None]
        all_NT = torch.logaddexp(sums_NT, sink_N1)
        share_TN1 = (sums_NT - all_NT).exp_().T[..., None]
        out_TNH = (plain_TNH * share_TN1).to(q_TNH.dtype)
        ctx.save_for_backward(q_TNH, k_TKH, v_TKH, sinks_N, out_TNH, all_NT, state, *ends)
        ctx.options = (*longest, window == (-1, 0)), scale, list(window)
        return out_TNH

    @staticmethod
    def backward(ctx: Any, grad_TNH: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, sinks_N, out_TNH, all_NT, state, *ends = ctx.saved_tensors
        kind, scale, window = ctx.options
        found = _kernel_gradients(grad_TNH.contiguous(), q, k, v, out_TNH, all_NT, *ends, *kind, state, scale, window)
        along_NT = (grad_TNH.float() * out_TNH.float()).sum(-1).T
        of_sinks_N = -((sinks_N.float()[:, None] - all_NT).exp() * along_NT).sum(1)
        return *found, of_sinks_N.to(sinks_N.dtype), None, None, None
