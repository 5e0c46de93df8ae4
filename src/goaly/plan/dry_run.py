"""Plans a run without starting it: the resolved config, the place of every actor, and the memory of each rank.

Estimates count parameters, gradients, AdamW's two moments, the weight store's ring, the key-value cache and the
activations of one micro-batch. They leave out the libraries' own memory (0.3-1 GiB a process).
"""

from itertools import groupby

from goaly.config import to_yaml
from goaly.errors import ConfigError
from goaly.models.spec import architecture, read_config
from goaly.run.cluster import Cluster, imagined, one_host, this_machine
from goaly.run.config import RunConfig
from goaly.run.placement import Placed, place, processes

GIB = 1 << 30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ACTIVATION_COPIES = {"off": 16, "selective": 8, "full": 1}
"""Activations kept for each token and layer, in units of the model's width."""
ON_CPU = " on the CPU"
NOT_HELD = ("ring", "activations", f"parameters{ON_CPU}", f"prefetch{ON_CPU}")
"""Memory that a rank needs elsewhere than on its GPU, or only for a while."""


def memory_by_role(config: RunConfig) -> dict[str, tuple[float, str]]:
    """By role, the GiB that a rank needs, and their purposes."""
    in_words = {
        role: (sum(parts.values()) / GIB, ", ".join(f"{part} {size / GIB:.3f} GiB" for part, size in parts.items()))
        for role, parts in _bytes_by_purpose(config).items()
    }
    return {"hub": (0.0, "queue, rewards, weight store"), "rollout": (0.0, "episodes"), **in_words}


def held_on_gpu(config: RunConfig) -> dict[str, float]:
    """By role, the GiB that a rank holds on its GPU all the time."""
    return {
        role: sum(size for part, size in parts.items() if part not in NOT_HELD) / GIB
        for role, parts in _bytes_by_purpose(config).items()
    }


def _bytes_by_purpose(config: RunConfig) -> dict[str, dict[str, float]]:
    """By role, the bytes that a rank needs for each purpose."""
    shape = architecture(read_config(config.model.path), where=config.model.path)
    count = shape.elements
    trainer, generator, reference, critic = config.trainer, config.generator, config.reference, config.critic
    computed = DTYPE_BYTES[config.model.dtype]
    transferred = DTYPE_BYTES[config.weights.transfer_dtype or config.model.dtype]
    tokens = trainer.microbatch_rows * config.backlog.row_length
    kept = ACTIVATION_COPIES[trainer.activation_checkpointing] * shape.layers * shape.dim
    logits = min(tokens, trainer.logprob_chunk) * 4 * shape.vocab_size
    offloaded = ON_CPU if reference.offload else ""
    trained = 16 * count  # float32 parameter, gradient and two moments
    parts = {
        "trainer": {
            "state": trained / trainer.ranks,
            "ring": config.weights.slots * transferred * count / trainer.ranks,
            "activations": tokens * computed * kept / trainer.tp + logits,
        },
        "reference": {f"parameters{offloaded}": computed * count / reference.ranks},
        "critic": {},
        "generator": {
            "weights": computed * count / generator.tp,
            "prefetch": transferred * count / generator.tp,
            "KV": generator.kv_cache_gib * GIB,
        },
    }
    if reference.refresh_every is not None:
        parts["reference"][f"prefetch{offloaded}"] = transferred * count / reference.ranks
    if critic is not None:
        parts["critic"] = {"state": trained / critic.ranks, "activations": tokens * computed * kept / critic.tp}
    return parts


def placed(config: RunConfig, cluster: Cluster) -> dict[str, Placed]:
    """The place of every process of the run on this cluster; raises a ConfigError that names processes without one."""
    return place(list(processes(config)), config.hosts, cluster, held_on_gpu(config))


def check_this_machine(config: RunConfig) -> None:
    """Raise a ConfigError if the run can't start: its hosts are imagined, or it does not fit this machine."""
    if config.hosts.imagine is not None:
        raise ConfigError(["hosts.imagine: is for --dry-run; a run uses the hosts that it gets"])
    if config.hosts.job == "local":
        placed(config, one_host(this_machine()))


def describe(config: RunConfig) -> str:
    """The plan as text; raises a ConfigError if the run does not fit."""
    hosts = config.hosts
    if hosts.imagine is None and hosts.job != "local":
        needed = f"must be a cluster such as {{hosts: 4, gpus: 8}}, because a dry run does not start {hosts.job}"
        raise ConfigError([f"hosts.imagine=null: {needed}"])
    places = placed(config, one_host(this_machine()) if hosts.imagine is None else imagined(hosts.imagine))
    rows = [("process", "host", "GPU", "cores", "threads", "GiB", "what for")]
    memory = memory_by_role(config)
    for each in processes(config):
        gib, what_for = memory[each.role]
        for rank, one in enumerate(places[each.name].ranks):
            name = each.name if each.count == 1 else f"{each.name}.{rank}"
            gpu = "-" if one.gpu is None else one.gpu.name
            rows.append((name, one.host, gpu, _cores(one.cores), str(each.threads), f"{gib:.3f}", what_for))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return f"{to_yaml(config)}\nhosts: {hosts.job}{' (imagined)' if hosts.imagine else ''}\n\n{table}\n"


def _cores(cores: tuple[int, ...] | None) -> str:
    """Cores as a list of ranges such as `0-3,8`."""
    if cores is None:
        return "any"
    runs = [[core for _, core in run] for _, run in groupby(enumerate(cores), lambda one: one[1] - one[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
