"""What a machine says about its GPUs and cores, and clusters that are only imagined."""

from pathlib import Path

import pytest

from goaly.plan import cluster
from goaly.plan.cluster import Gpu, imagined, memory_gib, numa_nodes, numbers, this_machine
from goaly.plan.host_settings import ImaginedCluster

NVIDIA_SMI = """\
0, GPU-aaaa, 00000000:18:00.0, 81559
1, GPU-bbbb, 00000000:3B:00.0, 81559
2, GPU-cccc, 00010000:86:00.0, [N/A]
3, GPU-dddd, 00000000:87:00.0, 40960
"""


@pytest.fixture
def buses(tmp_path: Path) -> Path:
    for address, node in (("0000:18:00.0", "0"), ("0000:3b:00.0", "1"), ("10000:86:00.0", "1"), ("0000:87:00.0", "-1")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(f"{node}\n")
    return tmp_path


def test_gpus_are_described_by_number_and_by_uuid(buses: Path):
    assert dict(cluster._described(NVIDIA_SMI, buses)) == {
        "0": Gpu(name="0", node=0, gib=81559 / 1024),
        "GPU-aaaa": Gpu(name="GPU-aaaa", node=0, gib=81559 / 1024),
        "1": Gpu(name="1", node=1, gib=81559 / 1024),
        "GPU-bbbb": Gpu(name="GPU-bbbb", node=1, gib=81559 / 1024),
        "2": Gpu(name="2", node=1, gib=None),
        "GPU-cccc": Gpu(name="GPU-cccc", node=1, gib=None),
        "3": Gpu(name="3", node=None, gib=40),
        "GPU-dddd": Gpu(name="GPU-dddd", node=None, gib=40),
    }


@pytest.mark.parametrize(
    ("visible", "count", "names"),
    [
        (None, 3, ["0", "1", "2"]),
        ("2,0", 2, ["2", "0"]),
        ("GPU-bbbb, 7", 1, ["GPU-bbbb"]),
        ("", 0, []),
        (None, 0, []),
    ],
)
def test_a_machine_has_the_gpus_that_its_environment_lets_a_process_see(
    visible: str | None, count: int, names: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.setattr(cluster, "_nvidia_smi", lambda: NVIDIA_SMI)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = this_machine().gpus
    assert [gpu.name for gpu in gpus] == names
    assert all(gpu.gib == 81559 / 1024 for gpu in gpus if gpu.name != "2")


def test_gpus_are_used_where_nothing_describes_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(cluster, "QUERY", ("/no/such/program",))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1234")
    assert this_machine().gpus == (Gpu(name="MIG-1234"),)


def test_cores_are_those_that_the_process_may_use_by_numa_node(tmp_path: Path):
    for node, cores in enumerate(["0-3,8\n", "4-7\n", "\n"]):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cores)
    assert numa_nodes(frozenset({1, 2, 5, 8}), tmp_path) == {0: (1, 2, 8), 1: (5,)}
    assert numa_nodes(frozenset({1, 2}), tmp_path) == {0: (1, 2)}
    assert numa_nodes(frozenset({2, 1}), tmp_path / "none") == {0: (1, 2)}
    assert numbers("0-2,5") == [0, 1, 2, 5]


def test_an_imagined_host_has_its_gpus_and_cores_in_equal_parts_on_its_nodes():
    found = imagined(ImaginedCluster(hosts=2, gpus=4, cores=6, numa=2, gpu_gib=80))
    assert [host.name for host in found.hosts] == ["host-0", "host-1"]
    assert found.hosts[1].nodes == {0: (0, 1, 2), 1: (3, 4, 5)}
    assert [gpu.node for gpu in found.hosts[0].gpus] == [0, 0, 1, 1]
    assert [gpu.gib for gpu in found.hosts[0].gpus] == [80] * 4
    assert found.seats("trainer") == found.seats("hub") == (0, 1)
    by_mesh = imagined(ImaginedCluster(meshes={"trainer": 2, "hosts": 1}))
    assert by_mesh.seats("trainer") == (0, 1)
    assert by_mesh.seats("generator") == (2,)
    assert by_mesh.hosts[0].cores == frozenset()


@pytest.mark.parametrize(
    ("group", "limits", "gib"),
    [
        ("0::/", {}, 64),
        ("0::/job/step", {"job/memory.max": 8 << 30, "job/step/memory.max": "max"}, 8),
        ("0::/", {"memory.max": 1 << 40}, 64),
        ("4:cpu:/a\n3:memory:/job", {"memory/job/memory.limit_in_bytes": 4 << 30}, 4),
    ],
)
def test_memory_is_the_machines_or_what_a_control_group_leaves_of_it(
    group: str, limits: dict[str, object], gib: float, tmp_path: Path
):
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal:       {64 << 20} kB\nMemFree:        1 kB\n")
    (proc / "self" / "cgroup").write_text(f"{group}\n")
    for name, limit in limits.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(f"{limit}\n")
    assert memory_gib(proc, groups) == gib
