"""The inner attention of a share of the tokens, under context parallelism (`context_parallel.py`).

On a CPU, documents that start in the share are packed as on one rank (`attention.py`). A document's continuation
attends to the document's earlier tokens in full and to its own in causal order; the two are merged by their
normalizers, and the backward pass of each is that of the merged result. No matrix of scores is materialized. With sinks
it is the attention of one rank with fewer queries than keys (`sink_attention.py`). On a GPU it is one variable-length
attention with more keys than queries.

Shape suffixes: B = 1, L tokens of a share, T those whose keys it looks at, N query heads, K key heads, G query heads of
a key head, H head dim, V that of values, Q queries of a stretch, S its keys.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torchtitan.models.common.attention import VarlenMetadata
from torchtitan.protocols.module import Module

from goaly.models.attention import BuiltInVarlenAttention, VarlenWithSinks, splits, widened
from goaly.models.context_parallel import SharedDocuments
from goaly.numerics.cpu_attention import PackedAttention
from goaly.numerics.cpu_sink_attention import SinkAttention, with_sinks

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def context_attention(device: str) -> Module.Config:
    """The inner attention of shares for a kind of device; its mask is a `SharedDocuments`."""
    return ContextVarlenAttention.Config() if device == "cuda" else ContextAttention.Config()


class _Gathering:
    """The attention of a share's queries over the keys and values of the whole pass."""

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: SharedDocuments,
        scale: float | None = None,
        sinks_N: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Causal attention within each document (models-6)."""
        keys, values = attention_masks.gathered(k_BLNH, v_BLNH)
        scale = q_BLNH.shape[-1] ** -0.5 if scale is None else scale
        return self.over(q_BLNH, keys, values, attention_masks, scale, sinks_N)

    def over(
        self,
        q_BLNH: torch.Tensor,
        k_BTKH: torch.Tensor,
        v_BTKV: torch.Tensor,
        documents: SharedDocuments,
        scale: float,
        sinks_N: torch.Tensor | None,
    ) -> torch.Tensor:
        """The attention over keys and values that are gathered."""
        raise NotImplementedError


class ContextAttention(_Gathering, PackedAttention):
    """Inner attention on the CPU."""

    @dataclass(kw_only=True, slots=True)
    class Config(PackedAttention.Config):
        """Packed attention's."""

    def over(
        self,
        q_BLNH: torch.Tensor,
        k_BTKH: torch.Tensor,
        v_BTKV: torch.Tensor,
        documents: SharedDocuments,
        scale: float,
        sinks_N: torch.Tensor | None,
    ) -> torch.Tensor:
        """The attention over keys and values that are gathered."""
        ordinary = partial(PackedAttention.forward, self, scale=scale, sinks_N=sinks_N)
        if not documents.is_cut:
            return ordinary(q_BLNH, k_BTKH, v_BTKV, attention_masks=documents.started)
        of_started, outputs = [], []
        for first, length, key, prefix in documents.stretches:
            q = q_BLNH[:, first : first + length]
            k, v = (one[:, key - prefix : key + length] for one in (k_BTKH, v_BTKV))
            if prefix:
                outputs.append(self._continued(q, k, v, prefix, scale, sinks_N))
            else:
                of_started.append((q, k, v))
                outputs.append(None)
        if of_started:
            q, k, v = (torch.cat(parts, 1) for parts in zip(*of_started, strict=True))
            out = ordinary(q, k, v, attention_masks=documents.started)
            found = iter(out.split([part[0].shape[1] for part in of_started], 1))
            outputs = [next(found) if one is None else one for one in outputs]
        return torch.cat(outputs, 1)

    def _continued(
        self,
        q_1QNH: torch.Tensor,
        k_1SKH: torch.Tensor,
        v_1SKV: torch.Tensor,
        prefix: int,
        scale: float,
        sinks_N: torch.Tensor | None,
    ) -> torch.Tensor:
        """The attention of queries that are the last tokens of a document."""
        if sinks_N is None:
            width = v_1SKV.shape[-1]  # the kernel has one for keys and values
            return _Continued.apply(q_1QNH, k_1SKH, widened(v_1SKV, q_1QNH.shape[-1]), prefix, scale)[..., :width]
        q_NQH, k_KSH, v_KSV = (one[0].transpose(0, 1) for one in (q_1QNH, k_1SKH, v_1SKV))
        q_KGQH = q_NQH.unflatten(0, (len(k_KSH), -1))
        out_KGQV, sums_KGQ = SinkAttention.apply(q_KGQH, k_KSH, v_KSV, scale, self._window)
        out_1QNV, sums_1QN = out_KGQV.flatten(0, 1).transpose(0, 1)[None], sums_KGQ.flatten(0, 1).T[None]
        return with_sinks(out_1QNV, sums_1QN, sinks_N)


