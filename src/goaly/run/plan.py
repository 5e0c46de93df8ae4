"""What a run would be, without starting it: the resolved config, every actor's place, and the memory of each rank.

Estimates count parameters, gradients, AdamW's two moments, the weight store's ring, the key-value cache and the
activations of one micro-batch; they leave out what libraries take for themselves (0.3-1 GiB a process).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from goaly.config import to_yaml
from goaly.models.spec import Architecture, architecture, read_config
from goaly.run.config import RunConfig

GIB = 1 << 30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ACTIVATION_COPIES = {"off": 16, "selective": 8, "full": 1}
"""Activations kept for each token and layer, in units of the model's width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One kind of process: how many there are, where, and what each needs."""

    name: str
    processes: int
    threads: int
    role: str
    needs: str
    gib: float


def parameters(shape: Architecture) -> int:
    """How many parameters a dense decoder of this shape has."""
    attention = shape.dim * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    norms = 2 * shape.dim + (2 * shape.head_dim if shape.family == "qwen3" else 0)
    layer = attention + 3 * shape.dim * shape.hidden_dim + norms
    embeddings = shape.vocab_size * shape.dim * (1 if shape.tied else 2)
    return shape.layers * layer + embeddings + shape.dim


def placements(config: RunConfig) -> Iterator[Placement]:
    """Every process that the run would spawn."""
    shape = architecture(read_config(config.model.path), where=config.model.path)
    count = parameters(shape)
    trainer, generator = config.trainer, config.generator
    computed = DTYPE_BYTES[config.model.dtype]
    transferred = DTYPE_BYTES[config.weights.transfer_dtype or "float32"]
    yield Placement(name="hub", processes=1, threads=1, role="hub", needs="queue, rewards, weight store", gib=0.0)

    state = 16 * count / trainer.ranks  # float32 parameter, gradient and two moments
    ring = config.weights.slots * transferred * count / trainer.ranks
    tokens = trainer.microbatch_rows * config.backlog.row_length
    kept = ACTIVATION_COPIES[trainer.activation_checkpointing] * shape.layers * shape.dim
    activations = tokens * computed * kept / trainer.tp + min(tokens, trainer.logprob_chunk) * 4 * shape.vocab_size
    yield Placement(
        name="trainer",
        processes=trainer.ranks,
        threads=trainer.threads,
        role="trainer",
        needs=f"state {_gib(state)}, ring {_gib(ring)}, activations {_gib(activations)}",
        gib=(state + ring + activations) / GIB,
    )
    if config.uses_reference:
        ranks = config.reference.fsdp * config.reference.tp
        yield Placement(
            name="reference",
            processes=ranks,
            threads=config.reference.threads,
            role="reference",
            needs=f"parameters {_gib(4 * count / ranks)}",
            gib=4 * count / ranks / GIB,
        )
    critic = config.critic
    if critic is not None:
        state = 16 * count / critic.ranks
        activations = tokens * computed * kept / critic.tp
        yield Placement(
            name="critic",
            processes=critic.ranks,
            threads=critic.threads,
            role="critic",
            needs=f"state {_gib(state)}, activations {_gib(activations)}",
            gib=(state + activations) / GIB,
        )
    weights = computed * count / generator.tp
    staged = transferred * count / generator.tp
    for replica in range(generator.replicas):
        yield Placement(
            name=f"generator-{replica}",
            processes=generator.tp,
            threads=generator.threads,
            role="generator",
            needs=f"weights {_gib(weights)}, prefetch {_gib(staged)}, KV {generator.kv_cache_gib:.2f} GiB",
            gib=(weights + staged) / GIB + generator.kv_cache_gib,
        )
    for worker in range(config.rollout.workers):
        yield Placement(name=f"rollout-{worker}", processes=1, threads=1, role="rollout", needs="episodes", gib=0.0)


def describe(config: RunConfig) -> str:
    """The plan as text."""
    rows = [("actor", "processes", "threads", "cores", "GiB a rank", "what for")]
    for place in placements(config):
        cores = ",".join(map(str, config.hosts.bind.get(place.role, []))) or "any"
        rows.append((place.name, str(place.processes), str(place.threads), cores, f"{place.gib:.3f}", place.needs))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return f"{to_yaml(config)}\nhosts: {config.hosts.job}\n\n{table}\n"


def _gib(count: float) -> str:
    return f"{count / GIB:.3f} GiB"
