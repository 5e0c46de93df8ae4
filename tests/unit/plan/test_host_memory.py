"""The memory of each host is the sum of what its processes need there, and a host without room is refused."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from goaly.base.config import load
from goaly.base.errors import ConfigError
from goaly.plan.cluster import Cluster, imagined, one_host, this_machine
from goaly.plan.dry_run import describe, placed
from goaly.plan.host_memory import HostMemory, host_memory
from goaly.plan.host_settings import ImaginedCluster
from goaly.plan.rank_memory import GIB, memory_by_role
from goaly.plan.run_config import RunConfig
from goaly.plan.spare_memory import with_spare

GRPO = Path(__file__).parents[3] / "configs" / "grpo" / "tiny.yaml"
QWEN3_8B = (
    "model={path: models/Qwen3-8B, architecture: qwen3-8b, dtype: bfloat16}",
    "generator={replicas: 2, tp: 2, kv_cache_gib: 20, max_context: 4096}",
    "backlog.row_length=4096",
    "trainer={fsdp: 4}",
)
WEIGHTS = 2 * 8_190_735_360
"""The bytes of Qwen3-8B in bfloat16."""


def of_8b(*overrides: str) -> RunConfig:
    config = load(RunConfig, [f"--config={GRPO}", *QWEN3_8B, *overrides], prog="test", description="").config
    return replace(config, hosts=replace(config.hosts, bind={}))


def cluster(*, hosts: int, gpus: int = 4, host_gib: float | None = None) -> Cluster:
    return imagined(ImaginedCluster(hosts=hosts, gpus=gpus, gpu_gib=139, host_gib=host_gib))


def needed(config: RunConfig, on: Cluster) -> list[HostMemory]:
    memory = memory_by_role(config, on_gpu=bool(on.hosts[0].gpus), traced=False)
    return host_memory(config, memory, placed(config, on), on)


def gib(host: HostMemory) -> dict[str, float]:
    return {part: size / GIB for part, size in host.parts.items()}


def test_spares_of_all_ranks_on_a_host_are_counted():
    config = with_spare(of_8b("generator.replicas=1"), "host")
    trainer, generator = needed(config, cluster(hosts=2))
    assert generator.parts["generator prefetch"] == pytest.approx(WEIGHTS, rel=1e-3)
    assert "generator prefetch" not in trainer.parts
    on_device = needed(with_spare(config, "device"), cluster(hosts=2))[1]
    assert "generator prefetch" not in on_device.parts


def test_readers_on_another_host_keep_buckets_for_each_trainer_rank():
    for transport in ("auto", "rdma"):
        _, both = needed(of_8b(f"weights.transport={transport}"), cluster(hosts=2))
        assert both.parts["generator landing"] == 4 * 4 * 4 * 8 * 2**20  # ranks, trainer ranks, buckets, a bucket
    _, one, other = needed(of_8b("hosts.generator={hosts: 2, gpus: 2}"), cluster(hosts=3))
    assert one.parts == other.parts
    assert one.parts["generator landing"] == 2 * 4 * 4 * 8 * 2**20
    (alone,) = needed(of_8b(), cluster(hosts=1, gpus=8))
    assert "generator landing" not in alone.parts


def test_the_trainers_hosts_hold_its_ring_the_copy_for_a_checkpoint_and_what_a_save_gathers():
    first, second, _ = needed(of_8b("trainer.fsdp=4", "hosts.trainer={hosts: 2, gpus: 2}"), cluster(hosts=3))
    assert second.parts["trainer ring"] == pytest.approx(3 * WEIGHTS / 2, rel=1e-3)
    assert second.parts["trainer checkpoint"] == pytest.approx(3 * 2 * WEIGHTS / 2, rel=1e-3)
    assert first.parts.keys() - second.parts.keys() == {"trainer save", "hub samples"}


def test_without_gpus_all_memory_is_the_hosts():
    config = of_8b("trainer.fsdp=1", "generator={replicas: 1, tp: 1}")
    (alone,) = needed(config, cluster(hosts=1, gpus=0))
    assert gib(alone)["generator KV"] == 20
    assert alone.parts["trainer parameters"] == 2 * WEIGHTS
    assert alone.parts["generator prefetch"] == WEIGHTS


def test_a_host_without_room_is_refused_with_what_takes_most_and_what_would_take_less():
    config = of_8b("weights.spare=host")
    placed(config, cluster(hosts=2, host_gib=250))
    with pytest.raises(ConfigError) as error:
        placed(config, cluster(hosts=2, host_gib=30))
    problems = error.value.problems
    assert len(problems) == 2
    assert re.fullmatch(
        r"host host-0 has 30.0 GiB: must be at least \d+\.\d, the GiB of memory that the processes on host-0 need "
        r"\(trainer checkpoint 91\.5, trainer ring 45\.8, .*\); the trainer on more hosts would take less",
        problems[0],
    )
    assert problems[1].endswith("; weights.spare=device or a larger generator.tp would take less")


def test_a_dry_run_names_the_setting_of_the_hosts_memory_or_says_that_it_is_not_checked(tiny_model_folder: Path):
    config = load(RunConfig, [f"--config={GRPO}", f"model.path={tiny_model_folder}"], prog="", description="").config
    config = replace(config, hosts=replace(config.hosts, bind={}))

    def told(**cluster: float) -> str:
        return describe(replace(config, hosts=replace(config.hosts, imagine=ImaginedCluster(**cluster))))

    unchecked = told(hosts=2)
    assert re.search(r"\nmemory of host-0: \d\.\d GiB \(unchecked\): ", unchecked)
    assert "\nhosts.imagine.host_gib=null: memory of hosts is not checked\n" in unchecked
    assert re.search(r"\nmemory of host-0: \d\.\d GiB \(of 8\.0\): ", told(host_gib=8))
    with pytest.raises(ConfigError, match=r"hosts\.imagine\.host_gib=0\.1: must be at least \d\.\d, the GiB of memory"):
        told(host_gib=0.1)


def test_a_run_on_this_machine_is_checked_against_its_own_memory():
    config = of_8b("trainer.fsdp=1", "generator={replicas: 1, tp: 1}")
    machine = replace(this_machine(), gpus=())
    assert machine.gib is not None
    with pytest.raises(ConfigError, match=r"has 64\.0 GiB: must be at least"):
        placed(config, one_host(replace(machine, gib=64)))
    placed(config, one_host(replace(machine, gib=1024)))
