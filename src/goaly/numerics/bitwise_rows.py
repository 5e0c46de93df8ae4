"""Softmaxes of `model.numerics=bitwise`.

On a CPU torch reduces each row by itself. On a GPU its kernels may choose by the address of a row or the number of rows
how they reduce; there the operations are those of `bitwise_kernels.py`. Gradients are those of ordinary layers.

Shape suffixes: T rows, D the last dimension.

Invariants
    BX-1  A row's softmax has the same bits in any place of a tensor, in any number of rows.
"""

from typing import Any

import torch
import torch.nn.functional as F

from goaly.numerics.bitwise import on_gpu


def softmax(x: torch.Tensor) -> torch.Tensor:
    """The softmax over the last dimension of a float32 tensor (BX-1)."""
    return _Softmax.apply(x) if on_gpu(x) else F.softmax(x, dim=-1)


def log_softmax(x_TD: torch.Tensor) -> torch.Tensor:
    """The log-softmax of each row in float32 (BX-1), without a gradient."""
    if on_gpu(x_TD):
        from goaly.numerics import bitwise_kernels

        return bitwise_kernels.log_softmax(x_TD)
    return x_TD.log_softmax(-1, dtype=torch.float32)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        from goaly.numerics import bitwise_kernels

        out = bitwise_kernels.softmax(x.reshape(-1, x.shape[-1])).view(x.shape)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (out,) = ctx.saved_tensors
        return torch._softmax_backward_data(grad, out, -1, out.dtype)
