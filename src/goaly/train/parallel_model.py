"""Builds a model for training: torchtitan's definition, sharded over the ranks, with the weights of a folder.

A trained model has float32 parameters; a frozen one has parameters of its compute type. With `trainer.lora` adapters
are float32, and all other parameters are frozen ones of the compute type. A single rank whose parameters have the
compute type gets the plain model, without FSDP hooks and all-gathers. In all other cases torchtitan's `parallelize_fn`
shards it (FSDP2 over `fsdp * cp`, tensor parallelism over `tp`). That is all that torchtitan knows of `cp`: the engine
gives each rank its share of the tokens, and the model has an attention over all shares (`models/context_parallel.py`).
With `pp` the ranks of a stage build the whole model without memory, and keep their layers (`pipeline.py`).

Ranks are numbered with `tp` innermost and `pp` outermost: `pp`, `fsdp`, `cp`, `tp`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from goaly.base.errors import ConfigError
from goaly.models.definition import divide, folder_tensors, model_spec, versioned_tensors
from goaly.models.device import prepare_torchtitan
from goaly.models.settings import ModelSettings
from goaly.train.pipeline import Pipeline, Stage, keep_stage, stage_of
from goaly.train.settings import AXES, NEEDS_GPU, NOT_BITWISE, OFFLOAD_NEEDS_GPU, TrainerSettings

if TYPE_CHECKING:
    from goaly.models.context_parallel import ContextRanks


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelModel:
    """The model on this rank, and the rank's place in the mesh."""

    model: Any
    spec: Any
    device: torch.device
    dp_rank: int
    dp_group: dist.ProcessGroup | None
    """The ranks with different rows; None if all have the same."""
    context: "ContextRanks | None"
    """The ranks that divide the tokens of the same rows; None if each has all."""
    pipeline: Pipeline
    leads: bool
    """Whether this rank reports for the ranks that have the same rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A module that replaces a model's output projection."""

    of: str
    """The name of a model with this head in errors."""
    install: Callable[[Any], None]
    """Puts the head into a decoder's config whose shardings are set."""
    in_folder: bool
    """Whether its weight is the output projection of the model's folder."""


