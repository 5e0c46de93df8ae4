"""Shares of a pass are attended to as the whole is: the parts that one process can check."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import product

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from goaly.models import attention as gpu_attention
from goaly.models.context_attention import ContextAttention, ContextVarlenAttention
from goaly.models.context_parallel import ContextRanks, SharedDocuments, is_cut, share, stretches
from goaly.numerics.cpu_attention import PackedAttention, PackedDocuments
from tests.unit.models.varlen_kernel import kernel, kernel_gradients, kernel_with_sums

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=12)
RANKS = st.sampled_from([2, 3, 4])


def positions_of(lengths: list[int], ranks: int) -> torch.Tensor:
    """Documents of these lengths, with one more that fills the chunks."""
    missing = -sum(lengths) % (2 * ranks)
    return torch.cat([torch.arange(length) for length in [*lengths, missing]])


def masks_of(positions_T: torch.Tensor, ranks: int) -> list[SharedDocuments]:
    """The masks of all ranks, without a group."""
    of_ranks = [ContextRanks(group=dist.GroupMember.NON_GROUP_MEMBER, rank=rank, count=ranks) for rank in range(ranks)]
    return [one.documents(positions_T[None]) for one in of_ranks]


@settings(max_examples=60, deadline=None)
@given(chunk=st.integers(1, 9), ranks=st.integers(1, 6))
def test_each_token_is_in_one_of_the_equal_shares(chunk: int, ranks: int):
    tokens = 2 * ranks * chunk
    shares = [share(tokens, rank, ranks) for rank in range(ranks)]
    assert {len(one) for one in shares} == {2 * chunk}
    assert sorted(torch.cat(shares).tolist()) == list(range(tokens))
    work = [int(one.sum()) for one in shares]  # of a single document: the earlier tokens of all tokens
    assert len(set(work)) == 1


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, ranks=RANKS)
@example(lengths=[12, 24, 12], ranks=2)  # a document of the two chunks in the middle, which are one rank's
def test_stretches_are_the_share_with_all_earlier_tokens_of_each_document(lengths: list[int], ranks: int):  # models-6
    positions_T = positions_of(lengths, ranks)
    tokens, cut = len(positions_T), is_cut(positions_T, ranks)
    document_T = (positions_T == 0).cumsum(0)
    shares = [share(tokens, rank, ranks) for rank in range(ranks)]
    holders = [
        {rank for rank in range(ranks) if (document_T[shares[rank]] == one).any()} for one in document_T.unique()
    ]
    assert cut == any(len(of_one) > 1 for of_one in holders)
    for rank, places in enumerate(shares):
        found = stretches(positions_T, rank, ranks)
        assert [one.first for one in found] == [sum(o.length for o in found[:n]) for n in range(len(found))]
        assert sum(one.length for one in found) == len(places)
        for first, length, key, prefix in found:
            mine = places[first : first + length]
            at = key if cut else int(places[key])
            assert mine.tolist() == list(range(at, at + length))
            assert int(positions_T[at]) == prefix
            if prefix:
                assert cut
                assert len(document_T[at - prefix : at + length].unique()) == 1


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, ranks=RANKS)
def test_the_queries_of_a_document_are_the_last_of_its_selected_keys(lengths: list[int], ranks: int):  # models-6
    """What a kernel of variable lengths is given: the i-th of q queries sees the first k - q + i of k keys."""
    positions_T = positions_of(lengths, ranks)
    places = torch.arange(len(positions_T))
    starts_T = places - positions_T
    for rank, mask in enumerate(masks_of(positions_T, ranks)):
        mine = share(len(places), rank, ranks)
        keys = places if mask.is_cut else mine
        selected = mask.selected(keys[None, :, None, None])[0, :, 0, 0]
        queries, lengths_k = mask.lengths
        assert (sum(queries), sum(lengths_k)) == (len(mine), len(selected))
        for q, k in zip(mine.split(queries), selected.split(lengths_k), strict=True):
            for number, token in enumerate(q.tolist()):
                seen = k[: len(k) - len(q) + number + 1].tolist()
                assert seen == list(range(int(starts_T[token]), token + 1))


@dataclass(frozen=True, kw_only=True)
class Gathered(SharedDocuments):
    """A mask whose ranks have gathered keys and values."""

    whole: tuple[torch.Tensor, torch.Tensor]

    def gathered(self, k_1LKH: torch.Tensor, v_1LKH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.whole if self.is_cut else (k_1LKH, v_1LKH)


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The heads of a layer; with a window they have sinks, too."""

    queries: int
    keys: int
    value_dim: int = 32
    window: int | None = None


