"""Products of bfloat16 matrices by the matrix tiles of a CPU (AMX) for `model.numerics=bitwise`.

oneDNN divides a sum over many features where this is faster, and what is faster depends on the number of rows. vLLM's
kernel for batches of matrices never divides a sum: it adds the features in order, in float32, and rounds once. It goes
over its first matrix, which stays as it is in memory, once for a second one in the order of the tiles, which should fit
into the processor's cache. So a small weight is the second matrix, and a large one is the first and the rows the second
one, some at a time. A result has the same bits either way.

Shape suffixes: T tokens, K input features, N output features, C rows at a time, A and B rows of the two matrices.
"""

from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

TILE = 32
"""Rows of the second matrix, and features of both, are multiples of it."""
LEAST_ROWS = 8
"""Rows of the first matrix for which the kernel uses tiles; it needs more than 4."""
CACHED = 1 << 19
"""Most elements of a second matrix, 1 MiB."""


class Tiles(NamedTuple):
    """A small weight in the order of the tiles."""

    packed_1BK: torch.Tensor
    features: int
    width: int


def by_tiles(weight_NK: torch.Tensor) -> bool:
    """Whether a CPU multiplies with this weight by `tile_product`. Its type and input features decide, so all who
    multiply with it on the same kind of machine do the same."""
    return weight_NK.dtype == torch.bfloat16 and _is_exact(weight_NK.shape[-1])


@cache
def has_tiles() -> bool:
    """Whether this process may use matrix tiles, for which it asks the system, and vLLM has its kernels for them."""
    return torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx() and hasattr(_kernels(), "bmm_cpu")


def tile_product(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T`, of which each row is that of BW-1."""
    if fits_cache(weight_NK):
        return product_with_tiles(x_TK, pack_tiles(weight_NK))
    return _rows_in_tiles(x_TK, weight_NK)


def _rows_in_tiles(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    tokens, width = len(x_TK), len(weight_NK)
    weight_NK, x_TK = _padded(weight_NK, LEAST_ROWS), _padded(x_TK, 1)
    out_TN = x_TK.new_empty(tokens, width)
    rows = max(CACHED // x_TK.shape[1] // TILE, 1) * TILE
    for x_CK, out_CN in zip(x_TK.split(rows), out_TN.split(rows), strict=True):
        out_CN.copy_(_by_kernel(weight_NK, _in_tiles(x_CK)).t()[: len(out_CN), :width])
    return out_TN


def fits_cache(matrix: torch.Tensor) -> bool:
    """Whether a matrix is small enough to be the second one."""
    return matrix.numel() <= CACHED


def pack_tiles(weight_NK: torch.Tensor) -> Tiles:
    """A copy of a small weight for `product_with_tiles`."""
    width, features = weight_NK.shape
    return Tiles(_in_tiles(_padded(weight_NK, 1)), features, width)


def product_with_tiles(x_TK: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """`tile_product` with this weight."""
    out_AB = _by_kernel(_padded(x_TK, LEAST_ROWS), tiles.packed_1BK)
    return out_AB[: len(x_TK), : tiles.width].contiguous()


def _padded(matrix: torch.Tensor, least_rows: int) -> torch.Tensor:
    """The matrix with zeros up to so many rows, and a multiple of `TILE` features."""
    columns, rows = -matrix.shape[1] % TILE, max(0, least_rows - len(matrix))
    return F.pad(matrix, (0, columns, 0, rows)) if columns or rows else matrix


def _in_tiles(matrix_BK: torch.Tensor) -> torch.Tensor:
    """A second matrix in the order of the tiles, with zeros up to a multiple of `TILE` rows."""
    rows = -len(matrix_BK) % TILE
    matrix_BK = F.pad(matrix_BK, (0, 0, 0, rows)) if rows else matrix_BK.contiguous()
    return _kernels().convert_weight_packed(matrix_BK[None])


def _by_kernel(matrix_AK: torch.Tensor, packed_1BK: torch.Tensor) -> torch.Tensor:
    out_AB = matrix_AK.new_empty(len(matrix_AK), packed_1BK.shape[1])
    _kernels().bmm_cpu(out_AB[None], matrix_AK[None], packed_1BK, True, None)
    return out_AB


@cache
def _is_exact(features: int) -> bool:
    """Whether this machine has tiles, and the kernel gives rows the same bits in any place (BW-1)."""
    if not has_tiles():
        return False
    random = torch.Generator().manual_seed(0)
    x_TK = torch.randn(8 * TILE, features, generator=random).bfloat16()
    weight_NK = torch.randn(3 * TILE, features, generator=random).bfloat16()
    expected_TN = product_with_tiles(x_TK, pack_tiles(weight_NK))
    places = [(0, 1), (7, 1), (3, 2), (1, 3), (2, 7), (5, 17), (9, TILE), (1, 2 * TILE), (0, len(x_TK))]
    widths = (1, LEAST_ROWS, TILE + 1, len(weight_NK))
    for (start, size), width in product(places, widths):
        rows, some_NK = slice(start, start + size), weight_NK[:width]
        expected = expected_TN[rows, :width]
        if not torch.equal(product_with_tiles(x_TK[rows], pack_tiles(some_NK)), expected):
            return False
        if not torch.equal(_rows_in_tiles(x_TK[rows], some_NK), expected):
            return False
    return True


def _kernels() -> Any:
    """vLLM's; only a process that computes imports them."""
    import vllm._custom_ops  # noqa: F401 - registers them

    return torch.ops._C
