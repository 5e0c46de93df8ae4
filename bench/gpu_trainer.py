"""The trainer's checks of `bench.gpu`: a step of its engine, and the loss path.

Each returns numbers by name, or raises. Without a GPU they compute in float32 with small sizes.

Shape suffixes: T tokens, D model width, V vocabulary.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.train import packed_batch
from goaly.losses.objective import Likelihood, PolicyObjective
from goaly.losses.settings import LossSettings
from goaly.models.settings import ModelSettings
from goaly.models.tiny_model import TinyModel, write_tiny_model
from goaly.train.settings import OptimizerSettings, TrainerSettings
from goaly.trajectory import PackedRows

LARGE = TinyModel(dim=1024, layers=8, heads=16, kv_heads=8, head_dim=128, hidden_dim=3072, max_context=4096)
"""The layers of Qwen3-0.6B."""
SMALL = TinyModel()
STEPS = 5 if torch.cuda.is_available() else 1
DTYPE = "bfloat16" if torch.cuda.is_available() else "float32"
"""The attention of torchtitan and vLLM on GPUs has no float32."""
MOST_OFF = {"float32": 2e-4, "bfloat16": 0.1}
"""Of a log-prob from that of transformers in float32."""
GRADIENT_OFF = {"float32": 1e-3, "bfloat16": 0.03}
"""Of a gradient, relative to its norm."""


def random_model(folder: Path, *, small: bool = False) -> ModelSettings:
    """A model with random weights: on a GPU of the width of a real one, unless it shall be small."""
    size = SMALL if small or not torch.cuda.is_available() else LARGE
    return ModelSettings(path=str(write_tiny_model(folder / "model", size)), dtype=DTYPE)


def trainer_step() -> dict[str, Any]:
    """Compare a small model's log-probs and gradient with those of transformers on the CPU; time steps of a large
    one."""
    from goaly.train.train_engine import TrainEngine

    settings = TrainerSettings(optimizer=OptimizerSettings(lr=1e-3))
    numbers: dict[str, Any] = {}
    batch = packed_batch()
    with tempfile.TemporaryDirectory() as made:
        model = random_model(Path(made), small=True)
        rows = batch.rows[:1].clone()
        rows["tokens"].clamp_(min=1)  # transformers gives the embedding of the padding, token 0, no gradient
        sequences = int((rows["positions"] == 0).sum())
        few = PackedRows(rows=rows, batch_trained_tokens=int(rows["trained"].sum()), batch_sequences=sequences)
        logprobs, norm = by_transformers(model.path, few)
        engine = TrainEngine(model, settings)
        numbers["logprob_error"] = float((engine.logprobs(rows) - logprobs)[rows["trained"]].abs().max())
        first = engine.train_step(few, Likelihood())
        numbers["grad_norm_error"] = abs(first["grad_norm"] / norm - 1)
        again = TrainEngine(model, settings)
        again.train_step(few, Likelihood())
        numbers["repeatable"] = engine.digest() == again.digest()
        _at_most(numbers["logprob_error"], MOST_OFF[DTYPE], "logprob_error")
        _at_most(numbers["grad_norm_error"], GRADIENT_OFF[DTYPE], "grad_norm_error")
    del engine, again
    with tempfile.TemporaryDirectory() as made:
        engine = TrainEngine(random_model(Path(made)), settings)
        objective = PolicyObjective(LossSettings())
        _reset_peak()
        seconds = timed(lambda: engine.train_step(batch, objective), STEPS)
    return numbers | {
        "step_seconds": seconds,
        "tokens_per_second": batch.rows.batch_size.numel() / seconds,
        **_peak("peak_gib"),
    }


def by_transformers(folder: Path | str, packed: PackedRows) -> tuple[torch.Tensor, float]:
    """The log-probs of the trained tokens of a single row, and the norm of the gradient of their mean, by transformers'
    model on the CPU in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    (row,) = packed.rows
    starts = (row["positions"] == 0).nonzero().flatten().tolist()
    logprobs = torch.zeros(packed.rows.batch_size)
    parts = []
    for start, stop in zip(starts, [*starts[1:], len(row)], strict=True):
        tokens = row["tokens"][start:stop]
        found = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        trained = row["trained"][start + 1 : stop]
        parts.append(found[trained])
        logprobs[0, start + 1 : stop] = found.detach() * trained
    (-torch.cat(parts).sum() / packed.batch_trained_tokens).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return logprobs, float(torch.nn.utils.get_total_norm(gradients))