def build_parallel(
    settings: ModelSettings, trainer: TrainerSettings, head: Head, *, trains: bool = True, offload: bool = False
) -> ParallelModel:
    """Build, shard and load the model; `torch.distributed` must be initialized if there is more than one rank.

    With `offload` the parameters stay in CPU memory, and a GPU fetches one block at a time.
    """
    if trainer.cp > 1 and settings.numerics == "bitwise":
        raise ConfigError([f"cp={trainer.cp}: {NOT_BITWISE}"])
    device = prepare_torchtitan()
    _quieten()
    _check_ranks(trainer, device, needs_group=trains or trainer.ranks > 1)
    if offload and device.type == "cpu":
        raise ConfigError([f"reference.offload=true: {OFFLOAD_NEEDS_GPU}"])
    from goaly.models.attention import share_angles
    from goaly.models.context_attention import context_attention
    from goaly.models.hf import load_hf
    from goaly.models.lora import draw_adapters, note_base

    lora = trainer.lora
    attention = None if trainer.cp == 1 else context_attention(device.type)
    spec = model_spec(settings.path, attention=attention, numerics=settings.numerics, lora=lora)
    if device.type == "cpu" and settings.numerics == "fast":
        from torchtitan.models.common.linear import Linear

        from goaly.numerics.cpu_training import LeanLinear
        from goaly.numerics.layer_replacement import replace_layers

        replace_layers(spec.model, {Linear: LeanLinear})
    config: Any = spec.model
    rank = dist.get_rank() if trainer.ranks > 1 else 0
    stage = stage_of(len(config.layers), trainer.pp, rank // trainer.stage_ranks)
    model, parallel_dims = sharded_on_meta(spec, settings.dtype, trainer, head, stage, trains=trains, offload=offload)
    model.to_empty(device="cpu" if offload else device)
    with torch.no_grad():
        model.init_weights(buffer_device=device if offload else None)
    share_angles(model)
    load_hf(model, spec, settings.path, head=head.in_folder)
    if lora is not None:
        note_base(model, folder_tensors(model), alone=trainer.ranks == 1)
        if trains:
            draw_adapters(versioned_tensors(model), lora.seed)
    model.train()
    alike = trainer.tp * trainer.cp
    mesh = None if trainer.cp == 1 else context_mesh(trainer, device.type)
    dp_group = None
    if trainer.fsdp > 1:
        dp_group = parallel_dims.get_mesh("fsdp").get_group() if mesh is None else mesh.get_group("rows")
    return ParallelModel(
        model=model,
        spec=spec,
        device=device,
        dp_rank=rank % trainer.stage_ranks // alike,
        dp_group=dp_group,
        context=None if mesh is None else context_ranks(mesh),
        pipeline=_pipeline(stage, trainer, parallel_dims, config.dim, getattr(torch, settings.dtype), device),
        leads=stage.is_first and rank % alike == 0,
    )


def sharded_on_meta(
    spec: Any,
    dtype: Literal["float32", "bfloat16"],
    trainer: TrainerSettings,
    head: Head,
    stage: Stage,
    *,
    trains: bool = True,
    offload: bool = False,
) -> tuple[Any, Any]:
    """The sharded stage of the model without memory, and torchtitan's dimensions of the ranks (None for a plain
    model)."""
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.config import CompileConfig, TrainingConfig
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.tools.utils import set_default_dtype

    from goaly.models.lora import train_only_adapters

    lora = trainer.lora
    kept: Literal["float32", "bfloat16"] = "float32" if trains and lora is None else dtype
    casts = trains and dtype != "float32"
    wrapped = trainer.ranks > 1 or casts or offload
    parallelism, parallel_dims = _layout(trainer) if wrapped else (None, None)
    if wrapped:
        divide(spec.model, parallelism)
    head.install(spec.model)
    with torch.device("meta"), set_default_dtype(getattr(torch, kept)):
        model = spec.model.build()
    keep_stage(model, stage)
    if lora is not None and trains:
        train_only_adapters(model)
    model._skip_lm_head = True
    compile_config = CompileConfig(enable=trainer.compile, components=["model"])
    kinds = {"off": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}
    checkpointing = kinds[trainer.activation_checkpointing]
    if wrapped:
        spec.parallelize_fn(
            model,
            parallel_dims=parallel_dims,
            # FSDP casts parameters of another type for each pass.
            training=TrainingConfig(dtype=kept, mixed_precision_param=dtype, enable_cpu_offload=offload),
            parallelism=parallelism,
            compile_config=compile_config,
            ac_config=checkpointing,
            dump_folder="",
        )
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # gloo has no scaled reduction, and none is needed: losses are divided by global counts.
                module.set_force_sum_reduction_for_comms(True)
    else:
        _prepare_alone(model, compile_config, checkpointing)
    return model, parallel_dims


def backends() -> str:
    """The backends of the process groups: NCCL between GPUs, gloo between CPUs."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def context_mesh(trainer: TrainerSettings, device: str) -> DeviceMesh:
    """The mesh of the ranks in which an axis divides tokens; every rank must call it."""
    sizes = (trainer.pp, trainer.fsdp, trainer.cp, trainer.tp)
    return init_device_mesh(device, sizes, mesh_dim_names=("pp", "rows", "cp", "tp"))


def context_ranks(mesh: DeviceMesh) -> "ContextRanks":
    """This rank among those of its rows in that mesh."""
    from goaly.models.context_parallel import ContextRanks

    return ContextRanks(group=mesh.get_group("cp"), rank=mesh.get_local_rank("cp"), count=mesh["cp"].size())


def _pipeline(
    stage: Stage, trainer: TrainerSettings, parallel_dims: Any, width: int, dtype: torch.dtype, device: torch.device
) -> Pipeline:
    """The stages of a model of this width and type of hidden states, on the ranks of this one's column."""
    if stage.count == 1:
        return Pipeline(stage)

    def hidden(tokens: int) -> Tensor:
        return torch.empty(1, tokens // (trainer.cp * trainer.tp), width, dtype=dtype, device=device)

    return Pipeline(
        stage,
        mesh=parallel_dims.get_mesh("pp"),
        tp_mesh=parallel_dims.get_mesh("tp") if trainer.tp > 1 else None,
        writes=dist.get_rank() % trainer.stage_ranks == 0,
        hidden=hidden,
    )


def _check_ranks(trainer: TrainerSettings, device: torch.device, *, needs_group: bool) -> None:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if needs_group and ranks != trainer.ranks:
        product = " * ".join(f"{axis}={getattr(trainer, axis)}" for axis in AXES)
        raise ConfigError([f"trainer: {product} must be the number of ranks, {ranks}"])
    if trainer.compile and device.type == "cpu":
        raise ConfigError([f"trainer.compile=true: {NEEDS_GPU}"])


def _layout(trainer: TrainerSettings) -> tuple[Any, Any]:
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import set_spmd_backend

    if not dist.is_initialized():
        dist.init_process_group(backends(), store=dist.HashStore(), rank=0, world_size=1)
    parallelism = ParallelismConfig(
        pipeline_parallel_degree=trainer.pp,
        data_parallel_shard_degree=trainer.shards,
        tensor_parallel_degree=trainer.tp,
        expert_parallel_degree=trainer.ep,
        spmd_backend="partial_dtensor",
        # torchtitan keeps a stage's whole parameters from a forward pass to the backward pass.
        fsdp_reshard_after_forward="default" if trainer.pp == 1 else "always",
    )
    set_spmd_backend(parallelism.spmd_backend)
    parallel_dims = ParallelDims.from_config(parallelism, trainer.ranks)
    parallel_dims.build_mesh()
    return parallelism, parallel_dims


def _prepare_alone(model: Any, compile_config: Any, checkpointing: Any) -> None:
    if checkpointing is not None:
        checkpointing.build(dump_folder="").apply(model)
    if compile_config.enable:
        from torchtitan.config import ParallelismConfig
        from torchtitan.distributed import ParallelDims
        from torchtitan.distributed.compile import apply_compile

        alone = ParallelDims.from_config(ParallelismConfig(data_parallel_shard_degree=1), 1)
        apply_compile(model, compile_config=compile_config, parallel_dims=alone)


def _quieten() -> None:
    """Drop torchtitan's info records, which go to the root logger, and DTensor's redistribution warnings."""
    logging.getLogger().addFilter(_worth_reading)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def _worth_reading(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or "torchtitan" not in record.pathname
