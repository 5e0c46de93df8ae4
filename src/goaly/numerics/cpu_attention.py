"""The trainer's inner attention over packed documents on a CPU, where torch has no such kernel with a backward pass.

Documents are sorted into classes of similar length and padded to the length of their class. Each class is one batched
computation: plain matrix products for short documents, scaled-dot-product attention for long ones, and the products of
`cpu_sink_attention.py` where heads have sinks. On one thread, with 8k tokens in rows of 1k and documents of 20-200
tokens, this takes a tenth of the time of masked rows.

Shape suffixes: B rows, L tokens of a row, T = B * L, N query heads, K key heads, G = N // K, H head dim,
V the head dim of values, which latent attention has, S padded slots of all documents, C the padded length of a class,
D documents of a class.

A token attends only to itself and the earlier tokens of its document. Padding never affects a document: it comes after
the document's tokens, is finite, and gets zero gradient.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.protocols.module import Module

from goaly.numerics.cpu_sink_attention import SinkAttention, with_sinks

SHORT = 256
"""Up to this length the attention scores of a whole document are materialized."""
SHORT_STEP = 16
LONG_STEP = 64


@dataclass(frozen=True, slots=True)
class PackedDocuments:
    """The slots of the tokens of rows `[B, L]` when each document is padded to its class; shared by all layers."""

    classes: tuple[tuple[int, int], ...]
    """(documents D, padded length C) of each class, in the order of their slots."""
    slots: int
    """S: the sum of D * C."""
    first_slot_T: Tensor
    """The first slot of the token's document."""
    offset_T: Tensor
    """The token's position in its document."""
    length_T: Tensor
    """The padded length of the token's document."""
    _places: dict[int, "Places"]

    @classmethod
    def of(cls, positions_BL: Tensor) -> "PackedDocuments":
        """Find the documents in positions that restart at 0."""
        starts = positions_BL == 0
        starts[:, 0] = True
        start_index = starts.flatten().nonzero().flatten()
        tokens = positions_BL.numel()
        lengths = torch.diff(start_index, append=start_index.new_tensor([tokens]))
        step = torch.where(lengths <= SHORT, SHORT_STEP, LONG_STEP)
        padded = (lengths + step - 1) // step * step
        classes, count = torch.unique(padded, return_counts=True)
        order = torch.argsort(padded, stable=True)
        first_slot = torch.empty_like(padded)
        index_T = torch.arange(tokens, device=lengths.device)
        first_slot[order] = torch.cumsum(padded[order], 0) - padded[order]
        return cls(
            classes=tuple(zip(count.tolist(), classes.tolist(), strict=True)),
            slots=int(padded.sum()),
            first_slot_T=first_slot.repeat_interleave(lengths, output_size=tokens),
            offset_T=index_T - start_index.repeat_interleave(lengths, output_size=tokens),
            length_T=padded.repeat_interleave(lengths, output_size=tokens),
            _places={},
        )

    def places(self, heads: int) -> "Places":
        """The mapping from `[T * heads, H]` to `[S * heads, H]`, which is ordered by class, document, head, slot."""
        if heads not in self._places:
            head = torch.arange(heads, device=self.offset_T.device)
            first = (self.first_slot_T * heads + self.offset_T)[:, None]
            slot_of_row = (first + self.length_T[:, None] * head).flatten()
            row = torch.arange(len(slot_of_row), device=slot_of_row.device)
            row_of_slot = row.new_full((self.slots * heads,), -1).index_copy_(0, slot_of_row, row)
            padding = (row_of_slot < 0).nonzero().flatten()
            self._places[heads] = Places(slot_of_row, row_of_slot.clamp_(min=0), padding)
        return self._places[heads]


class Places(NamedTuple):
    """A mapping in both directions: gathering is faster than scattering into zeros."""

    slot_of_row: Tensor
    row_of_slot: Tensor
    """The first row for slots without a row."""
    padding: Tensor
    """The slots without a row."""

    def pack(self, rows: Tensor) -> Tensor:
        """The rows in their slots."""
        return _Gathered.apply(rows, self.row_of_slot, self.slot_of_row, None)

    def unpack(self, slots: Tensor) -> Tensor:
        """The slots' rows."""
        return _Gathered.apply(slots, self.slot_of_row, self.row_of_slot, self.padding)


