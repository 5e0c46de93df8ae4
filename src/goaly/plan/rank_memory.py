"""The memory that the ranks of each role need, by purpose, in the groups of ranks that need the same.

The ranks of trainer, critic and reference are built without memory and their passes are traced (`pass_memory.py`):
their sharded parameters, and everything that a pass holds beside them. The ranks of a generator are built too
(`generator_memory.py`). Caches and rings follow from the settings. Left out are the libraries' own memory (0.3-1 GiB a
process), CUDA graphs and vLLM's activations and logits of one step, for which a GPU keeps `HEADROOM` free; and on CPUs
the copies of weights in the order of vLLM's kernels, which are float32 ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from goaly.models.architecture import Architecture
from goaly.models.catalog import shape_of
from goaly.models.settings import ModelSettings
from goaly.plan.generator_memory import replica_memory
from goaly.plan.parallelism import Parallelism
from goaly.plan.pass_memory import PassMemory, trace
from goaly.plan.run_config import RunConfig
from goaly.train.settings import TrainerSettings
from goaly.trajectory import LATER, LATER_TOP, REQUIRED

GIB = 1 << 30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The bytes that each of these ranks needs for each purpose."""

    ranks: tuple[int, ...]
    """Numbers in their role; a generator's, in each replica."""
    on_device: Mapping[str, float]
    """In the memory of its GPU; without GPUs, in the host's."""
    on_host: Mapping[str, float] = field(default_factory=dict)
    """In the host's memory."""
    fetched: float = 0.0
    """The bytes of the weights that it fetches, as it holds them."""

    @property
    def device_gib(self) -> float:
        """The GiB on its device."""
        return sum(self.on_device.values()) / GIB

    @property
    def host_gib(self) -> float:
        """The GiB in its host's memory, beside those of a device."""
        return sum(self.on_host.values()) / GIB

    def __str__(self) -> str:
        """The purposes, and how much each needs."""
        on_host = f"host: {in_words(self.on_host)}" if self.on_host else ""
        return "; ".join(filter(None, [in_words(self.on_device), on_host]))


def in_words(parts: Mapping[str, float]) -> str:
    """Purposes, each with its GiB."""
    return ", ".join(f"{part} {size / GIB:.3f} GiB" for part, size in parts.items())


def memory_by_role(config: RunConfig, *, on_gpu: bool, traced: bool = True) -> dict[str, tuple[RankMemory, ...]]:
    """By role, the memory of all its ranks. Without `traced` no model is built: passes are left out, and ranks count as
    equal."""
    shape = shape_of(config.model)
    found = {
        "trainer": _trainer(config, shape, on_gpu, traced),
        "generator": _generator(config, shape, on_gpu, traced),
        "hub": (RankMemory(ranks=(0,), on_device={}, on_host={"samples": samples_bytes(config, shape)}),),
    }
    if config.uses_reference:
        found["reference"] = _reference(config, shape, on_gpu, traced)
    if config.critic is not None:
        model = config.model
        if config.critic.path is not None:
            model = ModelSettings(path=config.critic.path, dtype=config.model.dtype)
        found["critic"] = _trained(
            config, config.critic.engine_settings(config.trainer), model, on_gpu, traced, critic=True
        )
    return found


def cached_tokens(config: RunConfig, shape: Architecture, gib: float | None = None) -> int:
    """The tokens whose keys and values fit into the cache of a generator replica, or into one of `gib` a rank."""
    gib = config.generator.kv_cache_gib if gib is None else gib
    return int(gib * GIB / config.generator.cached_token_bytes(shape, config.model.dtype))


def choices_bytes(config: RunConfig, shape: Architecture) -> int:
    """The bytes of a token's choices of experts, if they are recorded."""
    if not (config.moe.replays and shape.experts):
        return 0
    return (shape.layers - shape.dense_layers) * shape.experts_per_token


def samples_bytes(config: RunConfig, shape: Architecture) -> float:
    """The bytes of all samples that wait for training, are trained, or are still generated, if each has all tokens that
    it may have."""
    backlog = config.backlog
    columns = sum(one.itemsize for key, one in (REQUIRED | LATER).items() if key != "teacher_logprobs")
    if (distill := config.loss.distill) is not None:
        columns += LATER["teacher_logprobs"].itemsize
        columns += sum(one.itemsize for one in LATER_TOP.values()) * distill.top_k * distill.uses_top
    groups = (backlog.max_staleness + 2) * backlog.groups_per_step
    tokens = groups * backlog.group_size * config.max_context
    return tokens * (columns + choices_bytes(config, shape))


def passes(
    config: RunConfig,
    settings: TrainerSettings,
    model: ModelSettings,
    on_gpu: bool,
    *,
    trains: bool = True,
    critic: bool = False,
) -> dict[tuple[int, ...], PassMemory]:
    """By ranks, the memory of a pass over a full microbatch."""
    documents = (config.backlog.row_length,) * settings.microbatch_rows
    return traced_pass(shape_of(model), model, settings, documents, on_gpu, trains=trains, critic=critic)


def traced_pass(
    shape: Architecture,
    model: ModelSettings,
    settings: TrainerSettings,
    documents: tuple[int, ...],
    on_gpu: bool,
    *,
    trains: bool = True,
    critic: bool = False,
) -> dict[tuple[int, ...], PassMemory]:
    """By ranks, the memory of a pass over documents of these lengths. Settings that change no memory do not lead to
    another trace."""
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
    return trace(shape, model.dtype, alike, documents, on_gpu=on_gpu, trains=trains, critic=critic)


def transferred_bytes(config: RunConfig) -> int:
    """The bytes of a published weight."""
    return DTYPE_BYTES[config.weights.transfer_dtype or config.model.dtype]


