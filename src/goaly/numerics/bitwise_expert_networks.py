"""The networks of experts with `model.numerics=bitwise`: a row gets the same bits, whatever is computed beside it.

On a CPU vLLM's kernel of experts computes a row in the same way in any batch, in float32 for any type of the model; the
outputs are rounded once. On a GPU the networks are exact products (numerics-1). The output of a slice of the hidden
features is that of a network that has only these. Gradients are those of ordinary products.

Shape suffixes: e experts, D model dim, F hidden features, R rows, grouped by expert, S slices of the hidden features, G
outputs of a product.

Invariants
    numerics-9: The kernel gives a row the bits that it gives in any other place, on any number of threads. The first
        use with networks of some widths checks it.
"""

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from goaly.base.errors import ConfigError
from goaly.numerics.bitwise_operations import on_gpu, silu
from goaly.numerics.cpu_training import quickly_multiplied

INSTRUCTIONS = "vec"
"""The kernel of float32 networks."""
PIECE = 1 << 20
"""Elements of weights that are put into the kernel's order at once, while they are in the processor's cache."""


class Packed(NamedTuple):
    """The weights in the kernel's order: each expert's first slices, then each one's second."""

    gates_and_ups: Tensor
    downs: Tensor
    slices: int


def networks(
    x_RD: Tensor,
    w1_eFD: Tensor,
    w2_eDF: Tensor,
    w3_eFD: Tensor,
    rows: Sequence[int],
    slices: int = 1,
    packed: Packed | None = None,
) -> Tensor:
    """Each expert's outputs for its rows, of each slice of the hidden features, side by side: `[R, S * D]`.
    `packed` are these weights, if they have been packed before."""
    if torch.is_grad_enabled():
        return _Networks.apply(x_RD, w1_eFD, w2_eDF, w3_eFD, rows, slices)
    if on_gpu(x_RD):
        from goaly.numerics.bitwise_kernels import by_expert

        hidden_RF = silu(by_expert(x_RD, w1_eFD, rows, 1)) * by_expert(x_RD, w3_eFD, rows, 1)
        return by_expert(hidden_RF, w2_eDF, rows, slices)
    return _by_kernel(x_RD, rows, packed or exactly_packed(w1_eFD, w2_eDF, w3_eFD, slices))


