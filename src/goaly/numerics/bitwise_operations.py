"""The operations of `model.numerics=bitwise`: products, activations and softmaxes of rows that are independent.

On a GPU they are those of `bitwise_kernels.py`, in which a row never depends on another.

Products on a CPU are float32 for any type of the model, and rounded to that type once. oneDNN computes a row in the
same way in every product of enough rows, and in another way in one of a few rows. So few rows are padded, and the first
product with a weight of some shape is compared with the definition in numerics-1. On a machine where they differ, rows
are multiplied a tile at a time. A sampler on one rank has its weights in the order of vLLM's kernel, which is oneDNN,
too, and is compared in the same way.

torch reduces each row of a softmax by itself on a CPU. On a GPU its kernels may choose by the address of a row or the
number of rows how they reduce.

Shape suffixes: T tokens, K input features, N output features, R rows of a tile, D the last dimension.

Invariants
    numerics-1: A row of a product has the bits that a tile of `TILE` rows gives it: in any place of any batch, on any
        number of threads, and with any part of the output features.
    numerics-2: A product over features that tensor-parallel ranks divide is the sum of the products over `SLICES` equal
        parts of them, each rounded to the model's type. So one rank and `SLICES` ranks add the same numbers.
    numerics-3: An activation has the same bits in any place of a tensor: it is never in the remainder of a vector loop.
    numerics-5: A row's softmax has the same bits in any place of a tensor, in any number of rows.
"""

from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from goaly.base.errors import ConfigError
from goaly.numerics.cpu_training import linear_gradients, onednn_product, packed_weight, quickly_multiplied

TILE = 32
ROWS_OF_A_THREAD = 8
"""Fewest rows of a thread in a product. oneDNN computes one row alone in another way."""
LOOP = 64
"""Elements that torch's vector loops take at once are a divisor of this."""
GRAIN = 1 << 15
"""Fewest elements for which torch uses a further thread."""
PackedSlices = tuple[Any, ...]
"""A weight's slices of input features, as vLLM's handles."""


def on_gpu(tensor: Tensor) -> bool:
    """Whether the kernels of `bitwise_kernels.py` compute with this tensor."""
    return tensor.is_cuda


