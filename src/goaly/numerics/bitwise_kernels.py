"""The operations of `model.numerics=bitwise` on a GPU, in Triton. Only forward passes; needs the package triton.

A kernel computes a row by a fixed sequence of operations on the row's own data: the sizes of blocks are
constants or depend on the row's length alone, no sum is split among programs, and nothing is tuned or compiled anew for
a number of rows or an address. A tile's other rows do not take part in a row's sums. Float32 products are products of
float32, not of TF32.

`product` and `by_expert` are numerics-1, `normalized` is numerics-4, `log_softmax` and `softmax` are numerics-5, and
`attend` is numerics-6.

Shape suffixes: T rows, K input features, N output features, E experts, G the outputs of all slices, D the last
dimension, P pages, S slots of a page, Q query heads, H key heads, W head dim, M most pages of a document.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, STEP = 64, 64, 32
"""The tile of a product, and the input features that are added at a time."""
BLOCK = 1024
"""Elements of rows that are reduced at a time."""
KEYS = 32
"""Keys that a query looks at at a time."""
FEWEST = 16
"""The least size of a matrix product in Triton."""


def product(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """`x @ weight.T`, added in float32 and rounded to the weight's type once."""
    out_TN = x_TK.new_empty(len(x_TK), len(weight_NK), dtype=weight_NK.dtype)
    tiles = triton.cdiv(len(x_TK), ROWS)
    _multiply(x_TK.to(weight_NK.dtype), weight_NK[None], out_TN, tiles, None)
    return out_TN


def by_expert(x_TK: Tensor, weight_ENK: Tensor, rows: Sequence[int], slices: int) -> Tensor:
    """The product of each expert's rows with each slice of its weight, side by side."""
    width = weight_ENK.shape[1]
    out_TG = x_TK.new_empty(len(x_TK), slices * width, dtype=weight_ENK.dtype)
    spans, start = [], 0
    for expert, count in enumerate(rows):
        spans += [(expert, first, start + count) for first in range(start, start + count, ROWS)]
        start += count
    places = torch.tensor(spans, dtype=torch.int32).to(x_TK.device).view(-1, 3)
    parts = (x_TK.to(weight_ENK.dtype).chunk(slices, 1), weight_ENK.chunk(slices, 2), out_TG.chunk(slices, 1))
    for x, weight, out in zip(*parts, strict=True):
        _multiply(x, weight, out, len(spans), places)
    return out_TG


