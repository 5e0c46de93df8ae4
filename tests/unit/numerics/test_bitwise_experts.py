"""Experts with bitwise numerics give a token the same bits, whatever is computed beside it and whoever has them."""

import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch

from goaly.base.errors import ConfigError
from goaly.models.definition import spec_of
from goaly.models.device import prepare_torchtitan

prepare_torchtitan()

from goaly.models.families import architecture  # noqa: E402
from goaly.models.tiny_model import TinyModel, model_config  # noqa: E402
from goaly.numerics.bitwise_expert_networks import networks  # noqa: E402
from goaly.numerics.bitwise_experts import Combined, highest  # noqa: E402
from goaly.numerics.bitwise_layers import make_bitwise  # noqa: E402
from tests.unit.numerics.test_bitwise import random  # noqa: E402

pytestmark = pytest.mark.slow

DTYPES = [torch.float32, torch.bfloat16]
COUNTS = (1, 2, 5, 16, 33, 150)
EXPERTS, CHOSEN, DIM = 6, 3, 96
HIDDEN = 128
TOKENS = 200


def layer(numerics: str = "bitwise", dtype: torch.dtype = torch.float32) -> Any:
    """A layer of experts with random weights, the same with any numerics."""
    size = TinyModel(layers=1, dim=DIM, experts=EXPERTS, experts_per_token=CHOSEN, hidden_dim=HIDDEN)
    decoder = spec_of(architecture(model_config(size))).model
    if numerics == "bitwise":
        make_bitwise(decoder)
    built = decoder.layers[0].moe.build()
    with torch.no_grad():
        for seed, parameter in enumerate(built.parameters()):
            parameter.copy_(random(*parameter.shape, seed=seed) * 0.2)
    return built.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_a_token_has_the_same_experts_weights_and_output_in_any_batch(
    threads: int, dtype: torch.dtype
):  # numerics-7 numerics-8 numerics-9 numerics-3
    experts, x = layer(dtype=dtype), random(1, TOKENS, DIM, seed=9).to(dtype)
    whole, routed = experts(x), experts.router(x)
    assert routed[2].dtype == torch.float32
    for count, start in itertools.product(COUNTS, (0, 7)):
        place = slice(start, start + count)
        assert torch.equal(experts(x[:, place]), whole[:, place]), (count, start)
        for one, other in zip(experts.router(x[:, place]), routed, strict=True):
            assert torch.equal(one, other[:, place])


@torch.no_grad()
def test_threads_change_no_bit():
    x, experts, found = random(1, TOKENS, DIM, seed=9), layer(), []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(experts(x))
    torch.set_num_threads(before)
    assert torch.equal(*found)


def test_of_equal_scores_the_first_experts_are_chosen_in_the_order_of_their_numbers():  # numerics-7
    scores = torch.tensor(
        [[0.1, 0.2, 0.1, 0.2, 0.2, 0.2], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0.1, 0.1, 0.1, 0.5, 0.1, 0.1]]
    )
    assert highest(scores, 3).tolist() == [[1, 3, 4], [0, 1, 2], [0, 1, 3]]
    many = torch.zeros(300, 64)
    many[:, 5::7] = 0.5
    assert torch.equal(highest(many, 4), torch.tensor([5, 12, 19, 26]).expand(300, -1))


@torch.no_grad()
def test_choices_that_are_replayed_have_the_bits_of_the_routers_own():
    experts, x = layer(), random(1, TOKENS, DIM, seed=9)
    own, (_, choices, _) = experts(x), experts.router(x)
    experts.choices_BLK = choices.flip(-1).to(torch.uint8)
    experts.replayed_BL1 = (torch.arange(TOKENS) % 3 > 0)[None, :, None]
    assert torch.equal(experts(x), own)


ROWS = (5, 0, 16, 31, 1, 47)
"""Rows of each expert."""


