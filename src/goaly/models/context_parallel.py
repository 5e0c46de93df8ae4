"""Context parallelism: the ranks of a group divide the tokens of a pass.

The tokens are cut into 2 * R chunks of the same length, and rank r has chunks r and 2 * R - 1 - r: its share. So each
rank has about the same number of earlier tokens to attend to, also if all tokens are of one document. Everything but
attention is computed on a share as if it were the whole. A document that goes on in the share of another rank needs
that rank's keys and values: in each layer the ranks gather those of the whole pass, unless no document is cut.

torchtitan refuses it for variable-length attention. With packed documents it has it for FlexAttention only, which has
no backward pass on a CPU.

Shape suffixes: R ranks, T tokens of a pass, L = T / R tokens of a share, C tokens of a chunk, K key heads, H head dim,
V that of values, X = H + V, S selected keys, P trained tokens, O outputs of a head.

Invariants
    models-6: A token attends to itself and to the earlier tokens of its document, whichever ranks have them.
    models-7: All ranks of a group call the same collectives in the same order, whatever their shares hold.
    models-8: All ranks of a group get the same outputs of all trained tokens. The gradient of an output is passed on
    once, by the rank whose output it is, so that the ranks' gradients add up to that of the whole pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from goaly.numerics.cpu_attention import PackedDocuments


class Stretch(NamedTuple):
    """Tokens of a share that follow each other: whole documents and the start of another, or what continues one."""

    first: int
    """The place of its first token in the share."""
    length: int
    key: int
    """The place of its first token's key among the keys."""
    prefix: int
    """The number of earlier tokens of its document, whose keys come before; 0 if a document starts with it."""


def share(tokens: int, rank: int, ranks: int) -> torch.Tensor:
    """The places of a rank's tokens in the pass."""
    chunk = tokens // (2 * ranks)
    assert chunk * 2 * ranks == tokens, "microbatches are padded"
    return torch.cat([torch.arange(number * chunk, (number + 1) * chunk) for number in (rank, 2 * ranks - 1 - rank)])


def is_cut(positions_T: torch.Tensor, ranks: int) -> bool:
    """Whether a document has tokens in the shares of several ranks."""
    chunk = len(positions_T) // (2 * ranks)
    borders = torch.arange(1, 2 * ranks) * chunk
    return bool((positions_T[borders[borders != ranks * chunk]] > 0).any())  # the last rank has both middle chunks


