"""The memory that a rank of each role needs, by purpose.

The passes of trainer, critic and reference are traced (`trace.py`): their sharded parameters, and everything that a
pass holds beside them. Weights, caches and rings follow from the settings. Left out are the libraries' own memory
(0.3-1 GiB a process) and vLLM's activations of one step.
"""

from dataclasses import replace

from goaly.models.published import shape_of
from goaly.models.settings import ModelSettings
from goaly.models.spec import Architecture
from goaly.plan.trace import PassMemory, trace
from goaly.run.config import RunConfig
from goaly.train.settings import TrainerSettings

GIB = 1 << 30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ON_HOST = " on the CPU"
NOT_ON_GPU = ("ring", f"parameters{ON_HOST}", f"prefetch{ON_HOST}")
"""Memory that a rank needs in its host."""


def bytes_by_purpose(config: RunConfig, *, on_gpu: bool, traced: bool = True) -> dict[str, dict[str, float]]:
    """By role, the bytes that a rank needs for each purpose. Without `traced`, passes are left out."""
    shape = shape_of(config.model)
    trainer, generator, reference, critic = config.trainer, config.generator, config.reference, config.critic
    computed = DTYPE_BYTES[config.model.dtype]
    moved = shape.elements if trainer.lora is None else trainer.lora.elements(shape)
    transferred = DTYPE_BYTES[config.weights.transfer_dtype or config.model.dtype]
    offloaded = ON_HOST if reference.offload else ""
    spare = ON_HOST if config.weights.spare == "host" and on_gpu else ""
    parts = {
        "trainer": {
            **_trained(config, trainer, config.model, on_gpu, traced),
            "ring": config.weights.slots * transferred * moved / trainer.ranks,
        },
        "reference": {f"parameters{offloaded}": computed * shape.elements / reference.ranks},
        "critic": {},
        "generator": {
            "weights": computed * shape.elements / generator.tp,
            f"prefetch{spare}": transferred * moved / generator.tp,
            "KV": generator.kv_cache_gib * GIB,
        },
    }
    if traced and config.uses_reference:
        documents = (config.backlog.row_length,) * trainer.microbatch_rows
        model = config.model if reference.path is None else replace(config.model, path=reference.path)
        found = traced_pass(shape, model, reference.engine_settings(trainer), documents, on_gpu, trains=False)
        parts["reference"] |= {"activations": found.activations, "log-probs": found.logprobs}
    if reference.refresh_every is not None:
        parts["reference"][f"prefetch{offloaded}"] = transferred * moved / reference.ranks
    if critic is not None:
        model = config.model if critic.path is None else ModelSettings(path=critic.path, dtype=config.model.dtype)
        parts["critic"] = _trained(config, critic.engine_settings(trainer), model, on_gpu, traced)
    return parts


def on_gpu_alone(parts: dict[str, float]) -> float:
    """The GiB of these parts that are in the GPU's memory."""
    return sum(size for part, size in parts.items() if part not in NOT_ON_GPU) / GIB


def cached_tokens(config: RunConfig, shape: Architecture, gib: float | None = None) -> int:
    """The tokens whose keys and values fit into the cache of a generator replica, or into one of `gib` a rank."""
    gib = config.generator.kv_cache_gib if gib is None else gib
    per_token = 2 * shape.layers * shape.kv_heads // config.generator.tp * shape.head_dim
    return int(gib * GIB / (per_token * DTYPE_BYTES[config.model.dtype]))


def _trained(
    config: RunConfig, settings: TrainerSettings, model: ModelSettings, on_gpu: bool, traced: bool
) -> dict[str, float]:
    """The parts of a trained role: float32 parameters, gradients and AdamW's two moments, and a pass over a
    microbatch. With adapters only these are trained, and all else is of the computed type."""
    shape = shape_of(model)
    if not traced:
        parameters = trained = 4 * shape.elements / settings.ranks
        if settings.lora is not None:
            trained = 4 * settings.lora.elements(shape) / settings.ranks
            parameters = DTYPE_BYTES[model.dtype] * shape.elements / settings.ranks + trained
        return {"parameters": parameters, "gradients": trained, "optimizer": 2 * trained}
    documents = (config.backlog.row_length,) * settings.microbatch_rows
    found = traced_pass(shape, model, settings, documents, on_gpu)
    return {
        "parameters": found.parameters,
        "gradients": found.trained,
        "optimizer": 2 * found.trained,
        "activations": found.activations,
        "log-probs": found.logprobs,
    }


def traced_pass(
    shape: Architecture,
    model: ModelSettings,
    settings: TrainerSettings,
    documents: tuple[int, ...],
    on_gpu: bool,
    *,
    trains: bool = True,
) -> PassMemory:
    """A pass over documents of these lengths, on the ranks of the pipeline stage that need most: the first one, whose
    microbatches wait longest, the second, which may have a layer more, or the last, which has the head. Settings that
    change no memory do not lead to another trace."""
    alike = TrainerSettings(
        pp=settings.pp,
        fsdp=settings.fsdp,
        tp=settings.tp,
        cp=settings.cp,
        ep=settings.ep,
        logprob_chunk=settings.logprob_chunk,
        activation_checkpointing=settings.activation_checkpointing,
        lora=settings.lora and replace(settings.lora, seed=0),
    )
    if missing := -sum(documents) % settings.token_multiple:
        documents = (*documents, missing)  # as microbatches are padded
    stages = sorted({0, min(1, settings.pp - 1), settings.pp - 1})
    found = [trace(shape, model.dtype, alike, documents, on_gpu=on_gpu, trains=trains, stage=stage) for stage in stages]
    return max(found, key=lambda one: one.parameters + 3 * one.trained + one.activations + one.logprobs)