def weights(dtype: torch.dtype) -> list[torch.Tensor]:
    """Of the experts' networks: gates, down and up projections."""
    gates, ups = (random(EXPERTS, HIDDEN, DIM, seed=seed).to(dtype) for seed in (1, 3))
    return [gates, random(EXPERTS, DIM, HIDDEN, seed=2).to(dtype), ups]


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_the_outputs_of_an_expert_are_those_of_its_rows_and_of_each_slice_alone(
    threads: int, dtype: torch.dtype
):  # numerics-9
    x, (w1, w2, w3) = random(sum(ROWS), DIM).to(dtype), weights(dtype)
    found = networks(x, w1, w2, w3, ROWS, 2).split(ROWS)
    for number, (rows, of_expert) in enumerate(zip(found, x.split(ROWS), strict=True)):
        own = slice(number, number + 1)
        for half, out in zip((slice(0, HIDDEN // 2), slice(HIDDEN // 2, None)), rows.chunk(2, 1), strict=True):
            assert torch.equal(out, networks(of_expert, w1[own, half], w2[own, :, half], w3[own, half], [len(rows)]))


def test_the_networks_of_experts_have_ordinary_values_and_gradients():
    inputs = [one.requires_grad_() for one in (random(sum(ROWS), DIM), *weights(torch.float32))]
    plain = []
    for x, w1, w2, w3 in zip(inputs[0].split(ROWS), *inputs[1:], strict=True):
        features = torch.nn.functional.silu(x @ w1.t()) * (x @ w3.t())
        plain += [torch.cat([a @ b.t() for a, b in zip(features.chunk(2, 1), w2.chunk(2, 1), strict=True)], 1)]
    found, upstream = [], random(sum(ROWS), 2 * DIM, seed=4)
    x, w1, w2, w3 = inputs
    for out in (networks(x, w1, w2, w3, ROWS, 2), torch.cat(plain)):
        found.append([out, *torch.autograd.grad(out, inputs, upstream)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6 * float(other.detach().abs().max()), rtol=1e-5)


def rank(dtype: torch.dtype, *, hidden: slice = slice(None), own: slice = slice(None)) -> Any:
    """What a rank with these hidden features and experts gives for each token: the sums of its slices `[T, S * D]`."""
    experts = layer(dtype=dtype)
    x = random(1, TOKENS, DIM, seed=9).to(dtype)
    weights, chosen, _ = experts.router(x)
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
    inner = experts.routed_experts.inner_experts
    for name, part in (("w1_EFD", (own, hidden)), ("w3_EFD", (own, hidden)), ("w2_EDF", (own, slice(None), hidden))):
        setattr(inner, name, torch.nn.Parameter(getattr(inner, name)[part].contiguous()))
    rows, sizes, (sent, _) = experts.routed_experts.token_dispatcher.dispatch(x[0], weights[0], chosen[0], counts)
    numbers = torch.arange(EXPERTS).repeat_interleave(sizes)
    mine = torch.isin(numbers, torch.arange(EXPERTS)[own])
    token, weight = sent.token_indices_experts_sorted_N[mine], sent.topk_scores_experts_sorted_N[mine]
    lower = int((numbers[mine] < EXPERTS // 2).sum())
    return Combined.of(token, weight, TOKENS, lower).sums(inner(rows[mine], sizes[own]))


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_ranks_that_divide_the_experts_or_their_features_add_up_to_what_one_computes(dtype: torch.dtype):  # numerics-8
    alone = layer(dtype=dtype)(random(1, TOKENS, DIM, seed=9).to(dtype))[0]
    by_features = [rank(dtype, hidden=half) for half in (slice(0, HIDDEN // 2), slice(HIDDEN // 2, None))]
    assert torch.equal(by_features[1] + by_features[0], alone)
    by_experts = [rank(dtype, own=half) for half in (slice(0, EXPERTS // 2), slice(EXPERTS // 2, None))]
    first, second = (by_experts[1] + by_experts[0]).chunk(2, 1)
    assert torch.equal(first + second, alone)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_packed_weights_give_the_bits_of_those_that_are_not_until_they_change(  # numerics-8
    threads: int, dtype: torch.dtype
):
    experts = layer(dtype=dtype)
    for seed, count in ((9, TOKENS), (8, 7), (7, 1)):
        x = random(1, count, DIM, seed=seed).to(dtype)
        experts.routed_experts.inner_experts.packed = None
        alone = experts(x)
        experts.routed_experts.inner_experts.pack()
        assert torch.equal(experts(x), alone)
    experts.routed_experts.inner_experts.w2_EDF *= 2
    experts.routed_experts.inner_experts.pack()
    assert torch.equal(experts(x), 2 * alone)


def test_a_kernel_that_is_not_exact_is_refused_when_weights_are_packed(monkeypatch: pytest.MonkeyPatch):  # numerics-9
    monkeypatch.setattr("goaly.numerics.bitwise_expert_networks._kernel_is_exact", lambda *_: False)
    with pytest.raises(ConfigError, match=f"a row of an expert of width {HIDDEN} depends on its place"):
        layer().routed_experts.inner_experts.pack()


@torch.no_grad()
def test_bfloat16_networks_are_float32_ones_whose_outputs_are_rounded_once():
    x, (w1, w2, w3) = random(sum(ROWS), DIM).bfloat16(), weights(torch.bfloat16)
    in_float32 = networks(x.float(), w1.float(), w2.float(), w3.float(), ROWS)
    assert torch.equal(networks(x, w1, w2, w3, ROWS), in_float32.bfloat16())


def test_a_process_that_has_not_multiplied_yet_may_compute_networks():  # numerics-9
    of_experts = ", ".join(f"torch.ones(2, {shape}).bfloat16()" for shape in ("32, 64", "64, 32", "32, 64"))
    computed = f"import torch\nfrom goaly.numerics.bitwise_expert_networks import networks\nwith torch.no_grad():\n\
    networks(torch.ones(4, 64).bfloat16(), {of_experts}, [1, 3])"
    subprocess.run([sys.executable, "-c", computed], check=True)


@torch.no_grad()
def test_bfloat16_networks_are_as_accurate_as_ordinary_ones():
    x, (w1, w2, w3) = random(sum(ROWS), DIM).bfloat16(), weights(torch.bfloat16)

    def of(kind: torch.dtype) -> torch.Tensor:
        of_experts = [
            (torch.nn.functional.silu(rows @ gate.t()) * (rows @ up.t())) @ down.t()
            for rows, gate, down, up in zip(x.to(kind).split(ROWS), w1.to(kind), w2.to(kind), w3.to(kind), strict=True)
        ]
        return torch.cat(of_experts)

    exact = of(torch.float64)
    mine, plain = (float((one - exact).norm()) for one in (networks(x, w1, w2, w3, ROWS), of(torch.bfloat16)))
    assert mine <= 1.01 * plain


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_an_output_is_the_weighted_sum_in_the_order_of_the_definition(dtype: torch.dtype):  # numerics-8
    experts, x = layer(dtype=dtype), random(1, 20, DIM, seed=9).to(dtype)
    found, (weights, chosen, _) = experts(x)[0], experts.router(x)
    inner = experts.routed_experts.inner_experts
    exact = [torch.nn.functional.linear(x[0].double(), inner.w1_EFD[e].double()) for e in range(EXPERTS)]
    for token in range(20):
        total = torch.zeros(DIM, dtype=torch.float64)
        for expert, weight in zip(chosen[0, token].tolist(), weights[0, token].double(), strict=True):
            hidden = torch.nn.functional.silu(exact[expert][token]) * (
                inner.w3_EFD[expert].double() @ x[0, token].double()
            )
            total += weight * (inner.w2_EDF[expert].double() @ hidden)
        limit = {torch.float32: 2e-6, torch.bfloat16: 3e-2}[dtype] * float(total.abs().max() + 1)
        torch.testing.assert_close(found[token].double(), total, atol=limit, rtol=0)


def test_a_layer_of_experts_has_values_and_gradients_of_the_ordinary_one():
    x, upstream = random(1, TOKENS, DIM, seed=9).requires_grad_(), random(1, TOKENS, DIM, seed=8)
    found = []
    for numerics in ("bitwise", "fast"):
        experts = layer(numerics)
        out = experts(x)
        found.append([out, *torch.autograd.grad(out, [x, *experts.parameters()], upstream)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6 * float(other.detach().abs().max()), rtol=1e-5)
