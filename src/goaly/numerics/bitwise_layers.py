"""The layers of `model.numerics=bitwise`: a token gets the same bits, whatever is computed beside it.

Trainer and sampler build the same layers, so their log-probs are equal to the last bit. Only forward passes are exact;
gradients are those of ordinary layers. Attention is in `bitwise_attention.py`, experts are in `bitwise_experts.py`.

Norms and rotations on a CPU are vLLM's kernels for float32: torchtitan writes a norm as six operations and a rotation
as sixteen. On a GPU the norm is that of `bitwise_kernels.py`. Other types on a CPU, and rotations on a GPU, are
torchtitan's: the kernel would round angles to bfloat16. Samplers of fast numerics on CPUs use these layers, too.

torchtitan's complex rotation of adjacent features is one product, but a complex product has other bits in the remainder
of a vector loop. Here it is the kernel's on a CPU, in float32 for any type.

Shape suffixes: T tokens, D the last dimension.

Invariants
    numerics-4: A norm gives a row, and a rotation gives a token, the same bits in any place.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, RMSNorm
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import RoutedExperts, TokenChoiceTopKRouter

from goaly.numerics import SLICES
from goaly.numerics.bitwise_experts import BitwiseDispatcher, BitwiseExperts, BitwiseRoutedExperts, BitwiseRouter
from goaly.numerics.bitwise_operations import PackedSlices, linear, on_gpu, on_local, pack, packed_product, silu
from goaly.numerics.cpu_training import LeanRMSNorm, LeanRoPE, norm_gradients
from goaly.numerics.experts import Dispatcher, Experts
from goaly.numerics.layer_replacement import of_rank, replace_layers


def make_bitwise(decoder: Any) -> None:
    """Replace the layers in the config of a torchtitan decoder."""
    layers = {
        Linear: BitwiseLinear,
        FeedForward: BitwiseFeedForward,
        TokenChoiceTopKRouter: BitwiseRouter,
        RoutedExperts: BitwiseRoutedExperts,
        Experts: BitwiseExperts,
        Dispatcher: BitwiseDispatcher,
        ComplexRoPE: KernelComplexRoPE,
    }
    replace_layers(decoder, layers | dict.fromkeys((RMSNorm, LeanRMSNorm), KernelRMSNorm))
    replace_layers(decoder, dict.fromkeys((CosSinRoPE, LeanRoPE), KernelRoPE))
    for layer in decoder.layers:
        layer.attention.wo.slices = SLICES
        if layer.moe is None:
            layer.feed_forward.w2.slices = SLICES


class BitwiseLinear(Linear):
    """A linear layer whose rows do not depend on each other's number (numerics-1)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """A linear layer's, and the parts in which its input features are summed (numerics-2)."""

        slices: int = 1

    def __init__(self, config: Config):
        super().__init__(config)
        self._slices = config.slices
        self._packed: PackedSlices | None = None

    def pack(self) -> None:
        """Copy the weight into the order of vLLM's kernel, for a sampler on one rank; again whenever it changes."""
        weight = self.weight
        is_whole = weight.shape == (self.out_features, self.in_features) and not isinstance(weight, DTensor)
        self._packed = pack(weight.detach(), self._slices) if is_whole and not on_gpu(weight) else None

    def forward(self, input: Tensor) -> Tensor:
        """The product with the weight."""
        weight = self.weight
        if self._packed is not None:
            return packed_product(input, self._packed, weight.dtype)
        if not isinstance(input, DTensor):
            return self._of_rank(input, of_rank(weight))
        assert isinstance(weight, DTensor), "tensor-parallel layers exchange DTensors"
        mesh, (placement,) = weight.device_mesh, weight.placements
        (given,) = input.placements
        out_placement: Placement
        input_gradient, weight_gradient = given, placement
        match placement:
            case Shard(dim=0):
                out_placement, input_gradient = Shard(input.ndim - 1), Partial()
            case Shard():
                out_placement = Partial()
            case _:
                out_placement = given
                weight_gradient = Partial() if isinstance(given, Shard) else placement
        x, w = input.to_local(grad_placements=[input_gradient]), weight.to_local(grad_placements=[weight_gradient])
        return DTensor.from_local(self._of_rank(x, w), mesh, [out_placement], run_check=False)

    def _of_rank(self, x: Tensor, weight: Tensor) -> Tensor:
        """The output of a rank that has this part of the weight."""
        return linear(x, weight, self._slices * weight.shape[1] // self.in_features)


class BitwiseFeedForward(FeedForward):
    """A gated feed-forward network with an exact activation (numerics-3)."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        """torchtitan's."""

    def forward(self, x: Tensor) -> Tensor:
        """The network's output."""
        return self.w2(on_local(silu, self.w1(x)) * self.w3(x))


class KernelRMSNorm(RMSNorm):
    """RMSNorm whose rows do not depend on their place (numerics-4)."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        """torchtitan's."""

    def forward(self, x: Tensor) -> Tensor:
        """The normalized input."""
        weight = self.weight
        if self.eps is None or not (x.dtype == torch.float32 or on_gpu(x)):
            return super().forward(x)
        if not isinstance(x, DTensor):
            return _norm(x, weight, self.eps)
        assert isinstance(weight, DTensor), "tensor-parallel layers exchange DTensors"
        (given,) = x.placements
        weight_D = weight.to_local(grad_placements=[Partial() if isinstance(given, Shard) else Replicate()])
        return DTensor.from_local(_norm(x.to_local(), weight_D, self.eps), x.device_mesh, [given], run_check=False)


class KernelRoPE(CosSinRoPE):
    """Rotary embedding whose tokens do not depend on their place (numerics-4)."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """torchtitan's."""

    def _precompute_cache(self) -> Tensor:
        """The cosine and the sine of each angle once, `[positions, dim]`; torchtitan's cache has them twice."""
        cos, sin = super()._precompute_cache().chunk(2, -1)
        half = self.config.dim // 2
        return torch.cat([cos[:, :half], sin[:, :half]], -1).contiguous()

    def forward(self, query: Tensor, key: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The rotated queries and keys."""
        if positions is None or query.dtype != torch.float32 or on_gpu(query):
            return super().forward(query, key, positions)
        return _rotate(query, key, positions, self.cache, of_halves=True)

    @staticmethod
    def apply_rotary_emb(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
        """torchtitan's rotation."""
        cos, sin = rope_cache.chunk(2, -1)
        return CosSinRoPE.apply_rotary_emb(query, key, torch.cat([cos, cos, sin, sin], -1))


class KernelComplexRoPE(ComplexRoPE):
    """Rotary embedding of adjacent features whose tokens do not depend on their place (numerics-4)."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        """torchtitan's."""

    def _precompute_cache(self) -> Tensor:
        """The cosine and the sine of each angle, `[positions, dim]`; torchtitan's cache has them as complex numbers."""
        turns = super()._precompute_cache()
        return torch.cat([turns.real, turns.imag], -1)

    def forward(self, query: Tensor, key: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The rotated queries and keys."""
        if positions is None or on_gpu(query):
            return super().forward(query, key, positions)
        return _rotate(query, key, positions, self.cache, of_halves=False)

    @staticmethod
    def apply_rotary_emb(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
        """torchtitan's rotation."""
        return ComplexRoPE.apply_rotary_emb(query, key, torch.complex(*rope_cache.chunk(2, -1)))


def _norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return _Norm.apply(x, weight_D, eps) if torch.is_grad_enabled() else _normed(x, weight_D, eps)


def _normed(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    if on_gpu(x):
        from goaly.numerics import bitwise_kernels

        return bitwise_kernels.normalized(x.reshape(-1, x.shape[-1]), weight_D, eps).view(x.shape)
    from vllm import _custom_ops as kernels

    out = torch.empty(x.shape)
    kernels.rms_norm(out, x.contiguous(), weight_D, eps)
    return out


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight_D)
        ctx.eps = eps
        return _normed(x, weight_D, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_D = ctx.saved_tensors
        if on_gpu(x):
            given = [one.detach().requires_grad_() for one in (x, weight_D)]
            with torch.enable_grad():
                out = F.rms_norm(given[0], weight_D.shape, given[1], ctx.eps)
            return *torch.autograd.grad(out, given, grad), None
        x_TD = x.reshape(-1, len(weight_D))
        scale_T1 = torch.linalg.vector_norm(x_TD, dim=1, keepdim=True).square_().div_(len(weight_D))
        return *norm_gradients(x_TD, weight_D, scale_T1.add_(ctx.eps).rsqrt_(), grad), None


def _rotate(query: Tensor, key: Tensor, positions: Tensor, cache: Tensor, *, of_halves: bool) -> tuple[Tensor, Tensor]:
    """Queries and keys whose features are rotated in pairs: one of each half, or adjacent ones."""
    q, k = of_rank(query), of_rank(key)
    position_T, angles = of_rank(positions).expand(q.shape[:2]).flatten(), of_rank(cache)
    torch._assert_async((position_T < len(angles)).all(), f"a position is beyond the {len(angles)} of the model")
    turn = _Turn.apply if torch.is_grad_enabled() else _turned
    turned_q, turned_k = turn(q, k, position_T, angles, of_halves)
    return _divided_as(query, turned_q), _divided_as(key, turned_k)


def _divided_as(given: Tensor, part: Tensor) -> Tensor:
    """A rank's part of a tensor that is divided as the given one."""
    if not isinstance(given, DTensor):
        return part
    return DTensor.from_local(part, given.device_mesh, given.placements, run_check=False)


def _turned(query: Tensor, key: Tensor, position_T: Tensor, cache: Tensor, of_halves: bool) -> tuple[Tensor, Tensor]:
    from vllm import _custom_ops as kernels

    q, k = (  # the kernel writes over them
        one.to(torch.float32, copy=True, memory_format=torch.contiguous_format) for one in (query, key)
    )
    flat_q, flat_k = (one.view(len(position_T), -1) for one in (q, k))
    kernels.rotary_embedding(position_T, flat_q, flat_k, q.shape[-1], cache, of_halves)
    return q.to(query.dtype), k.to(key.dtype)


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, position_T: Tensor, cache: Tensor, of_halves: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(position_T, cache)
        ctx.of_halves = of_halves
        return _turned(query, key, position_T, cache, of_halves)

    @staticmethod
    def backward(ctx: Any, grad_query: Tensor, grad_key: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """The inverse rotation."""
        position_T, cache = ctx.saved_tensors
        cos_TD, sin_TD = cache[position_T].chunk(2, -1)
        back_TD = torch.cat([cos_TD, -sin_TD], -1)
        turned = _turned(grad_query, grad_key, torch.arange(len(position_T)), back_TD, ctx.of_halves)
        return *turned, None, None, None
