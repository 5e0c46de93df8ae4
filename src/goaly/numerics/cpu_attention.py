"""The trainer's inner attention over packed documents on a CPU, where torch has no such kernel with a backward pass.

Documents are sorted into classes of similar length and padded to the length of their class. Each class is one batched
computation: plain matrix products for short documents, scaled-dot-product attention for long ones, and the products of
`cpu_sink_attention.py` where heads have sinks. On one thread, with 8k tokens in rows of 1k and documents of 20-200
tokens, this takes a tenth of the time of masked rows.

Shape suffixes: B rows, L tokens of a row, T = B * L, N query heads, K key heads, G = N // K, H head dim,
V the head dim of values, which latent attention has, S padded slots of all documents, C the padded length of a class,
D documents of a class.

Invariants
    AT-1  A token attends only to itself and the earlier tokens of its document.
    AT-2  Padding never affects a document: it comes after the document's tokens, is finite, and gets zero gradient.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
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
    first_slot_T: torch.Tensor
    """The first slot of the token's document."""
    offset_T: torch.Tensor
    """The token's position in its document."""
    length_T: torch.Tensor
    """The padded length of the token's document."""
    _places: dict[int, "Places"]

    @classmethod
    def of(cls, positions_BL: torch.Tensor) -> "PackedDocuments":
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

    slot_of_row: torch.Tensor
    row_of_slot: torch.Tensor
    """The first row for slots without a row."""
    padding: torch.Tensor
    """The slots without a row."""


class PackedAttention(Module):
    """Inner attention on the CPU; its mask is a `PackedDocuments`."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """Variable-length attention for torchtitan; documents come from positions."""

        def documents(self, positions_BL: torch.Tensor) -> Any:
            """The mask."""
            return PackedDocuments.of(positions_BL)

    def __init__(self, config: Config):
        super().__init__()
        self._window = config.window_size[0] + 1  # 0: all tokens

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: PackedDocuments,
        scale: float | None = None,
        sinks_N: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Causal attention within each document (AT-1). Only layers with sinks may have a window."""
        B, L, N, H = q_BLNH.shape
        K, V = v_BLNH.shape[2:]
        scale = H**-0.5 if scale is None else scale
        query_places, key_places = attention_masks.places(N), attention_masks.places(K)
        sizes = [documents * length for documents, length in attention_masks.classes]
        q_classes = _Pack.apply(q_BLNH.reshape(-1, H), query_places).split([size * N for size in sizes])
        k_classes = _Pack.apply(k_BLNH.reshape(-1, H), key_places).split([size * K for size in sizes])
        v_classes = _Pack.apply(v_BLNH.reshape(-1, V), key_places).split([size * K for size in sizes])
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
        out_BLNV = _Unpack.apply(torch.cat(out_classes), query_places).view(B, L, N, V)
        if sinks_N is None:
            return out_BLNV
        return with_sinks(out_BLNV, _Unpack.apply(torch.cat(sum_classes), query_places).view(B, L, N), sinks_N)


def packed_gradients(
    q_BLNH: torch.Tensor,
    k_BLNH: torch.Tensor,
    v_BLNV: torch.Tensor,
    grad_BLNV: torch.Tensor,
    documents: PackedDocuments,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of `PackedAttention`, of a forward pass that was computed in another way."""
    N, K, H, V = q_BLNH.shape[2], k_BLNH.shape[2], q_BLNH.shape[3], v_BLNV.shape[3]

    def by_class(rows: torch.Tensor, heads: int) -> tuple[torch.Tensor, ...]:
        places = documents.places(heads)
        slots = rows.reshape(-1, rows.shape[3]).index_select(0, places.row_of_slot)
        if rows is grad_BLNV:
            slots.index_fill_(0, places.padding, 0)  # AT-2
        return slots.split([count * length * heads for count, length in documents.classes])

    inputs = (by_class(q_BLNH, N), by_class(k_BLNH, K), by_class(v_BLNV, K), by_class(grad_BLNV, N))
    classes = zip(documents.classes, *inputs, strict=True)
    found = []
    for (D, C), q, k, v, grad in classes:
        if C <= SHORT:
            q, grad = q.view(D * K, N // K * C, H), grad.view(D * K, N // K * C, V)
            k, v = k.view(D * K, C, H), v.view(D * K, C, V)
            of_class = _short_gradients(q, k, v, _short_weights(q, k, scale), grad, scale)
        else:
            shapes = [(D, N, C, H), (D, K, C, H), (D, K, C, V)]
            leaves = [one.view(shape).requires_grad_() for one, shape in zip((q, k, v), shapes, strict=True)]
            with torch.enable_grad():
                out = _long(leaves[0], leaves[1], leaves[2], scale)
            of_class = torch.autograd.grad(out, leaves, grad.view(D, N, C, V))
        found.append([one.reshape(-1, one.shape[-1]) for one in of_class])

    def unpacked(which: int, rows: torch.Tensor) -> torch.Tensor:
        slots = torch.cat([of_class[which] for of_class in found])
        return slots.index_select(0, documents.places(rows.shape[2]).slot_of_row).view(rows.shape)

    return unpacked(0, q_BLNH), unpacked(1, k_BLNH), unpacked(2, v_BLNV)


class _Pack(torch.autograd.Function):
    """Moves rows to their slots."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, places: Places) -> torch.Tensor:
        ctx.places = places
        return rows.index_select(0, places.row_of_slot)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.index_select(0, ctx.places.slot_of_row), None


class _Unpack(torch.autograd.Function):
    """Moves rows back from their slots; the padding's gradient is zero (AT-2)."""

    @staticmethod
    def forward(ctx: Any, slots: torch.Tensor, places: Places) -> torch.Tensor:
        ctx.places = places
        return slots.index_select(0, places.slot_of_row)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.index_select(0, ctx.places.row_of_slot).index_fill_(0, ctx.places.padding, 0), None


class _ShortAttention(torch.autograd.Function):
    """Causal attention of a class of short documents, with queries `[D * K, G * C, H]`, by full matrix products."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        weights = _short_weights(q, k, scale)
        ctx.save_for_backward(q, k, v, weights)
        ctx.scale = scale
        return torch.bmm(weights, v)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        q, k, v, weights = ctx.saved_tensors
        return *_short_gradients(q, k, v, weights, grad, ctx.scale), None


def _short_weights(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    length = k.shape[1]
    mask = causal_mask(length, q.shape[1] // length, q.dtype, q.device)
    return torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale).softmax(-1)


def _short_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weights: torch.Tensor, grad: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad_v = torch.bmm(weights.transpose(1, 2), grad)
    grad_weights = torch.bmm(grad, v.transpose(1, 2))
    grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype).mul_(scale)
    return torch.bmm(grad_scores, k), torch.bmm(grad_scores.transpose(1, 2), q), grad_v


def _long(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of a class of long documents, `[D, heads, C, H]` each: of narrower values only the kernel that
    keeps all scores is made."""
    gqa, width = q.shape[1] != k.shape[1], v.shape[-1]
    if width < q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - width))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)[..., :width]


@cache
def causal_mask(length: int, repeats: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """-inf above the diagonal, once for each query head that shares a key head."""
    return torch.full((length, length), float("-inf"), dtype=dtype, device=device).triu(1).repeat(repeats, 1)
