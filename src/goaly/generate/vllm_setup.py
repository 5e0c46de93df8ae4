"""vLLM's arguments for the engine of a replica."""

import multiprocessing
import os
from typing import Any

import torch
from vllm import EngineArgs
from vllm.config import StructuredOutputsConfig

from goaly.base.errors import ConfigError
from goaly.generate.expert_choices import RECORDS_CHOICES
from goaly.generate.grammars import BACKEND
from goaly.generate.settings import CPU_BLOCK_TOKENS, NO_ADAPTERS, GeneratorSettings
from goaly.models.architecture import Architecture
from goaly.models.device import prepare_torchtitan
from goaly.models.settings import LoraSettings, ModelSettings
from goaly.numerics.cpu_ranks import CpuRanks

GIB = 1 << 30
FREE_ENOUGH = 0.01
"""Share of a GPU's memory that must be free before vLLM starts. The cache's size is set, so vLLM uses the share for
nothing else. With the default it would refuse a GPU that it shares with another role."""


def engine_arguments(
    settings: GeneratorSettings,
    model: ModelSettings,
    shape: Architecture,
    *,
    seed: int = 0,
    records_choices: bool = False,
    lora: LoraSettings | None = None,
) -> EngineArgs:
    """The arguments of vLLM's engine for a model of this shape. ConfigError if it cannot serve it."""
    on_cuda = torch.cuda.is_available()
    waits = shape.experts and settings.engine == "torchtitan" and not _multiplies_experts_at_once(model.dtype)
    overrides: dict[str, Any] = {"compilation_config": {}}
    if on_cuda:
        overrides["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        overrides["gpu_memory_utilization"] = FREE_ENOUGH
    bitwise = model.numerics == "bitwise"
    if bitwise and settings.engine == "native":
        raise ConfigError(["model.numerics=bitwise: must be fast with generator.engine=native"])
    # The second one divides by the temperature in another way, and seeded draws depend on the parts of a prompt.
    if bitwise or not on_cuda:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if lora is not None and settings.engine == "native":
        raise ConfigError([f"generator.engine=native: {NO_ADAPTERS}"])
    if settings.engine == "torchtitan":
        prepare_torchtitan()
        from goaly.generate import vllm_model

        vllm_model.register()
        os.environ["VLLM_MLA_DISABLE"] = "1"  # torchtitan's attention needs keys and values of each head in the cache
        overrides["hf_overrides"] = {"architectures": [vllm_model.ARCHITECTURES[model.numerics]]}
        additional: dict[str, Any] = {RECORDS_CHOICES: True} if records_choices else {}
        if lora is not None:
            additional[vllm_model.LORA] = vars(lora)
        overrides["additional_config"] = additional
    return EngineArgs(
        model=str(model.path),
        dtype=model.dtype,
        seed=seed,
        runner="generate",
        skip_tokenizer_init=True,
        generation_config="vllm",
        tensor_parallel_size=settings.tp,
        enable_expert_parallel=settings.ep > 1,
        distributed_executor_backend="external_launcher" if settings.tp > 1 else "uni",
        max_num_seqs=settings.most_running,
        max_model_len=settings.max_context,
        max_num_batched_tokens=settings.max_step_tokens,
        enable_chunked_prefill=True,
        kv_cache_memory_bytes=int(settings.kv_cache_gib * GIB),
        block_size=None if on_cuda else CPU_BLOCK_TOKENS,
        enable_prefix_caching=settings.prefix_caching,
        disable_hybrid_kv_cache_manager=True if shape.windows else None,  # one table of blocks for all layers
        enforce_eager=bitwise or not (on_cuda and settings.cuda_graphs and not waits),
        logprobs_mode="processed_logprobs",
        async_scheduling=settings.async_scheduling,
        structured_outputs_config=StructuredOutputsConfig(backend=BACKEND),
        disable_log_stats=True,
        **overrides,
    )


def _multiplies_experts_at_once(dtype: str) -> bool:
    """Whether this GPU's matrix product of experts reads itself how many rows each has. Others wait for these numbers,
    so they cannot be part of a CUDA graph."""
    return dtype == "bfloat16" and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def unname_semaphores() -> None:
    """Before an engine's start: give vLLM and its progress bars locks without names.

    Under the start method "spawn", which Monarch's processes have, a lock keeps its name until its process ends well.
    """
    from tqdm.std import TqdmDefaultWriteLock
    from vllm.v1.executor import uniproc_executor

    nameless = multiprocessing.get_context("fork")
    uniproc_executor.Lock = nameless.Lock
    if not hasattr(TqdmDefaultWriteLock, "mp_lock"):
        TqdmDefaultWriteLock.mp_lock = nameless.RLock()


def leave_no_named_shared_memory() -> None:
    """Before an engine's start: let vLLM's ranks make no named shared memory.

    Ranks on a CPU get ours. Message queues would keep names until the end of the start, and are not made: the rare
    objects that ranks exchange go through the process group.
    """
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import cpu_communicator

    if cpu_communicator._CPUSHMDistributed is CpuRanks:
        return
    cpu_communicator._CPUSHMDistributed = CpuRanks
    make_group: Any = parallel_state.init_model_parallel_group
    parallel_state.init_model_parallel_group = lambda *arguments, **options: make_group(
        *arguments, **{**options, "use_message_queue_broadcaster": False}
    )