MIXED = [
    ([700, 20, 5, 300], 2),  # longer than what is computed by full products
    ([7, 16, 1, 30, 2, 40], 3),
]
LENGTHS_AND_RANKS = [
    *MIXED,
    ([48], 2),  # one document
    ([24, 24], 2),  # no document is cut: each rank has one half of the other's
    ([12, 24, 12], 2),  # no document is cut
    ([1, 1, 1, 1], 2),
    ([11, 90], 4),
]
NARROW = Heads(queries=2, keys=2, value_dim=16)
WINDOWED = [Heads(queries=4, keys=2, window=window) for window in (0, 1, 16, 280)]
SHARES = [
    *product(LENGTHS_AND_RANKS, [Heads(queries=2, keys=2), Heads(queries=4, keys=2)]),
    *product(MIXED, [NARROW, *WINDOWED]),
]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (ContextAttention, torch.float32),
        (ContextAttention, torch.bfloat16),
        (ContextVarlenAttention, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize(("documents", "heads"), SHARES, ids=str)
def test_shares_attend_as_the_whole_does_and_their_gradients_add_up_to_its_own(  # models-6
    documents: tuple[list[int], int],
    heads: Heads,
    dtype: torch.dtype,
    kind: type[ContextAttention | ContextVarlenAttention],
    monkeypatch: pytest.MonkeyPatch,
):
    lengths, ranks = documents
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    monkeypatch.setattr(gpu_attention, "_kernel", kernel_with_sums)
    monkeypatch.setattr(gpu_attention, "_kernel_gradients", kernel_gradients)
    window_size = ((heads.window or 0) - 1, 0)
    positions_T = positions_of(lengths, ranks)
    tokens, generator = len(positions_T), torch.Generator().manual_seed(0)
    sizes = [(heads.queries, 32), (heads.keys, 32), (heads.keys, heads.value_dim), (heads.queries, heads.value_dim)]
    q, k, v, grad = (torch.randn(1, tokens, *size, generator=generator).to(dtype) for size in sizes)
    sinks = () if heads.window is None else (torch.randn(heads.queries, generator=generator),)

    def attended(attend: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        leaves = [one.clone().requires_grad_() for one in (q, k, v, *sinks)]
        out = attend(*leaves)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    def in_shares(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *sinks: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(grad)
        attention = kind.Config(window_size=window_size).build()
        for rank, mask in enumerate(masks_of(positions_T, ranks)):
            places = share(tokens, rank, ranks)
            gathered = Gathered(**{field.name: getattr(mask, field.name) for field in fields(mask)}, whole=(k, v))
            own = (one[:, places] for one in (q, k, v))
            part = attention(*own, attention_masks=gathered, **named(sinks))
            out = out.index_copy(1, places, part)
        return out

    def named(sinks: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        return {"sinks_N": sinks[0]} if sinks else {}

    packed, masks = PackedAttention.Config(window_size=window_size).build(), PackedDocuments.of(positions_T[None])
    expected = attended(lambda q, k, v, *sinks: packed(q, k, v, attention_masks=masks, **named(sinks)))
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.05}
    for found, one in zip(attended(in_shares), expected, strict=True):
        assert_close(found, one, **tolerance)
