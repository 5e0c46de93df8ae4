"""The attention of `model.numerics=bitwise`, in the trainer as in vLLM: one kernel, one query at a time.

vLLM's kernel for its paged cache computes a request's queries in tiles whose sizes depend on their number, and divides
long requests among threads. Here each token is a request of its own: one query over the keys before it, never divided.
The kernel's operations then depend on the token's position only. The trainer writes the keys and values of its packed
documents into pages and calls the same kernel; its gradient is that of the ordinary attention. On a GPU the kernel is
goaly's own (`bitwise_kernels.py`), over the same pages in the trainer and over vLLM's in a generator.

Shape suffixes: B rows, L tokens of a row, T tokens, N query heads, K key heads, H head dim, P pages, S slots of a page
for keys and as many for values, M most pages of a document.

Invariants
    numerics-6: A token's attention has the same bits in any batch, chunk of its prompt, place in the cache, and
        packing.
"""

import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from goaly.numerics.bitwise_operations import on_gpu
from goaly.numerics.cpu_attention import PackedAttention, PackedDocuments
from goaly.numerics.cpu_training import quickly_multiplied

PAGE = 32
"""Tokens of a page of keys and values. The kernel's steps are not longer."""
NO_WINDOW = -1


@dataclass(frozen=True, slots=True)
class Queries:
    """Tokens as requests of one query each, with the pages that each looks at; shared by all layers."""

    lengths_T: Tensor
    """i32: the tokens up to and including this one."""
    pages_TM: Tensor
    """i32: the pages of the token's document, in order."""
    _schedule: list[Tensor] = field(default_factory=list)
    """0, 1, …, T as i32, and the CPU kernel's division of the work, once made. All layers have the same heads."""

    def attend(self, q_TNH: Tensor, keys: Tensor, values: Tensor, out_TNH: Tensor, scale: float) -> None:
        """Write each query's attention over the keys and values `[P, K, S, H]` of a cache."""
        if on_gpu(q_TNH):
            from goaly.numerics import bitwise_kernels

            bitwise_kernels.attend(q_TNH, keys, values, out_TNH, self.lengths_T, self.pages_TM, scale)
            return
        if not self._schedule:
            self._schedule.extend(self._divided(q_TNH, keys.shape[1]))
        starts_T1, schedule = self._schedule
        _kernels().cpu_attention_with_kv_cache(
            q_TNH,
            keys,
            values,
            out_TNH,
            starts_T1,
            self.lengths_T,
            scale,
            True,  # causal
            None,
            NO_WINDOW,
            self.pages_TM,
            0.0,
            schedule,
            None,
            None,
            1.0,
            1.0,
            "auto",
        )

    def _divided(self, q_TNH: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
        tokens, heads, head_dim = q_TNH.shape
        starts_T1 = torch.arange(tokens + 1, dtype=torch.int32)
        schedule = _kernels().get_scheduler_metadata(
            tokens,
            heads,
            kv_heads,
            head_dim,
            self.lengths_T,
            q_TNH.dtype,
            starts_T1,
            True,  # causal
            NO_WINDOW,
            instructions(head_dim),
            False,  # never divided
            None,
            "auto",
        )
        return starts_T1, schedule


def write_pages(k_TKH: Tensor, v_TKH: Tensor, keys: Tensor, values: Tensor, slot_T: Tensor) -> None:
    """Put these into their slots of the keys and values `[P, K, S, H]` of a cache, in the kernel's order."""
    if on_gpu(k_TKH):
        page_T, place_T = slot_T // keys.shape[2], slot_T % keys.shape[2]
        keys[page_T, :, place_T], values[page_T, :, place_T] = k_TKH, v_TKH
        return
    order = instructions(k_TKH.shape[2])
    _kernels().cpu_attn_reshape_and_cache(k_TKH, v_TKH, keys, values, slot_T, order, 1.0, 1.0, "auto")


def instructions(head_dim: int) -> str:
    """The kernel's set of instructions: the same for all types, so not AMX, which is for bfloat16 only."""
    if head_dim % PAGE:
        return "vec16"
    return "neon" if platform.machine() in ("aarch64", "arm64") else "vec"


def by_token(
    ends_R: Tensor, lengths_R: Tensor, pages_RM: Tensor, starts_R: Tensor, tokens: int
) -> tuple[Tensor, Tensor]:
    """The lengths and pages of tokens as requests of their own, of a step's requests: request r has the tokens from
    `starts_R` to `ends_R`, which are the last ones of its `lengths_R` (i32)."""
    counts_R = ends_R - starts_R
    request_T = torch.arange(len(counts_R), device=ends_R.device).repeat_interleave(counts_R, output_size=tokens)
    left_T = ends_R[request_T] - torch.arange(tokens, dtype=torch.int32, device=ends_R.device) - 1
    return lengths_R[request_T] - left_T, pages_RM[request_T]


@dataclass(frozen=True, slots=True)
class PagedDocuments:
    """The pages of the documents of packed rows."""

    packed: PackedDocuments
    queries: Queries
    slot_T: Tensor
    pages: int

    @classmethod
    def of(cls, positions_BL: Tensor) -> "PagedDocuments":
        """Find the documents in positions that restart at 0, and give each its own pages."""
        packed = PackedDocuments.of(positions_BL)
        offset_T = packed.offset_T
        document_T = (offset_T == 0).cumsum(0) - 1
        counts = torch.bincount(document_T)
        pages = (counts + PAGE - 1) // PAGE
        first = torch.cumsum(pages, 0) - pages
        longest = torch.arange(int(pages.max()), device=pages.device)
        pages_DM = (first[:, None] + longest).clamp_(max=int(pages.sum()) - 1)
        return cls(
            packed=packed,
            queries=Queries((offset_T + 1).int(), pages_DM[document_T].int()),
            slot_T=first[document_T] * PAGE + offset_T,
            pages=int(pages.sum()),
        )

    def attend(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, scale: float) -> Tensor:
        """The attention of each token in its document."""
        # A document does not fill its last page, which the kernel reads to its end.
        keys, values = k_TKH.new_zeros(self.pages, k_TKH.shape[1], 2 * PAGE, k_TKH.shape[2]).chunk(2, dim=2)
        # The kernel that writes pages knows the distance of tokens only, not that of heads.
        write_pages(k_TKH, v_TKH.contiguous(), keys, values, self.slot_T)
        out_TNH = torch.empty_like(q_TNH)
        self.queries.attend(q_TNH, keys, values, out_TNH, scale)
        return out_TNH


class BitwiseAttention(PackedAttention):
    """The trainer's inner attention; its mask is a `PagedDocuments`."""

    @dataclass(kw_only=True, slots=True)
    class Config(PackedAttention.Config):
        """Variable-length attention for torchtitan; documents come from positions."""

        def documents(self, positions_BL: Tensor) -> PagedDocuments:
            """The mask."""
            return PagedDocuments.of(positions_BL)

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: PagedDocuments,
        scale: float | None = None,
        **_: Any,
    ) -> Tensor:
        """Causal attention within each document (numerics-6)."""
        scale = q_BLNH.shape[-1] ** -0.5 if scale is None else scale
        ordinary = partial(super().forward, attention_masks=attention_masks.packed, scale=scale)
        return _Paged.apply(q_BLNH, k_BLNH, v_BLNH, attention_masks, scale, ordinary)


class _Paged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BLNH: Tensor,
        k_BLKH: Tensor,
        v_BLKH: Tensor,
        documents: PagedDocuments,
        scale: float,
        ordinary: Callable[..., Tensor],
    ) -> Tensor:
        ctx.save_for_backward(q_BLNH, k_BLKH, v_BLKH)
        ctx.ordinary = ordinary
        q_TNH, k_TKH, v_TKH = (one.flatten(0, 1) for one in (q_BLNH, k_BLKH, v_BLKH))
        return documents.attend(q_TNH, k_TKH, v_TKH, scale).view(q_BLNH.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *given, grad = quickly_multiplied(*ctx.saved_tensors, grad)
        leaves = [one.detach().requires_grad_() for one in given]
        with torch.enable_grad():
            out = ctx.ordinary(*leaves)
        return *torch.autograd.grad(out, leaves, grad), None, None, None


@cache
def _kernels() -> Any:
    """vLLM's operations on the CPU."""
    import vllm._custom_ops  # noqa: F401 - registers them

    return torch.ops._C