def _trainer(config: RunConfig, shape: Architecture, on_gpu: bool, traced: bool) -> tuple[RankMemory, ...]:
    trainer, weights = config.trainer, config.weights
    elements = shape.elements if trainer.lora is None else trainer.lora.elements(shape)
    staged = dict.fromkeys(range(trainer.ranks), elements / trainer.ranks)  # elements that each rank publishes
    if traced:
        for ranks, found in passes(config, trainer, config.model, on_gpu).items():
            staged |= dict.fromkeys(ranks, found.stage_elements / trainer.stage_ranks)
    slots = weights.slots + (weights.transport == "torchstore")  # from which its volumes copy
    groups = []
    for one in _trained(config, trainer, config.model, on_gpu, traced):
        own = staged[one.ranks[0]]
        ring = {"ring": slots * transferred_bytes(config) * own}
        if earlier := config.earlier_policies:  # and the present one, while another takes its place
            ring["earlier"] = (earlier * DTYPE_BYTES[config.model.dtype] + 4) * own
        groups.append(replace(one, on_host={**ring, **one.on_host}))
    return tuple(groups)


def _trained(
    config: RunConfig,
    settings: TrainerSettings,
    model: ModelSettings,
    on_gpu: bool,
    traced: bool,
    *,
    critic: bool = False,
) -> tuple[RankMemory, ...]:
    """Float32 parameters, gradients and AdamW's two moments, a pass over a microbatch, and the copy of the state that a
    checkpoint is written from. With adapters only these are trained, and all else is of the computed type."""
    if traced:
        return tuple(
            RankMemory(
                ranks=ranks,
                on_device={
                    "parameters": found.parameters,
                    "gradients": found.trained,
                    "optimizer": 2 * found.trained,
                    "activations": found.activations,
                    "log-probs": found.logprobs,
                },
                on_host={"checkpoint": 3 * found.trained},
            )
            for ranks, found in passes(config, settings, model, on_gpu, critic=critic).items()
        )
    shape = shape_of(model)
    parameters = trained = 4 * shape.elements / settings.ranks
    if settings.lora is not None:
        trained = 4 * settings.lora.elements(shape) / settings.ranks
        parameters = DTYPE_BYTES[model.dtype] * shape.elements / settings.ranks + trained
    held = {"parameters": parameters, "gradients": trained, "optimizer": 2 * trained}
    return (RankMemory(ranks=tuple(range(settings.ranks)), on_device=held, on_host={"checkpoint": 3 * trained}),)


def _reference(config: RunConfig, shape: Architecture, on_gpu: bool, traced: bool) -> tuple[RankMemory, ...]:
    """Parameters of the computed type; if they are refreshed, the fetched ones and the copy for a checkpoint."""
    reference = config.reference
    settings, computed = reference.engine_settings(config.trainer), DTYPE_BYTES[config.model.dtype]
    model = config.model if reference.path is None else replace(config.model, path=reference.path)
    groups: dict[tuple[int, ...], tuple[float, dict[str, float]]]
    if traced:
        found = passes(config, settings, model, on_gpu, trains=False)
        groups = {
            ranks: (one.parameters, {"activations": one.activations, "log-probs": one.logprobs})
            for ranks, one in found.items()
        }
    else:
        even = computed * shape_of(model).elements / reference.ranks
        groups = {tuple(range(reference.ranks)): (even, {})}
    memory = []
    for ranks, (parameters, of_pass) in groups.items():
        on_device, on_host = {"parameters": parameters}, {}
        fetched = 0.0
        if reference.refresh_every is not None:
            fetched = parameters
            if settings.lora is not None:
                fetched = 4 * settings.lora.elements(shape) / reference.ranks
            on_device["prefetch"] = fetched
            if reference.average is not None:
                elements = shape.elements if settings.lora is None else settings.lora.elements(shape)
                on_device["average"] = 4 * elements / reference.ranks
            on_host["checkpoint"] = fetched
        if reference.offload:
            on_host |= on_device
            on_device = {}
        memory.append(RankMemory(ranks=ranks, on_device=on_device | of_pass, on_host=on_host, fetched=fetched))
    return tuple(memory)


def _generator(config: RunConfig, shape: Architecture, on_gpu: bool, traced: bool) -> tuple[RankMemory, ...]:
    """Weights, those that were fetched, and the key-value cache with the choices of its tokens' experts."""
    generator, weights, lora = config.generator, config.weights, config.trainer.lora
    groups: dict[tuple[int, ...], tuple[float, float]]
    if traced:
        found = replica_memory(shape, config.model, generator, lora)
        groups = {ranks: (one.weights, one.updated) for ranks, one in found.items()}
    else:
        computed = DTYPE_BYTES[config.model.dtype]
        layout = Parallelism(tp=generator.tp, ep=generator.ep).layout(
            shape.parameters(), 0, getattr(torch, config.model.dtype)
        )
        held = sum(shard.bytes for shard in layout)
        adapters = 0.0 if lora is None else computed * lora.elements(shape) / generator.tp
        groups = {tuple(range(generator.tp)): (held + adapters, adapters or held)}
    cached = {"KV": generator.kv_cache_gib * GIB}
    if choices := choices_bytes(config, shape):
        cached["choices"] = choices * cached_tokens(config, shape)
    memory = []
    for ranks, (held_bytes, updated) in groups.items():
        on_device, on_host = {"weights": held_bytes}, {}
        (on_host if weights.spare == "host" and on_gpu else on_device)["prefetch"] = updated
        memory.append(RankMemory(ranks=ranks, on_device=on_device | cached, on_host=on_host, fetched=updated))
    return tuple(memory)
