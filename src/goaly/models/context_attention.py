"""The inner attention of a share of the tokens, under context parallelism (`context_parallel.py`).

On a CPU, documents that start in the share are packed as on one rank (`attention.py`). What continues a document
attends to the document's earlier tokens in full and to its own in causal order; the two are merged by their
normalizers, and the backward pass of each is that of the merged result. No matrix of scores is materialized. On a GPU
it is one variable-length attention with more keys than queries.

With `model.numerics=bitwise` each token of the share is a request of its own over the pages of its document, as on one
rank (`bitwise_attention.py`). The backward pass is that of the attention above.

Shape suffixes: B = 1, L tokens of a share, T those whose keys it looks at, N query heads, K key heads, H head dim,
Q queries of a stretch, S its keys.
"""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torchtitan.protocols.module import Module

from goaly.models.attention import PackedAttention
from goaly.models.bitwise_attention import Scoring, gradients_of, paged_attention
from goaly.models.context_parallel import SharedDocuments
from goaly.models.settings import Numerics
from goaly.models.varlen_attention import BuiltInVarlenAttention, splits

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def context_attention(device: str, numerics: Numerics) -> Module.Config:
    """The inner attention of shares for a kind of device; its mask is a `SharedDocuments`."""
    if numerics == "bitwise":
        return BitwiseContextAttention.Config()
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
        **_: Any,
    ) -> torch.Tensor:
        """Causal attention within each document (CP-2)."""
        keys, values = attention_masks.gathered(k_BLNH, v_BLNH)
        return self.over(q_BLNH, keys, values, attention_masks, scale)

    def over(
        self,
        q_BLNH: torch.Tensor,
        k_BTKH: torch.Tensor,
        v_BTKH: torch.Tensor,
        documents: SharedDocuments,
        scale: float | None,
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
        v_BTKH: torch.Tensor,
        documents: SharedDocuments,
        scale: float | None,
    ) -> torch.Tensor:
        """The attention over keys and values that are gathered."""
        if not documents.is_cut:
            return PackedAttention.forward(self, q_BLNH, k_BTKH, v_BTKH, attention_masks=documents.started, scale=scale)
        scale = q_BLNH.shape[-1] ** -0.5 if scale is None else scale
        of_started, outputs = [], []
        for first, length, key, prefix in documents.stretches:
            q = q_BLNH[:, first : first + length]
            k, v = (one[:, key - prefix : key + length] for one in (k_BTKH, v_BTKH))
            if prefix:
                outputs.append(_Continued.apply(q, k, v, prefix, scale))
            else:
                of_started.append((q, k, v))
                outputs.append(None)
        if of_started:
            q, k, v = (torch.cat(parts, 1) for parts in zip(*of_started, strict=True))
            out = PackedAttention.forward(self, q, k, v, attention_masks=documents.started, scale=scale)
            found = iter(out.split([part[0].shape[1] for part in of_started], 1))
            outputs = [next(found) if one is None else one for one in outputs]
        return torch.cat(outputs, 1)


class ContextVarlenAttention(_Gathering, BuiltInVarlenAttention):
    """Inner attention on a GPU. On one it has not run yet: tests on CPUs stand in for its kernel."""

    @dataclass(kw_only=True, slots=True)
    class Config(BuiltInVarlenAttention.Config):
        """Variable-length attention's."""

    def over(
        self,
        q_BLNH: torch.Tensor,
        k_BTKH: torch.Tensor,
        v_BTKH: torch.Tensor,
        documents: SharedDocuments,
        scale: float | None,
    ) -> torch.Tensor:
        """The attention over keys and values that are gathered: the kernel aligns the last query with the last key."""
        from torch.nn.attention.varlen import varlen_attn

        queries, lengths = documents.lengths
        ends_q, ends_k = (
            torch.tensor([0, *one], device=q_BLNH.device).cumsum(0, dtype=torch.int32) for one in (queries, lengths)
        )
        groups = {"enable_gqa": True} if q_BLNH.shape[2] != k_BTKH.shape[2] else {}
        options: dict[str, Any] = {"num_splits": splits()} | groups
        q, k, v = (  # as torchtitan: the kernel has no float32
            one[0].to(torch.bfloat16) for one in (q_BLNH, documents.selected(k_BTKH), documents.selected(v_BTKH))
        )
        out = varlen_attn(
            q, k, v, ends_q, ends_k, max(queries), max(lengths), scale=scale, window_size=self.window_size, **options
        )
        return out[None].to(q_BLNH.dtype)


class BitwiseContextAttention(_Gathering, PackedAttention):
    """Inner attention of `model.numerics=bitwise`."""

    @dataclass(kw_only=True, slots=True)
    class Config(PackedAttention.Config):
        """Packed attention's."""

    def over(
        self,
        q_BLNH: torch.Tensor,
        k_BTKH: torch.Tensor,
        v_BTKH: torch.Tensor,
        documents: SharedDocuments,
        scale: float | None,
    ) -> torch.Tensor:
        """The attention over keys and values that are gathered, with the bits of one rank (BA-1)."""

        def ordinary(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return _ordinary(q.device.type).over(q, k, v, documents, scale)

        scoring = Scoring(q_BLNH.shape[-1] ** -0.5 if scale is None else scale)
        return paged_attention(q_BLNH, k_BTKH, v_BTKH, documents.paged, scoring, partial(gradients_of, ordinary))


@cache
def _ordinary(device: str) -> ContextAttention | ContextVarlenAttention:
    return context_attention(device, "fast").build()


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
