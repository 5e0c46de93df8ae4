"""Plans a run without starting it: the resolved config, the place of every actor, and the memory of each rank.

Estimates are those of `memory.py`. A dry run traces the trainer's passes; a run that starts checks only what its ranks
hold all the time.
"""

from itertools import groupby

from goaly.config import to_yaml
from goaly.config.settings import Section
from goaly.errors import ConfigError
from goaly.models.published import shape_of
from goaly.models.settings import folder_problems
from goaly.plan.memory import GIB, bytes_by_purpose, cached_tokens, on_gpu_alone
from goaly.plan.spare import Spare, spare_of, what_would_fit, with_spare
from goaly.run.cluster import Cluster, imagined, one_host, this_machine
from goaly.run.config import RunConfig
from goaly.run.placement import Placed, place, processes


def memory_by_role(config: RunConfig, *, on_gpu: bool = False) -> dict[str, tuple[float, str]]:
    """By role, the GiB that a rank needs, and their purposes."""
    in_words = {
        role: (sum(parts.values()) / GIB, ", ".join(f"{part} {size / GIB:.3f} GiB" for part, size in parts.items()))
        for role, parts in bytes_by_purpose(config, on_gpu=on_gpu).items()
    }
    return {"hub": (0.0, "queue, rewards, weight store"), "rollout": (0.0, "episodes"), **in_words}


def held_on_gpu(config: RunConfig, *, traced: bool = True) -> dict[str, float]:
    """By role, the GiB that a rank needs on its GPU."""
    parts = bytes_by_purpose(config, on_gpu=True, traced=traced)
    return {role: on_gpu_alone(of_role) for role, of_role in parts.items()}


def placed(config: RunConfig, cluster: Cluster, *, traced: bool = False) -> dict[str, Placed]:
    """The place of every process of the run on this cluster; raises a ConfigError that names processes without one."""
    spare = spare_on(config, cluster, traced=traced)
    if spare is None:
        return place(list(processes(config)), config.hosts, cluster)
    place_of_spare = "host" if spare.chosen == "auto" else spare.chosen  # at its first fetch it takes what fits
    gib = held_on_gpu(with_spare(config, place_of_spare), traced=traced)
    advice = what_would_fit(config, spare)
    return place(list(processes(config)), config.hosts, cluster, gib, {"generator": advice} if advice else {})


def spare_on(config: RunConfig, cluster: Cluster, *, traced: bool = False) -> Spare | None:
    """The place of fetched weights on this cluster; None if the memory of its GPUs is not known."""
    gpu_gib = _gpu_gib(cluster)
    return None if gpu_gib is None else spare_of(config, gpu_gib, traced=traced)


def _gpu_gib(cluster: Cluster) -> float | None:
    """The memory of the smallest GPU; None if there is none, or it is not known."""
    return min((gpu.gib for host in cluster.hosts for gpu in host.gpus if gpu.gib is not None), default=None)


def check_this_machine(config: RunConfig) -> None:
    """Raise a ConfigError if the run can't start: its hosts are imagined, or it does not fit this machine."""
    if config.hosts.imagine is not None:
        raise ConfigError(["hosts.imagine: is for --dry-run; a run uses the hosts that it gets"])
    if missing := list(folder_problems(config.model.path, Section(config.model, "model."))):
        raise ConfigError(missing)  # only a dry run knows published models without their folders
    if config.hosts.job == "local":
        placed(config, one_host(this_machine()))


def describe(config: RunConfig) -> str:
    """The plan as text; raises a ConfigError if the run does not fit."""
    hosts = config.hosts
    if hosts.imagine is None and hosts.job != "local":
        needed = f"must be a cluster such as {{hosts: 4, gpus: 8}}, because a dry run does not start {hosts.job}"
        raise ConfigError([f"hosts.imagine=null: {needed}"])
    cluster = one_host(this_machine()) if hosts.imagine is None else imagined(hosts.imagine)
    places = placed(config, cluster, traced=True)
    spare = spare_on(config, cluster, traced=True)
    planned = config if spare is None else with_spare(config, spare.chosen)
    shape = shape_of(config.model)
    if (tokens := cached_tokens(config, shape)) < config.generator.max_context:
        gib = config.generator.kv_cache_gib
        needed = f"must hold generator.max_context={config.generator.max_context} tokens, it holds {tokens}"
        raise ConfigError([f"generator.kv_cache_gib={gib:g}: {needed}"])
    on_gpu = any(host.gpus for host in cluster.hosts)
    rows = [("process", "host", "GPU", "cores", "threads", "GiB", "what for")]
    memory = memory_by_role(planned, on_gpu=on_gpu)
    for each in processes(config):
        gib, what_for = memory[each.role]
        for rank, one in enumerate(places[each.name].ranks):
            name = each.name if each.count == 1 else f"{each.name}.{rank}"
            gpu = "-" if one.gpu is None else one.gpu.name
            rows.append((name, one.host, gpu, _cores(one.cores), str(each.threads), f"{gib:.3f}", what_for))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    notes = [f"KV cache of a replica: {tokens:,} tokens, {tokens // config.generator.max_context} whole contexts"]
    if (most := _gpu_gib(cluster)) is not None:
        used = held_on_gpu(planned)
        left = [
            f"{role} {most - used[role]:.1f}"
            for role in dict.fromkeys(one.role for one in processes(config))
            if role in used
        ]
        notes += [f"GiB left on a GPU, if one role uses it: {', '.join(left)}", str(spare)]
    cluster_name = f"{hosts.job}{' (imagined)' if hosts.imagine else ''}"
    return f"{to_yaml(config)}\nhosts: {cluster_name}\n" + "".join(f"{note}\n" for note in notes) + f"\n{table}\n"


def _cores(cores: tuple[int, ...] | None) -> str:
    """Cores as a list of ranges such as `0-3,8`."""
    if cores is None:
        return "any"
    runs = [[core for _, core in run] for _, run in groupby(enumerate(cores), lambda one: one[1] - one[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
