"""What a run would be, without starting it: the resolved config, every actor's place, and the memory of each rank.

Estimates count parameters, gradients, AdamW's two moments, the weight store's ring, the key-value cache and the
activations of one micro-batch; they leave out what libraries take for themselves (0.3-1 GiB a process).
"""

from goaly.config import to_yaml
from goaly.models.spec import Architecture, architecture, read_config
from goaly.run.config import RunConfig
from goaly.run.processes import processes

GIB = 1 << 30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ACTIVATION_COPIES = {"off": 16, "selective": 8, "full": 1}
"""Activations kept for each token and layer, in units of the model's width."""


def parameters(shape: Architecture) -> int:
    """How many parameters a dense decoder of this shape has."""
    attention = shape.dim * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    norms = 2 * shape.dim + (2 * shape.head_dim if shape.family == "qwen3" else 0)
    layer = attention + 3 * shape.dim * shape.hidden_dim + norms
    embeddings = shape.vocab_size * shape.dim * (1 if shape.tied else 2)
    return shape.layers * layer + embeddings + shape.dim


def needs(config: RunConfig) -> dict[str, tuple[float, str]]:
    """By role, the GiB that a rank needs, and what for."""
    shape = architecture(read_config(config.model.path), where=config.model.path)
    count = parameters(shape)
    trainer, generator, reference, critic = config.trainer, config.generator, config.reference, config.critic
    computed = DTYPE_BYTES[config.model.dtype]
    transferred = DTYPE_BYTES[config.weights.transfer_dtype or config.model.dtype]
    tokens = trainer.microbatch_rows * config.backlog.row_length
    kept = ACTIVATION_COPIES[trainer.activation_checkpointing] * shape.layers * shape.dim
    logits = min(tokens, trainer.logprob_chunk) * 4 * shape.vocab_size
    trained = 16 * count  # float32 parameter, gradient and two moments
    by_role = {
        "trainer": {
            "state": trained / trainer.ranks,
            "ring": config.weights.slots * transferred * count / trainer.ranks,
            "activations": tokens * computed * kept / trainer.tp + logits,
        },
        "reference": {
            f"parameters{' on the CPU' * reference.offload}": computed * count / reference.ranks,
            **({} if reference.refresh_every is None else {"prefetch": transferred * count / reference.ranks}),
        },
        "critic": {"state": trained / critic.ranks, "activations": tokens * computed * kept / critic.tp}
        if critic is not None
        else {},
        "generator": {
            "weights": computed * count / generator.tp,
            "prefetch": transferred * count / generator.tp,
            "KV": generator.kv_cache_gib * GIB,
        },
    }
    in_words = {
        role: (sum(parts.values()) / GIB, ", ".join(f"{part} {size / GIB:.3f} GiB" for part, size in parts.items()))
        for role, parts in by_role.items()
    }
    return {"hub": (0.0, "queue, rewards, weight store"), "rollout": (0.0, "episodes"), **in_words}


def describe(config: RunConfig) -> str:
    """The plan as text."""
    rows = [("actor", "processes", "threads", "cores", "GiB a rank", "what for")]
    needed = needs(config)
    for place in processes(config):
        cores = ",".join(map(str, config.hosts.bind.get(place.role, []))) or "any"
        gib, what_for = needed[place.role]
        rows.append((place.name, str(place.count), str(place.threads), cores, f"{gib:.3f}", what_for))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return f"{to_yaml(config)}\nhosts: {config.hosts.job}\n\n{table}\n"