def exactly_packed(w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor, slices: int) -> Packed:
    """The weights in the kernel's order; ConfigError if it does not give rows of them the same bits in any place
    (numerics-9)."""
    _, hidden, width = w1_eFD.shape
    if not _kernel_is_exact(width, hidden // slices, torch.get_num_threads()):
        why = f"the kernel's result for a row of an expert of width {hidden} depends on its place"
        raise ConfigError([f"model.numerics=bitwise: cannot work on this machine: {why}"])
    return pack(w1_eFD, w2_eDF, w3_eFD, slices)


def pack(w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor, slices: int) -> Packed:
    """A float32 copy of the weights in the kernel's order."""
    experts, hidden, width = w1_eFD.shape
    part = hidden // slices
    shapes = (2 * part, width), (width, part)
    gates_and_ups, downs = (w1_eFD.new_empty(slices * experts, *shape, dtype=torch.float32) for shape in shapes)
    some = max(1, PIECE // (2 * part * width))
    for number, first in product(range(slices), range(0, experts, some)):
        of_slice, rows = slice(number * part, (number + 1) * part), slice(first, min(first + some, experts))
        place = slice(number * experts + rows.start, number * experts + rows.stop)
        both = torch.cat([w1_eFD[rows, of_slice], w3_eFD[rows, of_slice]], 1)
        for weight, packed in ((both, gates_and_ups), (w2_eDF[rows, :, of_slice].contiguous(), downs)):
            packed[place] = _kernels().cpu_prepack_moe_weight(weight.float(), INSTRUCTIONS)
    return Packed(gates_and_ups, downs, slices)


def _by_kernel(x_RD: Tensor, rows: Sequence[int], packed: Packed) -> Tensor:
    expert_R = torch.arange(len(rows), dtype=torch.int32).repeat_interleave(torch.tensor(rows), output_size=len(x_RD))
    return by_kernel(x_RD, expert_R, packed)


def by_kernel(x_RD: Tensor, expert_R: Tensor, packed: Packed) -> Tensor:
    """The output of its expert for each row, as `networks`, in any order of the experts."""
    (rows, width), slices, dtype = x_RD.shape, packed.slices, x_RD.dtype
    if slices > 1:
        x_RD = x_RD.repeat_interleave(slices, 0)
        first_S = torch.arange(0, len(packed.downs), len(packed.downs) // slices)
        expert_R = (expert_R[:, None] + first_S).flatten()
    x_RD = x_RD.float().contiguous()
    out_RD = x_RD.new_empty(rows * slices, width)
    if rows:
        each = torch.ones(len(x_RD), 1, dtype=torch.float32), expert_R.int()[:, None]
        weights = packed.gates_and_ups, packed.downs
        _kernels().cpu_fused_moe(out_RD, x_RD, *weights, None, None, *each, "silu", INSTRUCTIONS, True)
    return out_RD.view(rows, slices * width).to(dtype)


@cache
def _kernel_is_exact(width: int, hidden: int, threads: int) -> bool:
    """Whether the kernel gives rows the same bits in other places and without each other (numerics-9)."""
    random = torch.Generator().manual_seed(0)
    experts, each = 2, 80
    w1_eFD, w3_eFD = torch.randn(2, experts, hidden, width, generator=random, dtype=torch.float32)
    w2_eDF = torch.randn(experts, width, hidden, generator=random, dtype=torch.float32)
    packed = pack(w1_eFD, w2_eDF, w3_eFD, 1)
    x_RD = torch.randn(experts * each, width, generator=random, dtype=torch.float32)
    whole_RD = _by_kernel(x_RD, [each, each], packed)
    for start, size in ((0, 1), (3, 1), (5, 2), (7, 3), (1, 8), (2, 17), (9, 64)):
        rows = slice(each - start, each - start + size + 1)  # the last `start` of one expert, and of the next
        first = min(start, size + 1)
        if not torch.equal(_by_kernel(x_RD[rows], [first, size + 1 - first], packed), whole_RD[rows]):
            return False
    return True


class _Networks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RD: Tensor, w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor, rows: Sequence[int], slices: int
    ) -> Tensor:
        ctx.save_for_backward(x_RD, w1_eFD, w2_eDF, w3_eFD)
        ctx.rows, ctx.slices = rows, slices
        with torch.no_grad():
            return networks(x_RD, w1_eFD, w2_eDF, w3_eFD, rows, slices)

    @staticmethod
    def backward(ctx: Any, grad_RG: Tensor) -> tuple[Tensor | None, ...]:
        """An expert at a time, whose hidden features are computed once more: they stay in the processor's cache."""
        *inputs, grad_RG = quickly_multiplied(*ctx.saved_tensors, grad_RG)
        x_RD, w1_eFD, w2_eDF, w3_eFD = inputs
        grads = grad_x_RD, grad_w1_eFD, grad_w2_eDF, grad_w3_eFD = [torch.empty_like(one) for one in inputs]
        stop = 0
        for expert, count in enumerate(ctx.rows):
            start, stop = stop, stop + count
            x, grad_x, grad = x_RD[start:stop], grad_x_RD[start:stop], grad_RG[start:stop]
            gate, up = torch.mm(x, w1_eFD[expert].t()), torch.mm(x, w3_eFD[expert].t())
            active = torch.nn.functional.silu(gate)
            hidden = active * up
            grad_hidden = torch.empty_like(hidden)
            cut = grad, w2_eDF[expert], hidden, grad_hidden, grad_w2_eDF[expert]
            parts = (one.chunk(ctx.slices, 1) for one in cut)
            for grad_out, w2, of_slice, grad_of_slice, grad_w2 in zip(*parts, strict=True):
                torch.mm(grad_out, w2, out=grad_of_slice)
                torch.mm(grad_out.t(), of_slice, out=grad_w2)
            grad_up = active.mul_(grad_hidden)
            grad_gate = torch.ops.aten.silu_backward(grad_hidden.mul_(up), gate)
            torch.mm(grad_gate, w1_eFD[expert], out=grad_x)
            grad_x.addmm_(grad_up, w3_eFD[expert])
            torch.mm(grad_gate.t(), x, out=grad_w1_eFD[expert])
            torch.mm(grad_up.t(), x, out=grad_w3_eFD[expert])
        return *grads, None, None


def _kernels() -> Any:
    """vLLM's; only a process that computes imports them."""
    from vllm import _custom_ops

    return _custom_ops
