"""Runs the kernels of bitwise numerics on a CPU, in Triton's interpreter, and writes which claims about them are false.

    python -m tests.unit.numerics.kernels_in_interpreter OUT

A process of its own, because Triton decides when it is imported whether it interprets. In the interpreter a matrix
product is numpy's, which has no bfloat16 and computes a row by its place in the tile. Here each element is the sum of
its own products in one order, as on a GPU.
"""

import itertools
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import torch.nn.functional as F
from triton.runtime import interpreter

from goaly.models.device import prepare_torchtitan

prepare_torchtitan()

from goaly.models.settings import ModelSettings  # noqa: E402
from goaly.models.tiny_model import TinyModel, write_tiny_model  # noqa: E402
from goaly.numerics import (  # noqa: E402
    bitwise_attention,
    bitwise_expert_networks,
    bitwise_experts,
    bitwise_layers,
    bitwise_operations,
)
from goaly.numerics.bitwise_operations import log_softmax, product, silu, softmax  # noqa: E402
from goaly.numerics.cpu_attention import PackedAttention, PackedDocuments  # noqa: E402
from goaly.train.settings import TrainerSettings  # noqa: E402
from goaly.trajectory import TensorDict  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16)
NOISE = {torch.float32: 3e-5, torch.bfloat16: 0.1}
SIZE = {"dim": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 32, "hidden_dim": 64, "max_context": 128}
DENSE, EXPERTS = (partial(write_tiny_model, size=TinyModel(**SIZE, experts=experts)) for experts in (0, 4))


