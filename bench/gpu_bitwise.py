"""The check of `bench.gpu` for bitwise numerics: bits of each operation, its cost, and a trainer beside vLLM.

Shape suffixes: T rows, D features, N output features.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bench.gpu_trainer import STEPS, timed
from goaly.models.settings import ModelSettings
from goaly.models.tiny_model import TinyModel, write_tiny_model

MOST_TOKENS = 8192
COUNTS = (1, 2, 3, 17, 64, 100, 1000)
STARTS = (0, 1, 63, 200)
MODELS: dict[str, Callable[[Path], Path]] = {
    "dense": write_tiny_model,
    "experts": partial(write_tiny_model, size=TinyModel(experts=8)),
}
"""The models that are sampled and recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The inputs of the operations."""

    tokens: int = MOST_TOKENS
    width: int = 1024
    outputs: int = 3072
    vocabulary: int = 151_936
    experts: int = 8
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    context: int = 2048


def bitwise_operations() -> dict[str, Any]:
    """Every operation on a GPU, and trainers that recompute what vLLM sampled."""
    numbers: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32):
        numbers |= operations(Sizes(), dtype, torch.device("cuda"), f"{str(dtype).removeprefix('torch.')}_")
    for name, write in MODELS.items():
        numbers |= {f"{name}_{key}": value for key, value in recomputed(write).items()}
    return numbers


def operations(sizes: Sizes, dtype: torch.dtype, device: torch.device, prefix: str = "") -> dict[str, float]:
    """The time of each operation over that of torch's for all rows; raises if a row's bits depend on other rows."""
    from goaly.numerics import bitwise_kernels as kernels

    random = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(device, dtype)

    x_TD, weight_ND = drawn(sizes.tokens, sizes.width), drawn(sizes.outputs, sizes.width)
    norm_D, logits_TN = drawn(sizes.width), drawn(min(sizes.tokens, 512), sizes.vocabulary).float()
    pairs: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], torch.Tensor]] = {
        "product": (lambda x: kernels.product(x, weight_ND), lambda x: F.linear(x, weight_ND), x_TD),
        "norm": (
            lambda x: kernels.normalized(x, norm_D, 1e-6),
            lambda x: F.rms_norm(x, norm_D.shape, norm_D, 1e-6),
            x_TD,
        ),
        "log_softmax": (kernels.log_softmax, lambda x: x.log_softmax(-1), logits_TN),
    }
    costs = {}
    for name, (mine, plain, rows) in pairs.items():
        _check_parts(name, mine, rows)
        for ending, some in {"cost": rows, "cost_of_8": rows[:8]}.items():
            costs[f"{prefix}{name}_{ending}"] = timed(partial(mine, some), STEPS) / timed(partial(plain, some), STEPS)
    _check_experts(x_TD, weight_ND, sizes.experts)
    return costs | {f"{prefix}attention_cost": _attention(sizes, drawn)}


def _check_parts(name: str, operation: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> None:
    """Compare a part of the rows alone with the same part of all, bit by bit."""
    whole = operation(rows)
    for count in COUNTS:
        for start in STARTS:
            part = slice(start, start + count)
            if not torch.equal(operation(rows[part]), whole[part]):
                raise AssertionError(f"{name}: rows {start} to {start + count} have other bits alone than among all")


def _check_experts(x_TD: torch.Tensor, weight_ND: torch.Tensor, experts: int) -> None:
    from goaly.numerics import bitwise_kernels as kernels

    weights = weight_ND[None] * torch.arange(1, experts + 1, device=x_TD.device, dtype=x_TD.dtype)[:, None, None]
    rows = [len(x_TD) - sum(range(experts)), *range(1, experts)]
    found = kernels.by_expert(x_TD, weights, rows, 1).split(rows)
    for expert, (weight, part, out) in enumerate(zip(weights, x_TD.split(rows), found, strict=True)):
        if not torch.equal(kernels.product(part, weight), out):
            raise AssertionError(f"expert {expert}: its rows have other bits among other experts' than alone")


def _attention(sizes: Sizes, drawn: Callable[..., torch.Tensor]) -> float:
    """Compare a document packed as in the trainer with a part of it in vLLM's pages; the time over torch's."""
    from goaly.numerics import bitwise_kernels as kernels
    from goaly.numerics.bitwise_attention import PAGE, PagedDocuments

    length, heads, kv_heads, width = sizes.context, sizes.heads, sizes.kv_heads, sizes.head_dim
    q, k, v = (drawn(length, count, width) for count in (heads, kv_heads, kv_heads))
    scale = width**-0.5
    documents = PagedDocuments.of(torch.arange(length, device=q.device)[None])
    whole = documents.attend(q, k, v, scale)
    slots = PAGE // 2
    pages = torch.randperm(-(-length // slots), device=q.device).int()
    cache = drawn(len(pages), slots, kv_heads, 2 * width).transpose(1, 2)
    at = torch.arange(length, device=q.device)
    cache[pages[at // slots].long(), :, at % slots] = torch.cat([k, v], -1)
    keys, values = cache.split(width, dim=-1)
    for start in (0, length // 3, length - 1):
        part = at[start : start + 5]
        out = torch.empty_like(q[part])
        pages_TM = pages.expand(len(part), -1).contiguous()
        kernels.attend(q[part], keys, values, out, (part + 1).int(), pages_TM, scale)
        if not torch.equal(out, whole[part]):
            raise AssertionError(
                f"attention: tokens from {start} on have other bits in vLLM's pages than in the trainer's"
            )
    shown = [one.transpose(0, 1)[None] for one in (q, k, v)]
    mine = timed(lambda: documents.attend(q, k, v, scale), STEPS)
    plain = timed(lambda: F.scaled_dot_product_attention(*shown, is_causal=True, enable_gqa=heads != kv_heads), STEPS)
    return mine / plain


def recomputed(write: Callable[[Path], Path]) -> dict[str, int]:
    """The tokens that vLLM sampled, and those to which the trainer gives other log-probs; raises if there are any."""
    from goaly.generate.settings import GeneratorSettings
    from goaly.generate.vllm_engine import VllmEngine
    from goaly.parity import compared, cramped, mixed_requests, rows_of, sampled
    from goaly.train.settings import TrainerSettings
    from goaly.train.train_engine import TrainEngine

    with tempfile.TemporaryDirectory() as made:
        folder = str(write(Path(made) / "model"))
        model = ModelSettings(path=folder, dtype="bfloat16", numerics="bitwise")
        asked = mixed_requests(64, vocabulary=30, longest=400)
        engine = VllmEngine(cramped(model, GeneratorSettings(max_running=32, max_context=512), asked), model)
        sequences = sampled(engine, asked)
        trainer = TrainEngine(model, TrainerSettings())
        rows = rows_of(sequences, 1024)
        found = compared(rows, trainer.logprobs(rows))
        if found.differing:
            raise AssertionError(f"{found.differing} of {found.tokens} log-probs differ, by {found.largest:.3g}")
    return {"tokens": found.tokens, "differing_tokens": found.differing}
