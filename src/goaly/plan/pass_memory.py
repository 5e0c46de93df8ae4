"""The memory of a rank's pass, found by running it without data: fake tensors over a fake process group.

The real model is built and sharded at full width by the code that builds it in a run, with a few layers; a pass
over one microbatch is run, and each tensor is counted for as long as it lives. Layers are alike, so what a layer adds
is added for the others. A rank of a pipeline also holds the activations of the microbatches that wait for their
backward passes. Where experts are divided among ranks, a rank counts a tenth more tokens than the mean.

All ranks are covered: those of every pipeline stage, in groups that hold parts of the same shapes, as the meshes of the
built model say. One rank of each group is built and traced. Stages that differ in nothing but the number of waiting
microbatches share a trace.

Each rank is in one group, and holds what the traced rank of its group holds.
"""

import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor, Shard

from goaly.models.architecture import Architecture
from goaly.models.definition import versioned_tensors
from goaly.plan.fake_ranks import alike, as_fake_rank, tie
from goaly.plan.live_bytes import LiveBytes, held_bytes, local_part
from goaly.train.pipeline import Stage, stage_of
from goaly.train.settings import TrainerSettings

FEW_LAYERS, MORE_LAYERS = 3, 4
"""A model of fewer layers has no block between the first and the last one, which FSDP treats in its own way."""

UNEVEN = 1.1
"""The tokens of a rank's experts, as a multiple of the mean over ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassMemory:
    """Bytes of one rank."""

    parameters: int
    """Its parts of parameters."""
    trained: int
    """Those of them that are trained: all, only adapters, or none. Gradients take the same, the optimizer twice
    that."""
    activations: int
    """The greatest sum in a pass of everything else: activations, gathered parameters, gradients before they are
    sharded."""
    logprobs: int
    """The share of that in the output projection: logits of a chunk and what is computed from them."""
    stage_elements: int
    """The elements of all versioned tensors of its stage."""
    traced_rank: int
    """The rank that was built."""

    @property
    def total(self) -> int:
        """All of a trainer's rank."""
        return self.parameters + 3 * self.trained + self.activations + self.logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """The findings of the process of one rank."""

    memory: PassMemory
    """Without microbatches that wait for their backward passes."""
    waiting: int
    """The bytes of each that waits."""
    groups: tuple[tuple[int, ...], ...]
    """The ranks of the stage that hold the same, as numbers in the stage."""


def trace(
    shape: Architecture,
    dtype: Literal["float32", "bfloat16"],
    trainer: TrainerSettings,
    documents: tuple[int, ...],
    *,
    on_gpu: bool,
    trains: bool = True,
    critic: bool = False,
) -> dict[tuple[int, ...], PassMemory]:
    """By ranks, the memory that each of them needs in a pass over one microbatch of documents of these lengths: forward
    and backward, or only forward in a frozen model. A `critic` has a value head.

    ConfigError or torch's own error if the ranks cannot divide the model.
    """
    found: dict[tuple[int, ...], PassMemory] = {}
    kinds: dict[tuple[Any, ...], int] = {}
    for number in range(trainer.pp):
        stage = stage_of(shape.layers, trainer.pp, number)
        dense = _dense_layers(shape, stage)
        kind = (len(stage.layers), min(dense, len(stage.layers)), stage.is_first, stage.is_last)
        like = kinds.setdefault(kind, number)  # the first stage of its kind

        def of_rank(rank: int, like: int = like) -> Traced:
            rank += like * trainer.stage_ranks
            given = (rank, shape, dtype, trainer, documents, on_gpu, trains, critic)
            return as_fake_rank(_trace, *given, rank=rank, ranks=trainer.ranks)

        waiting = stage.count - 1 - stage.number if trains else 0
        for group in of_rank(0).groups:
            one = of_rank(group[0])
            memory = replace(one.memory, activations=one.memory.activations + waiting * one.waiting)
            found[tuple(number * trainer.stage_ranks + rank for rank in group)] = memory
    return found


def _dense_layers(shape: Architecture, stage: Stage) -> int:
    """The dense layers before those with experts that are in this stage, or after it."""
    return max(shape.dense_layers - stage.layers.start, 0)


