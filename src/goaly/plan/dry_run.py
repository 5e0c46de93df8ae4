"""Plans a run without starting it: the resolved config, the place of every actor, and the memory of each rank and host.

`rank_memory.py` and `host_memory.py` estimate the memory. A dry run builds every rank's model and traces the passes of
those that train; a run that starts checks only the memory that its ranks hold all the time.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from goaly.base.config import to_yaml
from goaly.base.config.settings import Section
from goaly.base.errors import ConfigError
from goaly.models.catalog import shape_of
from goaly.models.settings import folder_problems
from goaly.plan import host_memory
from goaly.plan.cluster import Cluster, imagined, one_host, this_machine
from goaly.plan.placement import Placed, place, processes
from goaly.plan.rank_memory import RankMemory, cached_tokens, memory_by_role
from goaly.plan.run_config import RunConfig
from goaly.plan.spare_memory import Spare, spare_of, what_would_fit, with_spare
from goaly.weights.settings import HEADROOM


def held_on_gpu(config: RunConfig, *, traced: bool = True) -> dict[str, float]:
    """By role, the GiB that the rank with most of them needs on its GPU."""
    found = memory_by_role(config, on_gpu=True, traced=traced)
    return {role: max(one.device_gib for one in groups) for role, groups in found.items()}


def placed(config: RunConfig, cluster: Cluster, *, traced: bool = False) -> dict[str, Placed]:
    """The place of every process of the run on this cluster; raises a ConfigError that names processes without one, and
    hosts whose memory does not suffice."""
    spare = spare_on(config, cluster, traced=traced)
    if spare is None:
        planned, places = config, place(list(processes(config)), config.hosts, cluster)
    else:
        # With "auto" a generator takes what fits at its first fetch.
        planned = with_spare(config, "host" if spare.chosen == "auto" else spare.chosen)
        advice = what_would_fit(config, spare)
        gib = held_on_gpu(planned, traced=traced)
        places = place(list(processes(config)), config.hosts, cluster, gib, {"generator": advice} if advice else {})
    if any(host.gib is not None for host in cluster.hosts):
        memory = memory_by_role(planned, on_gpu=_has_gpus(cluster), traced=traced)
        hosts = host_memory.host_memory(planned, memory, places, cluster)
        if problems := list(host_memory.problems(hosts, imagined=config.hosts.imagine is not None)):
            raise ConfigError(problems)
    return places


def spare_on(config: RunConfig, cluster: Cluster, *, traced: bool = False) -> Spare | None:
    """The place of fetched weights on this cluster; None if the memory of its GPUs is not known."""
    gpu_gib = _gpu_gib(cluster)
    return None if gpu_gib is None else spare_of(config, gpu_gib, traced=traced)


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
    tokens = cached_tokens(config, shape)
    memory = memory_by_role(planned, on_gpu=_has_gpus(cluster))
    notes = list(_not_here(config))
    notes += [f"KV cache of a replica: {tokens:,} tokens, {tokens // config.generator.max_context} whole contexts"]
    if (most := _gpu_gib(cluster)) is not None:
        left = {
            role: most - max(one.device_gib for one in groups)
            for role, groups in memory.items()
            if any(one.on_device for one in groups)
        }
        shown = ", ".join(f"{role} {gib:.1f}" for role, gib in left.items())
        least = f"at least {HEADROOM * most:.1f} must be left"
        notes += [f"GiB left on a GPU, if one role uses it: {shown}; {least}", str(spare)]
    notes += host_memory.lines(host_memory.host_memory(planned, memory, places, cluster))
    cluster_name = f"{hosts.job}{' (imagined)' if hosts.imagine else ''}"
    parts = [
        f"{to_yaml(config)}\nhosts: {cluster_name}\n" + "".join(f"{note}\n" for note in notes),
        _table([("ranks", "GiB", "host GiB", "of each rank"), *_memory_rows(config, memory)]),
        _table([("process", "host", "GPU", "cores", "threads", "GiB"), *_place_rows(config, memory, places)]),
    ]
    return "\n".join(parts)


def _not_here(config: RunConfig) -> Iterator[str]:
    """One line for each file and folder that the run needs and this machine lacks."""
    for absent in config.absent_files(Section(config, "")):
        yield f"{absent} here, so its records are not checked"
    for problem in folder_problems(config.model.path, Section(config.model, "model.")):
        yield f"{problem}; planned by model.architecture={config.model.architecture}"


def _memory_rows(config: RunConfig, memory: dict[str, tuple[RankMemory, ...]]) -> Iterator[tuple[str, ...]]:
    """A row for each group of ranks that need the same."""
    divided = {"trainer": config.trainer, "reference": config.reference, "critic": config.critic}
    for role, groups in memory.items():
        ranks = divided.get(role)
        for one in groups:
            which = " of each replica" if role == "generator" else ""
            if ranks is not None and ranks.pp > 1:
                which = f", stage {one.ranks[0] // ranks.stage_ranks + 1} of {ranks.pp}"
            yield f"{role} {_ranges(one.ranks)}{which}", f"{one.device_gib:.3f}", f"{one.host_gib:.3f}", str(one)


def _place_rows(
    config: RunConfig, memory: dict[str, tuple[RankMemory, ...]], places: dict[str, Placed]
) -> Iterator[tuple[str, ...]]:
    """A row for each process."""
    for each in processes(config):
        for rank, one in enumerate(places[each.name].ranks):
            name = each.name if each.count == 1 else f"{each.name}.{rank}"
            gpu = "-" if one.gpu is None else one.gpu.name
            found = (group for group in memory.get(each.role, ()) if rank in group.ranks)
            gib = sum(group.device_gib for group in found)
            cores = "any" if one.cores is None else _ranges(one.cores)
            yield name, one.host, gpu, cores, str(each.threads), f"{gib:.3f}"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "".join(f"{line}\n" for line in lines)


def _gpu_gib(cluster: Cluster) -> float | None:
    """The memory of the smallest GPU; None if there is none, or it is not known."""
    return min((gpu.gib for host in cluster.hosts for gpu in host.gpus if gpu.gib is not None), default=None)


def _has_gpus(cluster: Cluster) -> bool:
    return any(host.gpus for host in cluster.hosts)


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers as a list of ranges such as `0-3,8`."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda one: one[1] - one[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