def product(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """`x @ weight.T`, of which each row is that of numerics-1."""
    if on_gpu(x_TK):
        from goaly.numerics import bitwise_kernels

        return bitwise_kernels.product(x_TK, weight_NK)
    (width, features), rows = weight_NK.shape, len(x_TK)
    x_TK = x_TK.float()
    if padding := -rows % row_multiple():
        x_TK = F.pad(x_TK, (0, 0, 0, padding))
    multiply = onednn_product if _whole_is_exact(features, width, torch.get_num_threads()) else _tiled
    return multiply(x_TK, weight_NK.float())[:rows].to(weight_NK.dtype)


def silu(x: Tensor) -> Tensor:
    """The activation of each element, over a number of elements without a remainder (numerics-3). A GPU computes every
    element alone."""
    if on_gpu(x):
        return F.silu(x)
    count = x.numel()
    threads = min(torch.get_num_threads(), -(-count // GRAIN))
    remainder = count % (LOOP * max(threads, 1))
    if not remainder:
        return F.silu(x)
    return F.silu(F.pad(x.reshape(-1), (0, LOOP * threads - remainder)))[:count].view(x.shape)


def softmax(x: Tensor) -> Tensor:
    """The softmax over the last dimension of a float32 tensor (numerics-5)."""
    return _Softmax.apply(x) if on_gpu(x) else F.softmax(x, dim=-1)


def log_softmax(x_TD: Tensor) -> Tensor:
    """The log-softmax of each row in float32 (numerics-5), without a gradient."""
    if on_gpu(x_TD):
        from goaly.numerics import bitwise_kernels

        return bitwise_kernels.log_softmax(x_TD)
    return x_TD.log_softmax(-1, dtype=torch.float32)


def on_local(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The function of each rank's part."""
    if not isinstance(x, DTensor):
        return function(x)
    return DTensor.from_local(function(x.to_local()), x.device_mesh, x.placements, run_check=False)


def pack(weight_NK: Tensor, slices: int) -> PackedSlices | None:
    """A copy of the weight in the order of vLLM's kernel, which needs no padding; None where that is not exact."""
    width, features = len(weight_NK), weight_NK.shape[1] // slices
    if not _packed_is_exact(features, width, torch.get_num_threads()):
        return None
    return tuple(packed_weight(part_NK.float()) for part_NK in weight_NK.chunk(slices, 1))


def packed_product(x: Tensor, packed: PackedSlices, dtype: torch.dtype) -> Tensor:
    """The product with packed slices of a weight, rounded to this type (numerics-2); without a gradient."""
    from vllm import _custom_ops as kernels

    parts = zip(packed, x.chunk(len(packed), -1), strict=True)
    products = (kernels.onednn_mm(handle, part.float().contiguous(), None).to(dtype) for handle, part in parts)
    return reduce(Tensor.add_, products)


def linear(x: Tensor, weight_NK: Tensor, slices: int) -> Tensor:
    """The product with a weight, summed in this number of slices of the input features (numerics-2)."""
    given = x.reshape(-1, x.shape[-1]), weight_NK, slices
    out_TN = _ExactLinear.apply(*given) if torch.is_grad_enabled() else _sliced(*given)
    return out_TN.view(*x.shape[:-1], len(weight_NK))


def _sliced(x_TK: Tensor, weight_NK: Tensor, slices: int) -> Tensor:
    parts = zip(x_TK.chunk(slices, 1), weight_NK.chunk(slices, 1), strict=True)
    return reduce(Tensor.add_, (product(*part) for part in parts))


class _ExactLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_NK: Tensor, slices: int) -> Tensor:
        ctx.save_for_backward(x_TK, weight_NK)
        return _sliced(x_TK, weight_NK, slices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_TK, weight_NK, grad = quickly_multiplied(*ctx.saved_tensors, grad)
        of_x, of_weight, _ = ctx.needs_input_grad
        if weight_NK.dtype == torch.float32 and not on_gpu(grad):
            return *linear_gradients(x_TK, weight_NK, grad, (of_x, of_weight)), None
        grad_x = torch.mm(grad, weight_NK) if of_x else None
        return grad_x, torch.mm(grad.t(), x_TK) if of_weight else None, None


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        from goaly.numerics import bitwise_kernels

        out = bitwise_kernels.softmax(x.reshape(-1, x.shape[-1])).view(x.shape)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return torch._softmax_backward_data(grad, out, -1, out.dtype)


def row_multiple() -> int:
    """The divisor of the number of rows on a CPU; others are padded."""
    return ROWS_OF_A_THREAD * torch.get_num_threads()


@cache
def _whole_is_exact(features: int, width: int, threads: int) -> bool:
    """Whether a product of all rows at once is that of numerics-1 here; ConfigError if a tile itself is not."""
    if not torch.backends.mkldnn.is_available():
        raise ConfigError(["model.numerics=bitwise: needs a torch with oneDNN on a CPU"])
    random = torch.Generator().manual_seed(0)
    multiple = row_multiple()
    x_TK = torch.randn(16 * multiple, features, generator=random, dtype=torch.float32)
    weight_NK = torch.randn(width, features, generator=random, dtype=torch.float32)
    expected_TN = _tiled(x_TK, weight_NK)

    def exact(multiply: Callable[[Tensor, Tensor], Tensor]) -> bool:
        starts_and_sizes = [(0, 1), (3, 1), (5, 2), (1, 3), (2, 7), (0, 16)]
        parts = [slice(start * multiple, (start + size) * multiple) for start, size in starts_and_sizes]
        whole = all(torch.equal(multiply(x_TK[part], weight_NK), expected_TN[part]) for part in parts)
        moved_TK, odd = x_TK.roll(TILE // 2 + 1, 0), slice(5, 5 + multiple)
        whole &= torch.equal(multiply(x_TK[odd], weight_NK), expected_TN[odd])
        return whole and torch.equal(multiply(moved_TK, weight_NK).roll(-TILE // 2 - 1, 0), expected_TN)

    if exact(onednn_product):
        return True
    if exact(_tiled):
        return False
    raise ConfigError(
        [
            f"model.numerics=bitwise: cannot work on this machine with {threads} threads: a row of a product over "
            f"{features} features depends on its place"
        ]
    )


@cache
def _packed_is_exact(features: int, width: int, threads: int) -> bool:
    """Whether vLLM's kernel gives rows the bits of numerics-1 on this machine, in any number."""
    from vllm import _custom_ops as kernels

    random = torch.Generator().manual_seed(0)
    x_TK = torch.randn(8 * TILE, features, generator=random, dtype=torch.float32)
    weight_NK = torch.randn(width, features, generator=random, dtype=torch.float32)
    expected_TN, handler = _tiled(x_TK, weight_NK), packed_weight(weight_NK)
    places = [(0, 1), (7, 1), (3, 2), (1, 3), (2, 7), (5, 17), (9, TILE), (1, 2 * TILE), (0, len(x_TK))]
    parts = [slice(start, start + size) for start, size in places]
    return all(torch.equal(kernels.onednn_mm(handler, x_TK[part], None), expected_TN[part]) for part in parts)


def _tiled(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    x_TK = F.pad(x_TK, (0, 0, 0, -len(x_TK) % TILE)) if len(x_TK) % TILE else x_TK
    return torch.cat([onednn_product(x_RK, weight_NK) for x_RK in x_TK.split(TILE)])
