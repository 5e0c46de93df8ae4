"""The memory of a rank's pass, found by running it without data: fake tensors over a fake process group.

The real model is built and sharded at full width by the code that builds it in a run, with a few layers; a pass
over one microbatch is run, and each tensor is counted for as long as it lives. Layers are alike, so what a layer adds
is added for the others. A rank of a pipeline also holds the activations of the microbatches that wait for their
backward passes. Where experts are divided among ranks, a rank counts a tenth more tokens than the mean.

Invariants
    TM-1  A trace has a process of its own, whose process group ends with it, and takes no memory for the tensors.
"""

import multiprocessing
import resource
import time
import warnings
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from goaly.models.spec import Architecture
from goaly.train.pipeline import Stage, entering, leaving, stage_of
from goaly.train.settings import TrainerSettings

FEW_LAYERS, MORE_LAYERS = 3, 4
"""A model of fewer layers has no block between the first and the last one, which FSDP treats in its own way."""

KIB = 1024

UNEVEN = 1.1
"""The tokens of a rank's experts, as a multiple of the mean over ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassMemory:
    """Bytes of one rank."""

    parameters: int
    """Its shards."""
    trained: int
    """The share of that which is trained: all, only adapters, or nothing. Gradients take the same, the optimizer twice
    that."""
    activations: int
    """The greatest sum in a pass of everything else: activations, gathered parameters, gradients before they are
    sharded."""
    logprobs: int
    """The share of that in the output projection: logits of a chunk and what is computed from them."""
    process_bytes: int
    """The most memory that the process of the trace had (TM-1)."""
    process_seconds: float
    """How long that process took for it."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make, until they are freed."""

    def __init__(self, known: Sequence[torch.Tensor] = ()):
        """The memory of `known` tensors is not counted."""
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        for tensor in known:
            self._add(tensor, counts=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count its results."""
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor)
        return out

    def __enter__(self) -> Self:
        """Also count what FSDP frees and gets again by resizing storages."""
        before = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            key = storage._cdata
            if key in self._sizes:
                self.now += size - self._sizes[key]
                self._sizes[key] = size
                self.peak = max(self.peak, self.now)
            return before(storage, size)

        self._restore = partial(setattr, torch.UntypedStorage, "resize_", before)
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Count no longer."""
        self._restore()
        super().__exit__(*error)

    def _add(self, tensor: torch.Tensor, *, counts: bool = True) -> None:
        tensor = _local(tensor)
        storage = getattr(tensor, "elem", tensor).untyped_storage()  # what a collective's unfinished result wraps
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = size = storage.nbytes() if counts else 0
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


def trace(
    shape: Architecture,
    dtype: Literal["float32", "bfloat16"],
    trainer: TrainerSettings,
    documents: tuple[int, ...],
    *,
    on_gpu: bool,
    trains: bool = True,
    stage: int = 0,
) -> PassMemory:
    """The memory of the first rank of this pipeline stage in a pass over one microbatch of documents of these lengths:
    forward and backward, or only forward in a frozen model.

    ConfigError or torch's own error if the ranks cannot divide the model.
    """
    key = repr((shape, dtype, trainer, documents, on_gpu, trains, stage))
    if key not in _TRACED:
        # torch keeps plans for meshes that are equal but for their groups, so a second group would find the first's.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["goaly.train.engine", "goaly.models.bitwise", "goaly.plan.gpu_attention"])
        with ProcessPoolExecutor(1, mp_context=context) as process:
            _TRACED[key] = process.submit(_trace, shape, dtype, trainer, documents, on_gpu, trains, stage).result()
    return _TRACED[key]


_TRACED: dict[str, PassMemory] = {}
"""A dry run asks for the same rank several times."""


def most_process_bytes() -> int:
    """The most memory that a process of a trace had so far."""
    return max(found.process_bytes for found in _TRACED.values())


def _trace(
    shape: Architecture,
    dtype: Any,
    trainer: TrainerSettings,
    documents: tuple[int, ...],
    on_gpu: bool,
    trains: bool,
    number: int,
) -> PassMemory:
    began = time.monotonic()
    with _fake_ranks(trainer.ranks), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP and autocast warn of what a run filters
        stage = stage_of(shape.layers, trainer.pp, number)
        whole, _ = _sharded(shape, dtype, trainer, stage, on_gpu, trains)
        parameters, trained = _held(whole.parameters()), _held(one for one in whole.parameters() if one.requires_grad)
        del whole
        dense = max(shape.dense_layers - stage.layers.start, 0)

        def phases(layers: int) -> list[int]:
            part, alone = replace(stage, layers=range(layers)), replace(shape, layers=layers, dense_layers=dense)
            return _phases(alone, dtype, trainer, part, documents, on_gpu, trains)

        least = min(len(stage.layers), FEW_LAYERS)
        few = more = phases(least)
        if len(stage.layers) > least:
            more = phases(MORE_LAYERS)
    rest = (len(stage.layers) - least) / (MORE_LAYERS - FEW_LAYERS)
    trunk, before_head, in_head = (int(one + rest * (other - one)) for one, other in zip(few, more, strict=True))
    logprobs = max(in_head - before_head, 0)
    return PassMemory(
        parameters=parameters,
        trained=trained if trains else 0,
        activations=max(trunk, in_head) - logprobs,  # with `logprobs` this is the peak
        logprobs=logprobs,
        process_bytes=KIB * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        process_seconds=time.monotonic() - began,
    )


def _phases(
    shape: Architecture,
    dtype: Any,
    trainer: TrainerSettings,
    stage: Stage,
    documents: tuple[int, ...],
    on_gpu: bool,
    trains: bool,
) -> list[int]:
    """The peak in the blocks, what is there before the output projection, and the peak in it; without parameters and
    gradients. A stage without a head has nothing in it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from goaly.models.attention import PackedDocuments, causal_mask
    from goaly.models.spec import prepare_torchtitan
    from goaly.train.parallel import context_mesh, context_ranks

    causal_mask.cache_clear()  # each trace counts its masks
    model, parallel_dims = _sharded(shape, dtype, trainer, stage, on_gpu, trains)
    positions_1T = torch.cat([torch.arange(length) for length in documents])[None]
    masks: Any = None
    if trainer.cp > 1:
        context = context_ranks(context_mesh(trainer, prepare_torchtitan().type))
        masks = context.documents(positions_1T)
        positions_1T = positions_1T[:, context.share(positions_1T.shape[1])]
    if not on_gpu:
        packed = PackedDocuments.of(positions_1T) if masks is None else masks.started
        for heads in (shape.heads, shape.kv_heads):
            packed.places(heads // trainer.tp)  # its size depends on values, which fake tensors lack
        masks = packed if masks is None else masks
    tokens = positions_1T.shape[1]
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        model.train()
        _route_evenly(model, tokens // trainer.tp)
        _multiply_experts_without_data(model)
        held = [_local(tensor) for tensor in (*model.parameters(), *model.buffers())]
        with LiveBytes(held) as live, torch.set_grad_enabled(trains):
            for one in model.parameters() if trains else ():  # as in all but a batch's first microbatch
                one.grad = torch.empty_like(one) if one.requires_grad else None
            live.peak = live.now
            given = torch.zeros(1, tokens, dtype=torch.int64)
            if not stage.is_first:
                part = torch.empty(
                    1, tokens // trainer.tp, shape.dim, dtype=getattr(torch, dtype), requires_grad=trains
                )
                given = entering(part, parallel_dims.get_mesh("tp") if trainer.tp > 1 else None)
            hidden = model(given, positions=positions_1T, attention_masks=masks)
            gradients = _held(one.grad for one in model.parameters() if one.grad is not None)
            forward, before, live.peak = live.peak, live.now, live.now
            waiting = (stage.count - 1 - stage.number) * (before - gradients) if trains else 0  # PP-3
            if not stage.is_last:
                if trains:
                    hidden = leaving(hidden)
                    hidden.backward(torch.empty_like(hidden))
                return [max(forward, live.peak) - gradients + waiting, 0, 0]
            where, targets = torch.arange(tokens), torch.zeros(tokens, dtype=torch.int64)
            found, entropies = model.lm_head(hidden, where, targets, trainer.logprob_chunk, trainer.temperature)
            if not trains:
                return [forward, before, live.peak]
            loss = (found + entropies).sum()
            gradient, *_ = torch.autograd.grad(loss, [hidden], retain_graph=True)
            in_head, live.peak = live.peak, live.now
            del gradient
            loss.backward()
            backward, live.peak = live.peak, live.now
            del hidden, found, entropies, loss, where, targets
            phases = [max(forward, backward) - gradients, before - gradients, in_head - gradients]
    return phases


def _sharded(
    shape: Architecture, dtype: Any, trainer: TrainerSettings, stage: Stage, on_gpu: bool, trains: bool
) -> tuple[Any, Any]:
    """The stage of the model as a run builds it, without memory, and torchtitan's dimensions of the ranks."""
    from goaly.models.context_attention import ContextAttention
    from goaly.models.spec import spec_of
    from goaly.plan.gpu_attention import FlashShapes
    from goaly.train.logprobs import LOGPROBS
    from goaly.train.parallel import sharded_on_meta

    on_cpu = ContextAttention.Config() if trainer.cp > 1 else None
    spec = spec_of(shape, attention=FlashShapes.Config() if on_gpu else on_cpu, lora=trainer.lora)
    return sharded_on_meta(spec, dtype, trainer, LOGPROBS, stage, trains=trains)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def _held(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of this rank's parts."""
    return sum(_local(tensor).numel() * tensor.element_size() for tensor in tensors)


def _route_evenly(model: Any, tokens: int) -> None:
    """Give the dispatchers of experts the counts of an even routing of so many tokens: fake tensors have no values."""
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    for module in model.modules():
        dispatcher = getattr(module, "token_dispatcher", None)
        if isinstance(dispatcher, AllToAllTokenDispatcher) and dispatcher.ep_mesh is not None:

            def even(counts_E: torch.Tensor, found: torch.Tensor, ranks: int, rows: int = tokens * dispatcher.top_k):
                split = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
                return found.reshape(-1), split, [int(part * UNEVEN) for part in split]

            dispatcher._sync_token_count_exchange = even


def _multiply_experts_without_data(model: Any) -> None:
    """Replace the experts' product by its shapes: the fake one takes bfloat16 only."""
    from goaly.models.experts import Experts

    for module in model.modules():
        if isinstance(module, Experts):
            module._grouped_mm = _Product.product


class _Product(torch.autograd.Function):
    """Keeps and makes tensors of the shapes of a product of rows and each expert's weights."""

    @staticmethod
    def product(A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """The product's shape; arguments are named as those of the method that it replaces."""
        return _Product.apply(A, B_t)

    @staticmethod
    def forward(ctx: Any, rows_RD: torch.Tensor, weights_EDF: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows_RD, weights_EDF)
        return rows_RD.new_empty(len(rows_RD), weights_EDF.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient_RF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows_RD, weights_EDF = ctx.saved_tensors
        return torch.empty_like(rows_RD), torch.empty_like(weights_EDF)


@contextmanager
def _fake_ranks(count: int) -> Any:
    """A process group of so many ranks, of which this process is the first and the others are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()