def loss_path() -> dict[str, Any]:
    """Log-probs, entropies and gradients in chunks, against the plain log-softmax of all logits: values, seconds and
    memory."""
    from goaly.models.device import prepare_torchtitan
    from goaly.train.logprob_head import LogprobHead

    device = prepare_torchtitan()
    tokens, width, vocabulary, chunk = (4096, 1024, 151_936, 512) if device.type == "cuda" else (256, 64, 1000, 64)
    random = torch.Generator().manual_seed(0)
    dtype = getattr(torch, DTYPE)
    hidden_TD = torch.randn(tokens, width, generator=random).to(device, dtype)
    weight_VD = (torch.randn(vocabulary, width, generator=random) * width**-0.5).to(device, dtype)
    targets_T = torch.randint(0, vocabulary, (tokens,), generator=random).to(device)
    grads_2T = torch.randn(2, tokens, generator=random).to(device)
    every_T = torch.arange(tokens, device=device)
    head: Any = LogprobHead.Config(in_features=width, out_features=vocabulary).build()

    def chunked(hidden: torch.Tensor, weight: torch.Tensor) -> Any:
        head.weight = torch.nn.Parameter(weight)
        return head(hidden[None], every_T, targets_T, chunk, 1.0), head.weight

    def plain(hidden: torch.Tensor, weight: torch.Tensor) -> Any:
        leaf = torch.nn.Parameter(weight)
        logprobs_TV = (hidden @ leaf.t()).float().log_softmax(-1)
        entropies = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
        return (logprobs_TV.gather(1, targets_T[:, None])[:, 0], entropies), leaf

    def passes(way: Callable[..., Any], hidden: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        hidden = hidden.detach().requires_grad_()
        outputs, leaf = way(hidden, weight)
        gradients = torch.autograd.grad(outputs, [hidden, leaf], list(grads_2T))
        return [one.detach() for one in (*outputs, *gradients)]

    numbers: dict[str, Any] = {}
    expected = passes(plain, hidden_TD.float(), weight_VD.float())
    found = passes(chunked, hidden_TD, weight_VD)
    for name, mine, theirs in zip(("logprob", "entropy"), found[:2], expected[:2], strict=True):
        numbers[f"{name}_error"] = float((mine - theirs).abs().max())
        _at_most(numbers[f"{name}_error"], 1e-3, f"{name}_error")
    for name, mine, theirs in zip(("hidden", "weight"), found[2:], expected[2:], strict=True):
        numbers[f"{name}_gradient_error"] = float((mine.float() - theirs).norm() / theirs.norm())
        _at_most(numbers[f"{name}_gradient_error"], GRADIENT_OFF[DTYPE], f"{name}_gradient_error")
    del expected, found
    for name, way in {"chunked": chunked, "plain": plain}.items():
        _reset_peak()
        numbers[f"{name}_ms"] = 1e3 * timed(lambda way=way: passes(way, hidden_TD, weight_VD), STEPS)
        numbers |= _peak(f"{name}_peak_gib")
    return numbers


def timed(work: Callable[[], object], times: int) -> float:
    """The median seconds of this work, after a warm-up."""
    work()
    seconds = []
    for _ in range(times):
        _synchronize()
        began = time.perf_counter()
        work()
        _synchronize()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def _at_most(value: float, most: float, name: str) -> None:
    if not value <= most:
        raise AssertionError(f"{name} is {value:.3g}, must be at most {most:g}")


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _peak(name: str) -> dict[str, float]:
    """The most memory since the last reset that tensors had on the GPU, under this name; nothing without one."""
    return {name: torch.cuda.max_memory_allocated() / (1 << 30)} if torch.cuda.is_available() else {}