def normalized(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Each row divided by the root of its mean square, times the weight, in float32 and rounded once."""
    x_TD = _aligned(x_TD)
    count, width = x_TD.shape
    out_TD = torch.empty_like(x_TD)
    if count:
        rows, block = _row_tile(width)
        _launch(_normalize, (triton.cdiv(count, rows),), x_TD, weight_D, out_TD, count, width, eps, rows, block)
    return out_TD


def log_softmax(x_TD: Tensor) -> Tensor:
    """The log-softmax of each row, in float32."""
    return _softmax(x_TD, log=True)


def softmax(x_TD: Tensor) -> Tensor:
    """The softmax of each row, in float32."""
    return _softmax(x_TD, log=False)


def attend(
    q_TQW: Tensor,
    keys_PHSW: Tensor,
    values_PHSW: Tensor,
    out_TQW: Tensor,
    lengths_T: Tensor,
    pages_TM: Tensor,
    scale: float,
) -> None:
    """Write each query's attention over the first `lengths_T` keys in its pages, in their order."""
    tokens, heads, width = q_TQW.shape
    kv_heads, slots = keys_PHSW.shape[1:3]
    group = heads // kv_heads
    assert keys_PHSW.stride() == values_PHSW.stride(), "keys and values lie in one cache"
    assert q_TQW.stride(2) == keys_PHSW.stride(3) == out_TQW.stride(2) == pages_TM.stride(1) == 1
    if not tokens:
        return
    _launch(
        _attend,
        (tokens, kv_heads),
        q_TQW,
        keys_PHSW,
        values_PHSW,
        out_TQW,
        lengths_T,
        pages_TM,
        scale,
        *q_TQW.stride()[:2],
        *keys_PHSW.stride()[:3],
        *out_TQW.stride()[:2],
        pages_TM.stride(0),
        slots,
        group,
        width,
        max(FEWEST, triton.next_power_of_2(group)),
        max(FEWEST, triton.next_power_of_2(width)),
        KEYS,
    )


def _multiply(x_TK: Tensor, weight_ENK: Tensor, out_TN: Tensor, tiles: int, places: Tensor | None) -> None:
    """Multiply tiles of rows. `places` has the expert, first row and end of each; None: all rows of one expert."""
    width, features = weight_ENK.shape[1:]
    if not tiles:
        return
    _launch(
        _product,
        (tiles, triton.cdiv(width, COLUMNS)),
        x_TK,
        weight_ENK,
        out_TN,
        out_TN if places is None else places,
        len(x_TK),
        width,
        features,
        *x_TK.stride(),
        *weight_ENK.stride(),
        out_TN.stride(0),
        places is not None,
        ROWS,
        COLUMNS,
        STEP,
    )


def _softmax(x_TD: Tensor, *, log: bool) -> Tensor:
    x_TD = _aligned(x_TD)
    count, width = x_TD.shape
    out_TD = torch.empty_like(x_TD, dtype=torch.float32)
    if count:
        rows, block = _row_tile(width)
        _launch(_row_softmax, (triton.cdiv(count, rows),), x_TD, out_TD, count, width, log, rows, block)
    return out_TD


def _launch(kernel: Any, programs: tuple[int, ...], *arguments: Any) -> None:
    kernel[programs](*arguments)


def _aligned(x_TD: Tensor) -> Tensor:
    """The rows where Triton compiles the same reduction for all: contiguous, at a multiple of 16 bytes."""
    x_TD = x_TD.contiguous()
    return x_TD.clone() if x_TD.data_ptr() % 16 else x_TD


def _row_tile(width: int) -> tuple[int, int]:
    """The rows of a program, and the elements of each that it reduces at a time, by the rows' length alone."""
    block = min(BLOCK, triton.next_power_of_2(width))
    return BLOCK // block, block


@triton.jit(do_not_specialize=["total"])
def _product(
    x,
    weight,
    out,
    places,
    total,
    width,
    features,
    x_row,
    x_feature,
    weight_expert,
    weight_row,
    weight_feature,
    out_row,
    GROUPED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    tile = tl.program_id(0)
    if GROUPED:
        expert, first, end = tl.load(places + 3 * tile), tl.load(places + 3 * tile + 1), tl.load(places + 3 * tile + 2)
        weight += expert.to(tl.int64) * weight_expert
    else:
        first, end = tile * ROWS, total
    rows = (first + tl.arange(0, ROWS)).to(tl.int64)
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    step = tl.arange(0, STEP)
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for begin in range(0, features, STEP):
        at = begin + step
        known = at < features
        x_tile = tl.load(
            x + rows[:, None] * x_row + at[None, :] * x_feature, mask=(rows < end)[:, None] & known[None, :], other=0.0
        )
        weight_tile = tl.load(
            weight + columns[None, :] * weight_row + at[:, None] * weight_feature,
            mask=(columns < width)[None, :] & known[:, None],
            other=0.0,
        )
        sums = tl.dot(x_tile, weight_tile, sums, input_precision="ieee")
    tl.store(
        out + rows[:, None] * out_row + columns[None, :],
        sums.to(out.dtype.element_ty),
        mask=(rows < end)[:, None] & (columns < width)[None, :],
    )


@triton.jit(do_not_specialize=["count"])
def _normalize(x, weight, out, count, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane, place = tl.arange(0, BLOCK), (rows * width)[:, None]
    squares = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for begin in range(0, width, BLOCK):
        at = begin + lane[None, :]
        known = (rows < count)[:, None] & (at < width)
        part = tl.load(x + place + at, mask=known, other=0.0).to(tl.float32)
        squares += part * part
    factor = 1.0 / tl.sqrt(tl.sum(squares, 1) / width + eps)
    for begin in range(0, width, BLOCK):
        at = begin + lane[None, :]
        known = (rows < count)[:, None] & (at < width)
        part = tl.load(x + place + at, mask=known, other=0.0).to(tl.float32) * factor[:, None]
        part *= tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32)
        tl.store(out + place + at, part.to(out.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=["count"])
def _row_softmax(x, out, count, width, LOG: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane, place, here = tl.arange(0, BLOCK), (rows * width)[:, None], (rows < count)[:, None]
    highest = tl.full((ROWS, BLOCK), float("-inf"), dtype=tl.float32)
    for begin in range(0, width, BLOCK):
        at = begin + lane[None, :]
        # Rows after the last one are zeros, so that no sum is 0.
        part = tl.load(x + place + at, mask=here & (at < width), other=0.0).to(tl.float32)
        highest = tl.maximum(highest, tl.where(at < width, part, float("-inf")))
    top = tl.max(highest, 1)[:, None]
    sums = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for begin in range(0, width, BLOCK):
        at = begin + lane[None, :]
        part = tl.load(x + place + at, mask=here & (at < width), other=0.0).to(tl.float32)
        sums += tl.where(at < width, tl.exp(part - top), 0.0)
    total = tl.sum(sums, 1)[:, None]
    for begin in range(0, width, BLOCK):
        at = begin + lane[None, :]
        part = tl.load(x + place + at, mask=here & (at < width), other=0.0).to(tl.float32) - top
        if LOG:
            part -= tl.log(total)
        else:
            part = tl.exp(part) / total
        tl.store(out + place + at, part, mask=here & (at < width))


@triton.jit
def _attend(
    q,
    keys,
    values,
    out,
    lengths,
    pages,
    scale,
    q_token,
    q_head,
    cache_page,
    cache_head,
    cache_slot,
    out_token,
    out_head,
    pages_token,
    slots,
    group,
    width,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
):
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    member, feature, key = tl.arange(0, HEADS), tl.arange(0, WIDTH), tl.arange(0, KEYS)
    head = kv_head * group + member
    here = (member < group)[:, None] & (feature < width)[None, :]
    queries = tl.load(q + token * q_token + head[:, None] * q_head + feature[None, :], mask=here, other=0.0)
    length = tl.load(lengths + token)
    highest = tl.full((HEADS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((HEADS,), dtype=tl.float32)
    sums = tl.zeros((HEADS, WIDTH), dtype=tl.float32)
    for begin in range(0, length, KEYS):
        at = begin + key
        seen = at < length
        page = tl.load(pages + token * pages_token + at // slots, mask=seen, other=0).to(tl.int64)
        place = page * cache_page + kv_head * cache_head + (at % slots) * cache_slot
        known = seen[:, None] & (feature < width)[None, :]
        key_tile = tl.load(keys + place[:, None] + feature[None, :], mask=known, other=0.0)
        value_tile = tl.load(values + place[:, None] + feature[None, :], mask=known, other=0.0)
        scores = tl.dot(queries, tl.trans(key_tile), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        before, highest = highest, tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - highest[:, None])
        fade = tl.exp(before - highest)
        total = total * fade + tl.sum(weights, 1)
        sums = tl.dot(weights.to(value_tile.dtype), value_tile, sums * fade[:, None], input_precision="ieee")
    tl.store(
        out + token * out_token + head[:, None] * out_head + feature[None, :],
        (sums / total[:, None]).to(out.dtype.element_ty),
        mask=here,
    )
