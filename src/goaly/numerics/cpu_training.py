"""torchtitan's norm, rotary embedding and linear layer for training on the CPU, faster.

Element-wise work is memory-bound on a CPU, and autograd's gradient of a norm written in small steps reads and writes
the activations a dozen times. Here each layer is one function with a hand-written gradient, which passes over the
activations a few times, in pieces that stay in the cache.

torch multiplies float32 matrices with MKL, which uses only half of the vector width of a CPU that Intel has not made.
oneDNN, which torch has for other types, uses all of it: on an AMD EPYC with AVX-512 a linear layer and its gradients
take half the time.

Shape suffixes: T tokens (with heads, where there are any), D the last dimension, O the output features.

The forward pass of norm and rotary embedding is bit-identical to torchtitan's, which a sampler computes without
gradients. Only plain float32 tensors that need gradients are handled here, by the linear layer also those that need
none; torchtitan handles all others. A linear layer has the same bits with gradients and without: a policy and its copy
agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.common import CosSinRoPE, RMSNorm
from torchtitan.models.common.linear import Linear

BATCH_SIZES = 512
"""Numbers of rows for which vLLM's kernel keeps what it has prepared."""
PIECE = 1 << 18
"""Elements of a piece, 1 MiB. Smaller pieces cost more in calls than they save."""


class LeanRMSNorm(RMSNorm):
    """RMSNorm with a hand-written gradient."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        """torchtitan's."""

    def forward(self, x: Tensor) -> Tensor:
        """The normalized input."""
        if _plain(x, self.weight) and self.eps is not None:
            return _RMSNorm.apply(x, self.weight, self.eps)
        return super().forward(x)


class LeanRoPE(CosSinRoPE):
    """Rotary embedding with a hand-written gradient: the inverse rotation."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """torchtitan's."""

    @staticmethod
    def apply_rotary_emb(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate by the cached angles."""
        if _plain(query, key):
            return _Rotation.apply(query, rope_cache), _Rotation.apply(key, rope_cache)
        return CosSinRoPE.apply_rotary_emb(query, key, rope_cache)


class LeanLinear(Linear):
    """A linear layer whose products oneDNN computes."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """torchtitan's."""

    def forward(self, input: Tensor) -> Tensor:
        """The product with the weight."""
        if self.bias is None and not isinstance(self.weight, DTensor):
            return lean_linear(input, self.weight)
        return super().forward(input)


def lean_linear(x: Tensor, weight_OD: Tensor) -> Tensor:
    """The product of `x` with a weight, by oneDNN if it can."""
    if torch.backends.mkldnn.is_available() and x.device.type == "cpu" and _is_float32(x, weight_OD):
        return _LeanProduct.apply(x, weight_OD)
    return torch.nn.functional.linear(x, weight_OD)


def _plain(*tensors: Tensor) -> bool:
    """Whether a gradient is needed and these are unsharded float32 tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors) and _is_float32(*tensors)


def _is_float32(*tensors: Tensor) -> bool:
    return all(tensor.dtype == torch.float32 and not isinstance(tensor, DTensor) for tensor in tensors)


def _pieces(*tensors_TD: Tensor) -> Any:
    """The rows of the tensors in pieces."""
    rows = max(1, PIECE // tensors_TD[0].shape[1])
    return zip(*(tensor.split(rows) for tensor in tensors_TD), strict=True)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        x_TD = x.reshape(-1, len(weight_D))
        scale_T1 = x_TD.new_empty(len(x_TD), 1)
        out_TD = torch.empty_like(x_TD)
        for x_, scale_, out_ in _pieces(x_TD, scale_T1, out_TD):
            torch.mean(torch.mul(x_, x_, out=out_), 1, keepdim=True, out=scale_).add_(eps).rsqrt_()
            torch.mul(x_, scale_, out=out_).mul_(weight_D)
        ctx.save_for_backward(x_TD, weight_D, scale_T1)
        return out_TD.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x_TD, weight_D, scale_T1 = ctx.saved_tensors
        return *norm_gradients(x_TD, weight_D, scale_T1, grad), None


def norm_gradients(x_TD: Tensor, weight_D: Tensor, scale_T1: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the input and the weight of a norm, of which `scale_T1` is one over the root mean square."""
    grad_TD = grad.reshape(x_TD.shape)
    grad_x_TD = torch.empty_like(x_TD)
    grad_weight_D = torch.zeros_like(weight_D)
    for x_, scale_, grad_, grad_x_ in _pieces(x_TD, scale_T1, grad_TD, grad_x_TD):
        normed = x_ * scale_
        product = torch.mul(grad_, normed, out=grad_x_)
        grad_weight_D += product.sum(0)
        along_1 = torch.mv(product, weight_D)[:, None].div_(-len(weight_D))
        torch.mul(grad_, weight_D, out=grad_x_).addcmul_(normed, along_1).mul_(scale_)
    return grad_x_TD.view(grad.shape), grad_weight_D


class _LeanProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OD: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_OD)
        return onednn_product(x.reshape(-1, x.shape[-1]), weight_OD).view(*x.shape[:-1], len(weight_OD))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight_OD = ctx.saved_tensors
        return linear_gradients(x, weight_OD, grad, ctx.needs_input_grad)


def linear_gradients(
    x: Tensor, weight_OD: Tensor, grad: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of a float32 linear layer's input and weight, those that are needed."""
    grad_TO, x_TD = grad.reshape(-1, grad.shape[-1]).contiguous(), x.reshape(-1, x.shape[-1])
    grad_x = onednn_product(grad_TO, weight_OD.t()).view(x.shape) if needed[0] else None
    return grad_x, onednn_product(grad_TO.t(), x_TD.t()) if needed[1] else None


def onednn_product(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product of `a` and the transpose of `b`, both float32, by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(_dense(a), _dense(b), None, "none", [], "")


def quickly_multiplied(*tensors: Tensor) -> list[Tensor]:
    """The tensors, those of bfloat16 as float32 on a CPU that has no instructions for them: torch multiplies one number
    at a time there, which takes 8 to 80 times as long."""
    slow = tensors[0].dtype == torch.bfloat16 and not tensors[0].is_cuda and not _multiplies_bfloat16()
    return [tensor.float() if slow else tensor for tensor in tensors]


@cache
def _multiplies_bfloat16() -> bool:
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def packed_weight(weight_OD: Tensor) -> Any:
    """A copy of a float32 weight in the order of vLLM's kernel, as that kernel's handle."""
    from vllm import _custom_ops as kernels

    return kernels.create_onednn_mm(weight_OD.contiguous().t(), BATCH_SIZES)


def _dense(matrix: Tensor) -> Tensor:
    """The matrix without gaps in memory: oneDNN takes a thousand times as long for others."""
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor) -> Tensor:
        ctx.save_for_backward(angles)
        return _rotated(x, angles, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (angles,) = ctx.saved_tensors
        return _rotated(grad, angles, -1.0), None


def _rotated(x: Tensor, angles: Tensor, direction: float) -> Tensor:
    """`x * cos + rotate_half(x) * sin`; the matrix product swaps and negates halves exactly."""
    width = x.shape[-1]
    cos, sin = angles.split(width, -1)
    turned = torch.mm(x.reshape(-1, width), _half_turn(width, direction)).view(x.shape)
    return (x * cos).add_(turned * sin)  # selective checkpointing keeps the result of a product


@cache
def _half_turn(width: int, direction: float) -> Tensor:
    half = torch.eye(width // 2)
    zero = torch.zeros_like(half)
    return direction * torch.cat([torch.cat([zero, half], 1), torch.cat([-half, zero], 1)])
