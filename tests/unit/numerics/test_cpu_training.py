"""The CPU's norm and rotation compute torchtitan's values to the last bit; all gradients are as exact as autograd's."""

from collections.abc import Callable

import pytest
import torch

from goaly.models.definition import spec_of
from goaly.models.device import prepare_torchtitan
from goaly.models.families import architecture

prepare_torchtitan()

from torchtitan.models.common import CosSinRoPE, RMSNorm  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402

from goaly.models.tiny_model import TinyModel, model_config  # noqa: E402
from goaly.numerics.cpu_training import LeanLinear, LeanRMSNorm, LeanRoPE  # noqa: E402
from goaly.numerics.layer_replacement import replace_layers  # noqa: E402

TOKENS = 3000
"""More than one piece."""


def norms(kind: type[RMSNorm], width: int) -> Callable[..., torch.Tensor]:
    made = kind.Config(normalized_shape=width, eps=1e-6).build()

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(made, {"weight": weight}, (x,))

    return normed


def rotations(kind: type[CosSinRoPE]) -> Callable[..., torch.Tensor]:
    made = kind.Config(dim=32, max_seq_len=TOKENS).build()
    positions = torch.arange(TOKENS)[None] % 700

    def rotated(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return torch.cat(made(query, key, positions), 2)

    return rotated


def linears(kind: type[Linear], width: int, outputs: int) -> Callable[..., torch.Tensor]:
    made = kind.Config(in_features=width, out_features=outputs).build()

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(made, {"weight": weight}, (x,))

    return product


def value_and_gradients(
    layer: Callable[..., torch.Tensor], inputs: list[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = layer(*leaves)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype)
    return out.detach(), list(torch.autograd.grad(out, leaves, upstream))


@pytest.mark.parametrize("shape", [(1, TOKENS, 96), (1, TOKENS, 4, 32)], ids=["tokens", "heads"])
def test_the_norm_has_torchtitans_bits_and_a_gradient_no_less_exact(shape: tuple[int, ...]) -> None:
    inputs = [torch.randn(shape), 1 + 0.1 * torch.randn(shape[-1])]
    ours, our_gradients = value_and_gradients(norms(LeanRMSNorm, shape[-1]), inputs)
    theirs, their_gradients = value_and_gradients(norms(RMSNorm, shape[-1]), inputs)
    exact = value_and_gradients(norms(RMSNorm, shape[-1]), [tensor.double() for tensor in inputs])[1]
    assert torch.equal(ours, theirs)
    for mine, plain, true in zip(our_gradients, their_gradients, exact, strict=True):
        scale = true.abs().max()
        assert (mine - true).abs().max() <= 2 * (plain - true).abs().max() + 1e-7 * scale


@pytest.mark.parametrize("tokens", [1, 30, TOKENS])
def test_the_linear_layer_and_its_gradients_are_no_less_exact_than_torchs(tokens: int) -> None:
    inputs = [torch.randn(1, tokens, 256), torch.randn(96, 256)]
    layer = linears(LeanLinear, 256, 96)
    ours, our_gradients = value_and_gradients(layer, inputs)
    theirs, their_gradients = value_and_gradients(linears(Linear, 256, 96), inputs)
    exact, exact_gradients = value_and_gradients(linears(Linear, 256, 96), [tensor.double() for tensor in inputs])
    mine, plain = (ours, *our_gradients), (theirs, *their_gradients)
    for one, other, true in zip(mine, plain, (exact, *exact_gradients), strict=True):
        assert (one - true).abs().max() <= 2 * (other - true).abs().max() + 1e-6 * true.abs().max()
    assert torch.equal(layer(*inputs), ours)  # without gradients


def test_every_linear_layer_of_a_config_becomes_lean() -> None:
    decoder = spec_of(architecture(model_config(TinyModel(layers=2)))).model
    replace_layers(decoder, {Linear: LeanLinear})
    layers = [one for one in decoder.build().modules() if isinstance(one, Linear)]
    assert [type(one) for one in layers] == [LeanLinear] * (2 * 5 + 1)


def test_the_rotation_has_torchtitans_bits_in_both_directions() -> None:
    inputs = [torch.randn(1, TOKENS, 4, 32), torch.randn(1, TOKENS, 2, 32)]
    ours, our_gradients = value_and_gradients(rotations(LeanRoPE), inputs)
    theirs, their_gradients = value_and_gradients(rotations(CosSinRoPE), inputs)
    assert torch.equal(ours, theirs)
    assert all(torch.equal(mine, plain) for mine, plain in zip(our_gradients, their_gradients, strict=True))


def test_the_lean_gradient_is_in_use_where_a_model_trains_in_float32() -> None:
    x = torch.randn(1, 5, 96, requires_grad=True)
    layer = LeanRMSNorm.Config(normalized_shape=96, eps=1e-6).build()
    torch.nn.init.ones_(layer.weight)
    assert layer(x).grad_fn.name() == "_RMSNormBackward"
    with torch.no_grad():
        assert layer(x).grad_fn is None
    assert layer.bfloat16()(x.bfloat16()).grad_fn.name() != "_RMSNormBackward"
    query = torch.randn(1, 5, 4, 32, requires_grad=True)
    rope = LeanRoPE.Config(dim=32, max_seq_len=8).build()
    assert {out.grad_fn.name() for out in rope(query, query, torch.arange(5)[None])} == {"_RotationBackward"}