class ContextVarlenAttention(_Gathering, BuiltInVarlenAttention):
    """Inner attention on a GPU. On one it has not run yet: tests on CPUs stand in for its kernel."""

    @dataclass(kw_only=True, slots=True)
    class Config(BuiltInVarlenAttention.Config):
        """Variable-length attention's."""

    def over(
        self,
        q_BLNH: torch.Tensor,
        k_BTKH: torch.Tensor,
        v_BTKV: torch.Tensor,
        documents: SharedDocuments,
        scale: float,
        sinks_N: torch.Tensor | None,
    ) -> torch.Tensor:
        """The attention over keys and values that are gathered: the kernel aligns the last query with the last key, and
        has one width for keys and values."""
        from torch.nn.attention.varlen import varlen_attn

        queries, lengths = documents.lengths
        ends_q, ends_k = (
            torch.tensor([0, *one], device=q_BLNH.device).cumsum(0, dtype=torch.int32) for one in (queries, lengths)
        )
        width = v_BTKV.shape[-1]
        selected = (documents.selected(k_BTKH), documents.selected(widened(v_BTKV, q_BLNH.shape[-1])))
        q, k, v = (one[0].to(torch.bfloat16) for one in (q_BLNH, *selected))  # as torchtitan: the kernel has no float32
        if sinks_N is not None:
            metadata = VarlenMetadata(cu_seq_q=ends_q, cu_seq_k=ends_k, max_q=max(queries), max_k=max(lengths))
            out = VarlenWithSinks.apply(q, k, v, sinks_N, metadata, scale, self.window_size)
        else:
            groups = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
            options: dict[str, Any] = {"num_splits": splits(), "window_size": self.window_size} | groups
            out = varlen_attn(q, k, v, ends_q, ends_k, max(queries), max(lengths), scale=scale, **options)
        return out[None, ..., :width].to(q_BLNH.dtype)


class _Continued(torch.autograd.Function):
    """Causal attention of queries that are the last tokens of a document, over all its keys."""

    @staticmethod
    def forward(
        ctx: Any, q_1QNH: torch.Tensor, k_1SKH: torch.Tensor, v_1SKH: torch.Tensor, prefix: int, scale: float
    ) -> torch.Tensor:
        q, k, v = (one.transpose(1, 2) for one in (q_1QNH, k_1SKH, v_1SKH))
        earlier, earlier_norm = _flash(q, k[:, :, :prefix], v[:, :, :prefix], 0.0, False, scale=scale)
        own, own_norm = _flash(q, k[:, :, prefix:], v[:, :, prefix:], 0.0, True, scale=scale)
        norm = torch.logaddexp(earlier_norm, own_norm)
        out = torch.lerp(own.float(), earlier.float(), (earlier_norm - norm).exp_()[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, norm)
        ctx.prefix, ctx.scale = prefix, scale
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad_1QNH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        q, k, v, out, norm = ctx.saved_tensors
        grad = grad_1QNH.transpose(1, 2)

        def gradients(part: slice, causal: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return _flash_gradients(grad, q, k[:, :, part], v[:, :, part], out, norm, 0.0, causal, scale=ctx.scale)

        earlier, own = gradients(slice(ctx.prefix), False), gradients(slice(ctx.prefix, None), True)
        grad_k, grad_v = (torch.cat([earlier[which], own[which]], 2).transpose(1, 2) for which in (1, 2))
        return (earlier[0] + own[0]).transpose(1, 2), grad_k, grad_v, None, None