def stretches(positions_T: torch.Tensor, rank: int, ranks: int) -> tuple[Stretch, ...]:
    """The stretches of a rank's share, in order; keys are those of the whole pass if a document is cut, else the
    share's."""
    chunk, cut = len(positions_T) // (2 * ranks), is_cut(positions_T, ranks)
    first, second = rank * chunk, (2 * ranks - 1 - rank) * chunk
    runs = [(first, second + chunk)] if first + chunk == second else [(first, first + chunk), (second, second + chunk)]
    found, done = [], 0
    for start, end in runs:
        prefix, starts = int(positions_T[start]), (positions_T[start:end] == 0).nonzero()
        continued = (int(starts[0]) if len(starts) else end - start) if prefix else 0
        for length, before in ((continued, prefix), (end - start - continued, 0)):
            if length:
                found.append(Stretch(first=done, length=length, key=start if cut else done, prefix=before))
            start, done = start + length, done + length
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class SharedDocuments:
    """The attention mask of a share; shared by all layers."""

    ranks: "ContextRanks"
    stretches: tuple[Stretch, ...]
    is_cut: bool
    positions_L: torch.Tensor
    """In CPU memory."""

    @cached_property
    def started(self) -> PackedDocuments:
        """The documents that start in the share; there must be one."""
        parts = [self.positions_L[one.first : one.first + one.length] for one in self.stretches if not one.prefix]
        return PackedDocuments.of(torch.cat(parts)[None])

    @cached_property
    def lengths(self) -> tuple[list[int], list[int]]:
        """The numbers of queries and of selected keys of each document, whose queries are its last tokens."""
        queries, keys = [], []
        for first, length, _, prefix in self.stretches:
            starts = [0] if prefix else (self.positions_L[first : first + length] == 0).nonzero().flatten().tolist()
            found = [end - start for start, end in pairwise([*starts, length])]
            queries += found
            keys += [prefix + one for one in found]
        return queries, keys

    def gathered(self, k_1LKH: torch.Tensor, v_1LKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values that stretches count in; every rank of the group must call it (models-7)."""
        return _Gather.apply(k_1LKH, v_1LKV, self.ranks) if self.is_cut else (k_1LKH, v_1LKV)

    def selected(self, keys_1TKH: torch.Tensor) -> torch.Tensor:
        """The keys `[1, S, K, H]` of each stretch's documents, stretch after stretch."""
        parts = [keys_1TKH[:, one.key - one.prefix : one.key + one.length] for one in self.stretches]
        return torch.cat(parts, 1)


@dataclass(frozen=True, kw_only=True)
class ContextRanks:
    """The ranks that divide the tokens of a pass, and this one among them."""

    group: dist.ProcessGroup
    rank: int
    count: int

    def share(self, tokens: int) -> torch.Tensor:
        """The places of this rank's tokens."""
        return share(tokens, self.rank, self.count)

    def documents(self, positions_1T: torch.Tensor) -> SharedDocuments:
        """The attention mask of this rank's share."""
        positions_T = positions_1T[0].cpu()
        return SharedDocuments(
            ranks=self,
            stretches=stretches(positions_T, self.rank, self.count),
            is_cut=is_cut(positions_T, self.count),
            positions_L=positions_T[self.share(len(positions_T))],
        )

    def joined(
        self, outputs: Sequence[torch.Tensor], own: torch.Tensor, trained_tokens: int
    ) -> tuple[torch.Tensor, ...]:
        """Outputs `[P]` or `[P, K]` of all ranks' tokens, given those of this rank and their places in P (models-8)."""
        columns = [output.flatten(1).t() if output.dim() > 1 else output[None] for output in outputs]
        whole_OP = _Join.apply(torch.cat(columns), own, trained_tokens, self.group)
        parts = whole_OP.split([len(column) for column in columns])
        return tuple(part.t() if one.dim() > 1 else part[0] for part, one in zip(parts, outputs, strict=True))


class _Gather(torch.autograd.Function):
    """The keys and values of the whole pass, in its order; their gradients are summed over ranks."""

    @staticmethod
    def forward(
        ctx: Any, k_1LKH: torch.Tensor, v_1LKV: torch.Tensor, ranks: ContextRanks
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.ranks, ctx.widths = ranks, (k_1LKH.shape[3], v_1LKV.shape[3])
        own_LKX = torch.cat([k_1LKH[0], v_1LKV[0]], -1)
        parts_RLKX = own_LKX.new_empty(ranks.count, *own_LKX.shape)
        dist.all_gather_single(parts_RLKX.flatten(0, 1), own_LKX, ranks.group)
        k, v = (torch.cat(_chunks(part))[None] for part in parts_RLKX.split(ctx.widths, -1))
        return k, v

    @staticmethod
    def backward(
        ctx: Any, grad_k_1TKH: torch.Tensor, grad_v_1TKV: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        ranks: ContextRanks = ctx.ranks
        _, tokens, heads, _ = grad_k_1TKH.shape
        parts_RLKX = grad_k_1TKH.new_empty(ranks.count, tokens // ranks.count, heads, sum(ctx.widths))
        for part, grad in zip(parts_RLKX.split(ctx.widths, -1), (grad_k_1TKH, grad_v_1TKV), strict=True):
            for own, chunk in zip(_chunks(part), grad[0].chunk(2 * ranks.count), strict=True):
                own.copy_(chunk)
        own_LKX = torch.empty_like(parts_RLKX[0])
        dist.reduce_scatter_single(own_LKX, parts_RLKX.flatten(0, 1), group=ranks.group)
        grad_k_LKH, grad_v_LKV = own_LKX.split(ctx.widths, -1)
        return grad_k_LKH[None], grad_v_LKV[None], None


def _chunks(shares_RLKH: torch.Tensor) -> list[torch.Tensor]:
    """The chunks of all shares, in the order of the pass."""
    early, late = shares_RLKH.chunk(2, dim=1)
    return [*early.unbind(), *reversed(late.unbind())]


class _Join(torch.autograd.Function):
    """Outputs `[O, P]` of all ranks (models-8)."""

    @staticmethod
    def forward(
        ctx: Any, own_OP: torch.Tensor, own: torch.Tensor, trained_tokens: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(own)
        whole_OP = own_OP.new_zeros(len(own_OP), trained_tokens).index_copy_(1, own, own_OP)
        dist.all_reduce(whole_OP, group=group)
        return whole_OP

    @staticmethod
    def backward(ctx: Any, grad_OP: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (own,) = ctx.saved_tensors
        return grad_OP.index_select(1, own), None, None, None