class PackedAttention(Module):
    """Inner attention on the CPU; its mask is a `PackedDocuments`."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """Variable-length attention for torchtitan; documents come from positions."""

        def documents(self, positions_BL: Tensor) -> Any:
            """The mask."""
            return PackedDocuments.of(positions_BL)

    def __init__(self, config: Config):
        super().__init__()
        self._window = config.window_size[0] + 1  # 0: all tokens

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: PackedDocuments,
        scale: float | None = None,
        sinks_N: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Causal attention within each document. Only layers with sinks may have a window."""
        B, L, N, H = q_BLNH.shape
        K, V = v_BLNH.shape[2:]
        scale = H**-0.5 if scale is None else scale
        query_places, key_places = attention_masks.places(N), attention_masks.places(K)
        sizes = [documents * length for documents, length in attention_masks.classes]
        q_classes = query_places.pack(q_BLNH.reshape(-1, H)).split([size * N for size in sizes])
        k_classes = key_places.pack(k_BLNH.reshape(-1, H)).split([size * K for size in sizes])
        v_classes = key_places.pack(v_BLNH.reshape(-1, V)).split([size * K for size in sizes])
        out_classes, sum_classes = [], []
        for (D, C), q, k, v in zip(attention_masks.classes, q_classes, k_classes, v_classes, strict=True):
            if sinks_N is not None:
                out, sums = SinkAttention.apply(
                    q.view(D * K, N // K, C, H), k.view(D * K, C, H), v.view(D * K, C, V), scale, self._window
                )
                sum_classes.append(sums.reshape(-1, 1))
            elif C <= SHORT:
                out = _ShortAttention.apply(
                    q.view(D * K, (N // K) * C, H), k.view(D * K, C, H), v.view(D * K, C, V), scale
                )
            else:
                out = _long(q.view(D, N, C, H), k.view(D, K, C, H), v.view(D, K, C, V), scale)
            out_classes.append(out.reshape(-1, V))
        out_BLNV = query_places.unpack(torch.cat(out_classes)).view(B, L, N, V)
        if sinks_N is None:
            return out_BLNV
        return with_sinks(out_BLNV, query_places.unpack(torch.cat(sum_classes)).view(B, L, N), sinks_N)


class _Gathered(torch.autograd.Function):
    """Moves rows to slots or back; the gradient goes the other way, and that of `padding` is zero."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor, padding: Tensor | None) -> Tensor:
        ctx.inverse, ctx.padding = inverse, padding
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        found = grad.index_select(0, ctx.inverse)
        return found if ctx.padding is None else found.index_fill_(0, ctx.padding, 0), None, None, None


class _ShortAttention(torch.autograd.Function):
    """Causal attention of a class of short documents, with queries `[D * K, G * C, H]`, by full matrix products."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        length = k.shape[1]
        mask = causal_mask(length, q.shape[1] // length, q.dtype, q.device)
        weights = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale).softmax(-1)
        ctx.save_for_backward(q, k, v, weights)
        ctx.scale = scale
        return torch.bmm(weights, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, weights = ctx.saved_tensors
        grad_v = torch.bmm(weights.transpose(1, 2), grad)
        grad_weights = torch.bmm(grad, v.transpose(1, 2))
        grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype).mul_(ctx.scale)
        return torch.bmm(grad_scores, k), torch.bmm(grad_scores.transpose(1, 2), q), grad_v, None


def _long(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of a class of long documents, `[D, heads, C, H]` each: of narrower values only the kernel that
    keeps all scores is made."""
    gqa, width = q.shape[1] != k.shape[1], v.shape[-1]
    if width < q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - width))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)[..., :width]


@cache
def causal_mask(length: int, repeats: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """-inf above the diagonal, once for each query head that shares a key head."""
    return torch.full((length, length), float("-inf"), dtype=dtype, device=device).triu(1).repeat(repeats, 1)
