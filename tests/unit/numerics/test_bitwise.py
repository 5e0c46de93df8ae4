"""The layers of bitwise numerics give a token the same bits, whatever is computed beside it."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from goaly.models.device import prepare_torchtitan

prepare_torchtitan()

from torchtitan.models.common import ComplexRoPE, CosSinRoPE, RMSNorm  # noqa: E402

from goaly.numerics.bitwise_attention import (  # noqa: E402
    BitwiseAttention,
    PagedDocuments,
    Queries,
    write_pages,
)
from goaly.numerics.bitwise_layers import BitwiseLinear, KernelComplexRoPE, KernelRMSNorm, KernelRoPE  # noqa: E402
from goaly.numerics.bitwise_operations import product, silu  # noqa: E402
from goaly.numerics.cpu_attention import PackedAttention, PackedDocuments  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16]
COUNTS = (1, 2, 3, 5, 13, 16, 31, 33, 64, 200)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


SHAPES = [(96, 256), (100, 33), (256, 96), (1040, 33), (2048, 6), (2048, 200), (2048, 264), (6144, 100)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("features", "width"), SHAPES)
def test_a_row_of_a_product_is_the_same_in_any_number_of_rows_and_beside_any_columns(  # numerics-1
    threads: int, features: int, width: int, dtype: torch.dtype
):
    x, weight = random(400, features).to(dtype), random(width, features, seed=1).to(dtype)
    whole = product(x, weight)
    assert whole.is_contiguous()  # ranks exchange it
    for count, start in itertools.product(COUNTS, (0, 7)):
        assert torch.equal(product(x[start : start + count], weight), whole[start : start + count]), (count, start)
    assert torch.equal(product(x, weight[: width // 2]), whole[:, : width // 2])


def test_products_a_tile_at_a_time_have_the_bits_of_whole_ones(monkeypatch: pytest.MonkeyPatch):
    x, weight = random(100, 96), random(64, 96, seed=1)
    whole = product(x, weight)
    monkeypatch.setattr("goaly.numerics.bitwise_operations._whole_is_exact", lambda *_: False)
    assert torch.equal(product(x, weight), whole)


@pytest.mark.parametrize(("features", "width"), SHAPES)
def test_a_bfloat16_product_is_as_accurate_as_an_ordinary_one(features: int, width: int):
    x, weight = random(100, features).bfloat16(), random(width, features, seed=1).bfloat16()
    exact = x.double() @ weight.double().t()
    mine, plain = (float((one - exact).norm()) for one in (product(x, weight), F.linear(x, weight)))
    assert mine <= 1.001 * plain


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slices", [1, 2])
@torch.no_grad()
def test_a_packed_weight_gives_the_bits_of_one_that_is_not(  # numerics-1
    threads: int, slices: int, dtype: torch.dtype
):
    config = BitwiseLinear.Config(in_features=96, out_features=40, slices=slices)
    plain, packed = config.build(), config.build()
    for seed in (1, 2):
        for layer in (plain.to(dtype), packed.to(dtype)):
            layer.weight.copy_(random(*layer.weight.shape, seed=seed))
        packed.pack()
        assert packed._packed is not None
        x = random(200, 96).to(dtype)
        whole = plain(x)
        for count in COUNTS:
            assert torch.equal(packed(x[:count]), whole[:count]), count


@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_that_divide_the_features_add_up_to_what_one_rank_computes(dtype: torch.dtype):  # numerics-2
    alone = BitwiseLinear.Config(in_features=96, out_features=40, slices=2).build().to(dtype)
    x = random(50, 96).to(dtype)
    halves = [
        product(part, weight.contiguous()) for part, weight in zip(x.chunk(2, 1), alone.weight.chunk(2, 1), strict=True)
    ]
    assert torch.equal(alone(x), halves[1] + halves[0])


def gradients(layer: Any, given: list[torch.Tensor], upstream: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(layer(given[0]), given, upstream))


def test_a_linear_layer_has_the_gradients_of_an_ordinary_one():
    layer = BitwiseLinear.Config(in_features=96, out_features=40, slices=2).build()
    x, upstream = random(7, 9, 96).requires_grad_(), random(7, 9, 40, seed=1)
    given = [x, layer.weight]
    mine = gradients(layer, given, upstream)
    plain = gradients(lambda x: F.linear(x, layer.weight), given, upstream)
    for one, other in zip(mine, plain, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("multiplies_bfloat16", [False, True])
def test_the_gradients_of_a_bfloat16_layer_are_as_accurate_as_those_of_an_ordinary_one(
    monkeypatch: pytest.MonkeyPatch, multiplies_bfloat16: bool
):
    monkeypatch.setattr("goaly.numerics.cpu_training._multiplies_bfloat16", lambda: multiplies_bfloat16)
    layer = BitwiseLinear.Config(in_features=1040, out_features=300, slices=2).build().bfloat16()
    x, upstream = (random(7, 9, width).bfloat16().requires_grad_() for width in (1040, 300))
    weight = layer.weight.detach().double().requires_grad_()
    exact = gradients(lambda x: F.linear(x, weight), [x.detach().double().requires_grad_(), weight], upstream.double())
    mine = gradients(layer, [x, layer.weight], upstream)
    plain = gradients(lambda x: F.linear(x, layer.weight), [x, layer.weight], upstream)
    for one, other, true in zip(mine, plain, exact, strict=True):
        assert float((one - true).norm()) <= 1.01 * float((other - true).norm())


def norm(kind: type, width: int) -> Any:
    """A norm with random weights, the same of any kind."""
    built = kind.Config(normalized_shape=width, eps=1e-6).build()
    built.weight.data = random(width, seed=1)
    return built


@pytest.mark.parametrize("width", [32, 96])
@torch.no_grad()
def test_a_row_of_a_norm_is_the_same_in_any_place(threads: int, width: int):  # numerics-4
    x, layer = random(200, 2, width), norm(KernelRMSNorm, width)
    whole = layer(x)
    for start, count in ((0, 1), (1, 1), (7, 3), (5, 100)):
        rows = slice(start, start + count)
        assert torch.equal(layer(x[rows]), whole[rows])


def test_a_norm_has_the_values_and_gradients_of_an_ordinary_one():
    x, upstream, found = random(200, 2, 96).requires_grad_(), random(200, 2, 96, seed=2), []
    for kind in (KernelRMSNorm, RMSNorm):
        layer = norm(kind, 96)
        out = layer(x)
        found.append([out, *torch.autograd.grad(out, [x, layer.weight], upstream)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6 * float(other.detach().abs().max()), rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 32, 96])
@pytest.mark.parametrize("kind", [KernelRoPE, KernelComplexRoPE])
@torch.no_grad()
def test_a_rotated_token_is_the_same_in_any_place(
    threads: int, kind: Any, width: int, dtype: torch.dtype
):  # numerics-4
    rope = kind.Config(dim=width, max_seq_len=300).build()
    q, positions = random(1, 200, 4, width).to(dtype), 7 + torch.arange(200)
    k = random(1, 200, 1, width, seed=1).to(dtype)
    given = q.clone(), k.clone()
    whole = rope(q, k, positions[None])
    assert torch.equal(q, given[0])
    assert torch.equal(k, given[1])
    for start, count in ((0, 1), (1, 1), (7, 3), (5, 100)):
        rows = slice(start, start + count)
        part = rope(q[:, rows], k[:, rows], positions[None, rows])
        assert all(torch.equal(mine, of_all[:, rows]) for mine, of_all in zip(part, whole, strict=True))


@pytest.mark.parametrize("kind", [KernelRoPE, KernelComplexRoPE])
def test_a_position_that_the_model_does_not_have_is_an_error(kind: Any):
    q, k = random(1, 3, 4, 32), random(1, 3, 1, 32)
    with pytest.raises(RuntimeError, match="a position is beyond the 64 of the model"):
        kind.Config(dim=32, max_seq_len=64).build()(q, k, torch.tensor([[0, 64, 2]]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kinds", [(KernelRoPE, CosSinRoPE), (KernelComplexRoPE, ComplexRoPE)])
def test_a_rotation_has_the_values_and_gradients_of_an_ordinary_one(kinds: tuple[Any, Any], dtype: torch.dtype):
    both, found = random(2, 50, 6, 32).to(dtype).requires_grad_(), []
    q, k = both[:, :, :4], both[:, :, 4:]  # with gaps in memory
    positions = torch.stack([torch.arange(50), torch.arange(50).roll(20)])
    for kind in kinds:
        out = torch.cat(kind.Config(dim=32, max_seq_len=64).build()(q, k, positions), 2)
        found.append(
            [out, *torch.autograd.grad(out, [both], random(2, 50, 6, 32, seed=1).to(dtype), retain_graph=True)]
        )
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [6, 32, 33, 100, 250, 4100])
def test_an_activation_is_the_same_in_any_place(threads: int, width: int, dtype: torch.dtype):  # numerics-3
    x = 3 * random(400, width).to(dtype)
    whole = silu(x)
    assert torch.equal(torch.cat([silu(row[None]) for row in x[:20]]), whole[:20])
    for count, start in itertools.product(COUNTS, (0, 7)):
        assert torch.equal(silu(x[start : start + count]), whole[start : start + count]), (count, start)
    torch.testing.assert_close(whole, F.silu(x))


LENGTHS = (1, 31, 32, 33, 70, 5, 300)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tokens_attention_is_the_same_packed_in_chunks_and_from_any_pages(
    threads: int, dtype: torch.dtype
):  # numerics-6
    heads, kv_heads, width = 4, 2, 32
    tokens = sum(LENGTHS)
    q, k, v = (random(1, tokens, count, width, seed=count).to(dtype) for count in (heads, kv_heads, kv_heads))
    v = 3 * v
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    packed = BitwiseAttention.Config().build()(q, k, v, attention_masks=PagedDocuments.of(positions))[0]
    start = sum(LENGTHS[:-1])
    longest = LENGTHS[-1]
    cache = random(40, kv_heads, 64, width, seed=9).to(dtype) * 100
    pages = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:12].int()
    at = torch.arange(longest)
    slots = pages[at // 32].long() * 32 + at % 32
    keys, values = cache.chunk(2, dim=2)
    write_pages(k[0, start:], v[0, start:], keys, values, slots)
    for chunk in (at[:1], at[5:45], at[250:], at[-1:]):
        queries = Queries((chunk + 1).int(), pages.expand(len(chunk), -1).contiguous())
        out = torch.empty(len(chunk), heads, width, dtype=dtype)
        queries.attend(q[0, start + chunk], keys, values, out, width**-0.5)
        assert torch.equal(out, packed[start + chunk])


def test_the_attention_has_values_and_gradients_of_the_ordinary_one():
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    given = [random(1, sum(LENGTHS), heads, 32, seed=seed).requires_grad_() for seed, heads in enumerate((4, 2, 2))]
    upstream = random(1, sum(LENGTHS), 4, 32, seed=5)
    mine = BitwiseAttention.Config().build()(*given, attention_masks=PagedDocuments.of(positions))
    plain = PackedAttention.Config().build()(*given, attention_masks=PackedDocuments.of(positions))
    torch.testing.assert_close(mine, plain)
    for one, other in zip(*(torch.autograd.grad(out, given, upstream) for out in (mine, plain)), strict=True):
        torch.testing.assert_close(one, other)