def exact_dot(self: Any, a: Any, b: Any, sums: Any, *_: Any) -> Any:
    """A matrix product in which an element depends on its row and column alone."""

    def as_float32(handle: Any) -> np.ndarray:
        if handle.data.dtype == np.uint16:  # bfloat16
            return (handle.data.astype(np.uint32) << 16).view(np.float32)
        return handle.data.astype(np.float32)

    products = as_float32(a)[:, None, :] * np.ascontiguousarray(as_float32(b).T)[None]
    return interpreter.TensorHandle(products.sum(-1) + sums.data, sums.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = exact_dot
for module in (bitwise_attention, bitwise_expert_networks, bitwise_experts, bitwise_layers, bitwise_operations):
    module.on_gpu = lambda tensor: True


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def products_are_those_of_float64_but_for_noise() -> None:
    for dtype, (features, width) in itertools.product(DTYPES, [(96, 70), (33, 64), (200, 5)]):
        x, weight = random(70, features).to(dtype), random(width, features, seed=1).to(dtype)
        torch.testing.assert_close(
            product(x, weight).double(),
            x.double() @ weight.double().t(),
            atol=NOISE[dtype],
            rtol=1e-2,
        )


def a_row_of_a_product_has_the_same_bits_in_any_rows_and_beside_any_columns() -> None:  # numerics-1
    for dtype in DTYPES:
        x, weight = random(150, 96).to(dtype), random(70, 96, seed=1).to(dtype)
        whole = product(x, weight)
        for count, start in itertools.product((1, 65), (0, 7, 64)):
            assert torch.equal(product(x[start : start + count], weight), whole[start : start + count])
        assert torch.equal(product(x, weight[:33]), whole[:, :33])
        assert torch.equal(product(x, weight[33:]), whole[:, 33:])


def ranks_that_divide_the_features_add_up_to_one_rank() -> None:  # numerics-2
    for dtype in DTYPES:
        layer = bitwise_layers.BitwiseLinear.Config(in_features=96, out_features=40, slices=2).build().to(dtype)
        x = random(5, 96).to(dtype)
        halves = [product(*both) for both in zip(x.chunk(2, 1), layer.weight.chunk(2, 1), strict=True)]
        assert torch.equal(layer(x), halves[1] + halves[0])


def a_linear_layer_has_the_gradients_of_an_ordinary_one() -> None:
    layer = bitwise_layers.BitwiseLinear.Config(in_features=96, out_features=40, slices=2).build()
    given = [random(7, 96).requires_grad_(), layer.weight]
    _same_gradients(layer(given[0]), F.linear(*given), given)


def an_experts_rows_have_the_bits_of_its_own_product() -> None:  # numerics-1
    for dtype, rows in itertools.product(DTYPES, [(10, 0, 70, 5), (1, 1, 1, 1), (0, 0, 0, 85)]):
        x, w1, w3 = (random(*shape).to(dtype) for shape in ((sum(rows), 96), (4, 40, 96), (4, 40, 96)))
        w2 = random(4, 96, 40, seed=1).to(dtype)
        found = bitwise_expert_networks.networks(x, w1, w2, w3, rows, 2)
        for gate, down, up, part, out in zip(w1, w2, w3, x.split(rows), found.split(rows), strict=True):
            hidden = silu(product(part, gate)) * product(part, up)
            sides = zip(hidden.chunk(2, 1), down.chunk(2, 1), out.chunk(2, 1), strict=True)
            assert all(torch.equal(product(a, b), side) for a, b, side in sides)


def a_rows_norm_and_softmaxes_are_torchs_and_the_same_in_any_rows() -> None:  # numerics-4, numerics-5
    for dtype, width in itertools.product(DTYPES, (33, 96, 1500)):
        x = 3 * random(9, width)
        norm = bitwise_layers.KernelRMSNorm.Config(normalized_shape=width, eps=1e-6).build().to(dtype)
        norm.weight.data.copy_(random(width, seed=1))
        given = x.to(dtype).requires_grad_()
        if dtype == torch.float32:
            _same_gradients(norm(given), F.rms_norm(given, (width,), norm.weight, 1e-6), [given, norm.weight])
            soft = x.clone().requires_grad_()
            _same_gradients(softmax(soft), F.softmax(soft, -1), [soft])
        torch.testing.assert_close(norm(given), F.rms_norm(given, (width,), norm.weight, 1e-6))
        torch.testing.assert_close(log_softmax(x), x.log_softmax(-1))
        for of_rows, rows in (
            (norm, x.to(dtype)),
            (softmax, x),
            (log_softmax, x),
        ):
            whole = of_rows(rows)
            assert all(torch.equal(of_rows(rows[at : at + 2]), whole[at : at + 2]) for at in (0, 1, 7))


LENGTHS = (1, 5, 33, 40)
HEADS, KV_HEADS, WIDTH = 3, 1, 40


def a_tokens_attention_is_the_same_packed_in_chunks_and_from_any_pages_of_vllm() -> None:  # numerics-6
    from goaly.numerics.bitwise_backend import GpuImplementation

    tokens, longest, slots = sum(LENGTHS), LENGTHS[-1], 16
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    for dtype in DTYPES:
        q, k, v = (random(1, tokens, count, WIDTH, seed=count).to(dtype) for count in (HEADS, KV_HEADS, KV_HEADS))
        documents = bitwise_attention.PagedDocuments.of(positions)
        packed = bitwise_attention.BitwiseAttention.Config().build()(q, k, 3 * v, attention_masks=documents)[0]
        cache = random(40, slots, KV_HEADS, 2 * WIDTH, seed=9).to(dtype).transpose(1, 2)
        pages = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:5].int()
        at, start = torch.arange(longest), tokens - longest
        cache[pages[at // slots].long(), :, at % slots] = torch.cat([k, 3 * v], -1)[0, start:]
        implementation = object.__new__(GpuImplementation)
        implementation.head_size, implementation.scale = WIDTH, WIDTH**-0.5
        other = torch.tensor([[3, 1, 0, 0, 0]], dtype=torch.int32)  # another request of the step, with three tokens
        for chunk in (at[:1], at[5:35], at[-1:]):
            ends = torch.tensor([3, 3 + len(chunk)], dtype=torch.int32)
            starts, lengths = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([20, int(chunk[-1]) + 1])
            both = torch.cat([other, pages[None]])
            asked = bitwise_attention.Queries(
                *bitwise_attention.by_token(ends, lengths.int(), both, starts, 3 + len(chunk))
            )
            queries = torch.cat([q[0, :3], q[0, start + chunk], q[0, :2]])  # two rows of padding
            out = torch.zeros_like(queries)
            implementation.forward(None, queries, k, v, cache, SimpleNamespace(queries=asked), out)
            assert torch.equal(out[3:-2], packed[start + chunk])
            assert not out[-2:].any()


def attention_has_values_and_gradients_of_the_ordinary_one() -> None:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    shapes = [(1, sum(LENGTHS), heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    given = [random(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
    masks = bitwise_attention.PagedDocuments.of(positions)
    mine = bitwise_attention.BitwiseAttention.Config().build()(*given, attention_masks=masks)
    plain = PackedAttention.Config().build()(*given, attention_masks=PackedDocuments.of(positions))
    _same_gradients(mine, plain, given)


def _same_gradients(mine: torch.Tensor, plain: torch.Tensor, given: list[torch.Tensor]) -> None:
    torch.testing.assert_close(mine, plain)
    upstream = random(*mine.shape, seed=7)
    for one, other in zip(*(torch.autograd.grad(out, given, upstream) for out in (mine, plain)), strict=True):
        torch.testing.assert_close(one, other)


def a_trainer_computes_the_log_probs_that_vllm_sampled_to_the_last_bit() -> None:  # train-10, train-9
    from goaly.generate.settings import GeneratorSettings
    from goaly.generate.vllm_engine import VllmEngine
    from goaly.numerics.bitwise_backend import use_exact_logprobs
    from goaly.parity import compared, mixed_requests, rows_of, sampled
    from goaly.train.train_engine import TrainEngine

    for dtype, write, temperature in (("float32", DENSE, 1.0), ("bfloat16", EXPERTS, 0.7)):
        with tempfile.TemporaryDirectory() as made:
            folder = str(write(Path(made) / "model"))
            model = ModelSettings(path=folder, dtype=dtype, numerics="bitwise")
            settings = GeneratorSettings(max_running=3, max_context=48, max_step_tokens=48, kv_cache_gib=0.002)
            engine = VllmEngine(settings, model)
            use_exact_logprobs(engine._vllm.model_executor.driver_worker.worker.model_runner.sampler)
            sequences = sampled(engine, mixed_requests(4, vocabulary=30, longest=16, temperature=temperature))
            trainer = TrainEngine(model, TrainerSettings(temperature=temperature, microbatch_rows=2))
            rows = rows_of(sequences, 40)
            found = compared(rows, trainer.logprobs(rows))
            assert found.tokens > 20
            assert found.differing == 0, f"{dtype}: {found.differing} of {found.tokens}, by {found.largest}"
            engine.close()


def a_trainer_takes_a_step_with_the_gradients_of_fast_numerics() -> None:
    from goaly.losses.objective import Likelihood
    from goaly.train.train_engine import TrainEngine

    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    tokens = torch.randint(2, 30, positions.shape, generator=torch.Generator().manual_seed(0))
    columns = {"tokens": tokens, "positions": positions, "trained": positions > 2}
    rows = TensorDict(columns, batch_size=positions.shape)
    with tempfile.TemporaryDirectory() as made:
        folder = str(EXPERTS(Path(made) / "model"))
        norms = {}
        for numerics in ("bitwise", "fast"):
            engine = TrainEngine(ModelSettings(path=folder, numerics=numerics), TrainerSettings())
            engine.forward_backward([rows], Likelihood(), 50)
            norms[numerics] = [parameter.grad for parameter in engine._model.parameters()]
        for mine, plain in zip(norms["bitwise"], norms["fast"], strict=True):
            torch.testing.assert_close(mine, plain, atol=1e-5, rtol=1e-3)


CLAIMS: tuple[Callable[[], None], ...] = (
    products_are_those_of_float64_but_for_noise,
    a_row_of_a_product_has_the_same_bits_in_any_rows_and_beside_any_columns,
    ranks_that_divide_the_features_add_up_to_one_rank,
    a_linear_layer_has_the_gradients_of_an_ordinary_one,
    an_experts_rows_have_the_bits_of_its_own_product,
    a_rows_norm_and_softmaxes_are_torchs_and_the_same_in_any_rows,
    attention_has_values_and_gradients_of_the_ordinary_one,
    a_tokens_attention_is_the_same_packed_in_chunks_and_from_any_pages_of_vllm,
    a_trainer_takes_a_step_with_the_gradients_of_fast_numerics,
    a_trainer_computes_the_log_probs_that_vllm_sampled_to_the_last_bit,
)


def write_false(claims: Sequence[Callable[[], None]], out: str) -> NoReturn:
    """Write the error of each claim, empty if it is true, and end the process."""
    found = {}
    for claim in claims:
        try:
            claim()
        except Exception:
            found[claim.__name__] = traceback.format_exc()
        else:
            found[claim.__name__] = ""
    Path(out).write_text(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    write_false(CLAIMS, sys.argv[1])