def _trace(
    rank: int,
    shape: Architecture,
    dtype: Any,
    trainer: TrainerSettings,
    documents: tuple[int, ...],
    on_gpu: bool,
    trains: bool,
    critic: bool,
) -> Traced:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP and autocast warn of what a run filters
        stage = stage_of(shape.layers, trainer.pp, rank // trainer.stage_ranks)
        whole, dims = _sharded(shape, dtype, trainer, stage, on_gpu, trains, critic)
        tie(whole)
        first = rank - rank % trainer.stage_ranks
        groups = alike(whole.parameters(), dims, range(first, first + trainer.stage_ranks))
        parameters = held_bytes(whole.parameters())
        trained = held_bytes(one for one in whole.parameters() if one.requires_grad and trains)
        elements = sum(one.numel() for one in versioned_tensors(whole).values())
        del whole
        dense = _dense_layers(shape, stage)

        def phases(layers: int) -> list[int]:
            part, alone = replace(stage, layers=range(layers)), replace(shape, layers=layers, dense_layers=dense)
            return _phases(alone, dtype, trainer, part, documents, on_gpu, trains, critic)

        least = min(len(stage.layers), FEW_LAYERS)
        few = more = phases(least)
        if len(stage.layers) > least:
            more = phases(MORE_LAYERS)
    rest = (len(stage.layers) - least) / (MORE_LAYERS - FEW_LAYERS)
    extended = (int(one + rest * (other - one)) for one, other in zip(few, more, strict=True))
    trunk, before_head, in_head, waiting = extended
    logprobs = max(in_head - before_head, 0)
    memory = PassMemory(
        parameters=parameters,
        trained=trained,
        activations=max(trunk, in_head) - logprobs,  # with `logprobs` this is the peak
        logprobs=logprobs,
        stage_elements=elements,
        traced_rank=rank,
    )
    return Traced(
        memory=memory,
        waiting=waiting,
        groups=tuple(tuple(one - first for one in group) for group in groups),
    )


def _phases(
    shape: Architecture,
    dtype: Any,
    trainer: TrainerSettings,
    stage: Stage,
    documents: tuple[int, ...],
    on_gpu: bool,
    trains: bool,
    critic: bool,
) -> list[int]:
    """The peak in the blocks, what is there before the output projection, the peak in it, and what stays until the
    backward pass; without parameters and gradients. A stage without a head has nothing in it."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.fsdp import FSDPModule

    from goaly.models.device import prepare_torchtitan
    from goaly.numerics.cpu_attention import PackedDocuments, causal_mask
    from goaly.train.parallel_model import context_mesh, context_ranks

    causal_mask.cache_clear()  # each trace counts its masks
    model, parallel_dims = _sharded(shape, dtype, trainer, stage, on_gpu, trains, critic)
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
        tie(model)
        model.train()
        _route_evenly(model, tokens // trainer.tp)
        _multiply_experts_without_data(model)
        if isinstance(model, FSDPModule):
            model._get_fsdp_state()._lazy_init()  # pads uneven shards, which a run has done before its first pass
        held = [local_part(tensor) for tensor in (*model.parameters(), *model.buffers())]
        with LiveBytes(held) as live, torch.set_grad_enabled(trains):
            for one in model.parameters() if trains else ():  # as in all but a batch's first microbatch
                one.grad = torch.empty_like(one) if one.requires_grad else None
            live.peak = live.now
            given = torch.zeros(1, tokens, dtype=torch.int64)
            if not stage.is_first:
                part = torch.empty(
                    1, tokens // trainer.tp, shape.dim, dtype=getattr(torch, dtype), requires_grad=trains
                )
                given = part
                if trainer.tp > 1:
                    given = DTensor.from_local(part, parallel_dims.get_mesh("tp"), [Shard(1)], run_check=False)
            hidden = model(given, positions=positions_1T, attention_masks=masks)
            gradients = held_bytes(one.grad for one in model.parameters() if one.grad is not None)
            forward, before, live.peak = live.peak, live.now, live.now
            kept = before - gradients
            if not stage.is_last:
                if trains:
                    hidden = hidden.to_local() if isinstance(hidden, DTensor) else hidden
                    hidden.backward(torch.empty_like(hidden))
                return [max(forward, live.peak) - gradients, 0, 0, kept]
            where, targets = torch.arange(tokens), torch.zeros(tokens, dtype=torch.int64)
            if critic:
                (found,) = model.lm_head(hidden, where)
                entropies = found
            else:
                found, entropies = model.lm_head(hidden, where, targets, trainer.logprob_chunk, trainer.temperature)
            if not trains:
                return [forward, before, live.peak, 0]
            loss = (found + entropies).sum()
            gradient, *_ = torch.autograd.grad(loss, [hidden], retain_graph=True)
            in_head, live.peak = live.peak, live.now
            del gradient
            loss.backward()
            backward, live.peak = live.peak, live.now
            del hidden, found, entropies, loss, where, targets
            phases = [max(forward, backward) - gradients, kept, in_head - gradients, 0]
    return phases


def _sharded(
    shape: Architecture,
    dtype: Any,
    trainer: TrainerSettings,
    stage: Stage,
    on_gpu: bool,
    trains: bool,
    critic: bool,
) -> tuple[Any, Any]:
    """The stage of the model as a run builds it, without memory, and torchtitan's dimensions of the ranks."""
    from goaly.models.context_attention import ContextAttention
    from goaly.models.definition import spec_of
    from goaly.plan.flash_shapes import FlashShapes
    from goaly.train.logprob_head import LOGPROBS
    from goaly.train.parallel_model import sharded_on_meta
    from goaly.train.value_head import VALUES

    on_cpu = ContextAttention.Config() if trainer.cp > 1 else None
    spec = spec_of(shape, attention=FlashShapes.Config() if on_gpu else on_cpu, lora=trainer.lora)
    return sharded_on_meta(spec, dtype, trainer, VALUES if critic else LOGPROBS, stage, trains=trains)


def _route_evenly(model: Any, tokens: int) -> None:
    """Give the dispatchers of experts the counts of an even routing of these tokens: fake tensors have no values."""
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
    from goaly.numerics.experts import Experts

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
