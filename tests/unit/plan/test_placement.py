"""The plan of who computes where: pure, so that every cluster can be imagined."""

from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goaly.base.config.check import check
from goaly.base.errors import ConfigError
from goaly.plan.cluster import Cluster, Gpu, Host, imagined, one_host
from goaly.plan.host_settings import COMPUTING, HostSettings, ImaginedCluster, RolePlacement, WorkerPlacement
from goaly.plan.placement import IMPORTS, RANKS, Placed, Processes, place
from goaly.run.run_actors import process_of


def role(name: str, fsdp: int = 1, tp: int = 1) -> Processes:
    return Processes(name=name, role=name, count=fsdp * tp, group=tp)


def replicas(count: int, tp: int = 1) -> list[Processes]:
    return [Processes(name=f"generator-{n}", role="generator", count=tp, group=tp) for n in range(count)]


def workers(count: int) -> list[Processes]:
    return [Processes(name=f"rollout-{n}", role="rollout") for n in range(count)]


HUB = role("hub")


def gpus(placed: dict[str, Placed]) -> dict[str, list[str]]:
    """By process, `host:gpu` of each of its ranks."""
    hosts = {
        each: [f"{rank.host.removeprefix('host-')}:{rank.gpu.name}" for rank in placed[each].ranks if rank.gpu]
        for each in placed
    }
    return {each: found for each, found in hosts.items() if found}


def cluster(**description: Any) -> Cluster:
    return imagined(ImaginedCluster(**description))


def refused(
    processes: list[Processes], hosts: HostSettings, on: Cluster, gib: dict[str, float] | None = None
) -> list[str]:
    with pytest.raises(ConfigError) as error:
        place(processes, hosts, on, gib)
    return error.value.problems


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[Processes], HostSettings, Cluster]:
    few, tp = st.integers(1, 6), st.sampled_from([1, 1, 2, 4])
    roles = ["trainer", *draw(st.lists(st.sampled_from(["reference", "critic"]), unique=True))]
    processes = [role(each, draw(few), draw(tp)) for each in roles]
    processes += [*replicas(draw(few), draw(tp)), HUB, *workers(draw(few))]
    maybe = st.one_of(st.none(), st.none(), st.integers(1, 8))
    placements = {
        each: RolePlacement(
            hosts=draw(maybe),
            gpus=draw(maybe),
            share_with=draw(st.sampled_from([None, None, *(other for other in COMPUTING if other != each)])),
            tp_across_hosts=draw(st.booleans()),
        )
        for each in (*roles, "generator")
    }
    hosts = HostSettings(**placements, rollout=WorkerPlacement(hosts=draw(maybe)))
    meshes = draw(st.sampled_from([{}, {"hosts": 2, "trainer": 2}, {"trainer": 2, "generator": 3, "hosts": 1}]))
    on = ImaginedCluster(
        hosts=draw(st.integers(1, 4)),
        gpus=draw(st.sampled_from([0, 1, 3, 4, 8, 8])),
        meshes=meshes,
        cores=draw(st.sampled_from([None, 16])),
        numa=draw(st.integers(1, 2)),
    )
    return processes, hosts, imagined(on)


@settings(max_examples=400, deadline=None)
@given(runs())
def test_every_rank_is_placed_once_and_alone_on_its_gpu_or_the_refusal_names_a_setting(run):
    processes, hosts, on = run
    if hosts.problems("hosts."):
        return
    try:
        placed = place(processes, hosts, on)
    except ConfigError as error:
        for problem in error.problems:
            assert problem.startswith(("hosts.", *RANKS.values(), *(f"{each}.tp=" for each in COMPUTING))), problem
        return
    assert {name: len(found.ranks) for name, found in placed.items()} == {each.name: each.count for each in processes}
    used: dict[str, Counter[tuple[str, str]]] = {}
    for each in processes:
        found, seats = placed[each.name], on.seats(each.role)
        per_host = each.count // len(found.seats)
        names = [on.hosts[seats[seat]].name for seat in found.seats for _ in range(per_host)]
        assert [rank.host for rank in found.ranks] == names
        if each.role in COMPUTING and any(on.hosts[seat].gpus for seat in seats):
            own = [(rank.host, rank.gpu.name) for rank in found.ranks if rank.gpu is not None]
            assert len(own) == each.count
            used.setdefault(each.role, Counter()).update(own)
            for rank in found.ranks:
                assert rank.gpu is not None
                assert rank.visible is not None
                assert rank.gpu.name in rank.visible
                assert set(rank.visible) <= {gpu for host, gpu in own if host == rank.host}
                assert each.role == "generator" or rank.visible == (rank.gpu.name,)
        else:
            assert all(rank.gpu is None and not rank.visible for rank in found.ranks)
        if each.role in COMPUTING and not hosts.of(each.role).tp_across_hosts:
            groups = [found.ranks[first : first + each.group] for first in range(0, each.count, each.group)]
            assert all(len({rank.host for rank in group}) == 1 for group in groups)
    assert all(count == 1 for counts in used.values() for count in counts.values())
    alone = sum((counts for each, counts in used.items() if hosts.of(each).share_with is None), Counter())
    assert all(count == 1 for count in alone.values())
    for each, counts in used.items():
        if (lender := hosts.of(each).share_with) is not None:
            assert counts <= used[lender]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 3), st.sampled_from([1, 2]), st.integers(0, 3))
def test_one_box_with_enough_gpus_needs_no_settings(fsdp: int, count: int, reference: int, tp: int, spare: int):
    processes = [*replicas(count, tp), role("trainer", fsdp), HUB, *workers(2)]
    processes += [role("reference", reference)] if reference else []
    needed = fsdp + count * tp + reference
    used = gpus(place(processes, HostSettings(), cluster(gpus=needed + spare)))
    assert len({gpu for of_process in used.values() for gpu in of_process}) == needed
    assert refused(processes, HostSettings(), cluster(gpus=needed - 1))


def test_roles_of_one_box_get_gpus_of_their_own_and_the_rest_see_none():
    processes = [*replicas(2, tp=2), role("trainer", 2), role("reference"), role("critic"), HUB, *workers(1)]
    placed = place(processes, HostSettings(), cluster(gpus=8))
    assert gpus(placed) == {
        "trainer": ["0:0", "0:1"], "reference": ["0:2"], "critic": ["0:3"],
        "generator-0": ["0:4", "0:5"], "generator-1": ["0:6", "0:7"],
    }  # fmt: skip
    seen = {name: [rank.visible for rank in found.ranks] for name, found in placed.items()}
    assert seen["trainer"] == [("0",), ("1",)]
    assert seen["generator-1"] == [("6", "7"), ("6", "7")], "vLLM asks a rank about the GPUs of its peers"
    assert seen["hub"] == seen["rollout-0"] == [()]


def test_the_two_worked_examples_of_the_documentation_hold():
    box = cluster(gpus=8, cores=64, numa=2)
    one = [*replicas(2, tp=2), role("trainer", 4), HUB, *workers(1)]
    placed = place(one, HostSettings(), box)
    assert gpus(placed) == {
        "generator-0": ["0:4", "0:5"], "generator-1": ["0:6", "0:7"], "trainer": [f"0:{gpu}" for gpu in range(4)],
    }  # fmt: skip
    assert {rank.cores for rank in placed["trainer"].ranks} == {tuple(range(32))}
    assert {rank.cores for rank in placed["generator-1"].ranks} == {tuple(range(32, 64))}
    assert len(refused([*one, role("reference")], HostSettings(), box)) == 1
    place([*one, role("reference", 4)], HostSettings(reference=RolePlacement(share_with="trainer")), box)

    four = [*replicas(4, tp=4), role("trainer", 16), HUB, *workers(8)]
    wide = RolePlacement(hosts=2, gpus=8)
    placed = place(four, HostSettings(trainer=wide, generator=wide), cluster(hosts=4, gpus=8))
    assert [rank.host for rank in placed["trainer"].ranks] == ["host-0"] * 8 + ["host-1"] * 8
    assert [placed[f"generator-{n}"].ranks[0].host for n in range(4)] == ["host-2", "host-2", "host-3", "host-3"]
    assert placed == place(four, HostSettings(), cluster(hosts=4, gpus=8))
    assert (
        len(refused([*replicas(4, tp=4), role("trainer", 8)], HostSettings(trainer=wide), cluster(hosts=4, gpus=8)))
        == 1
    )


def test_on_cpus_nothing_is_hidden_or_bound():
    placed = place([*replicas(2, tp=2), role("trainer", 2), HUB, *workers(2)], HostSettings(), cluster(cores=2))
    ranks = [rank for found in placed.values() for rank in found.ranks]
    assert len(ranks) == 9
    assert {(rank.host, rank.gpu, rank.visible, rank.cores) for rank in ranks} == {("host-0", None, None, None)}


def test_a_role_is_spread_over_the_hosts_that_it_names_in_the_order_of_its_ranks():
    hosts = HostSettings(trainer=RolePlacement(hosts=2, gpus=4), generator=RolePlacement(hosts=2))
    processes = [*replicas(4, tp=2), role("trainer", 4, tp=2), HUB, *workers(5)]
    placed = place(processes, hosts, cluster(hosts=4, gpus=8))
    assert gpus(placed) == {
        "trainer": [f"{host}:{gpu}" for host in (0, 1) for gpu in range(4)],
        "generator-0": ["0:4", "0:5"], "generator-1": ["0:6", "0:7"],
        "generator-2": ["1:4", "1:5"], "generator-3": ["1:6", "1:7"],
    }  # fmt: skip
    assert [placed[f"rollout-{n}"].seats.start for n in range(5)] == [0, 1, 2, 3, 0]
    hosts = replace(hosts, rollout=WorkerPlacement(hosts=2))
    placed = place(processes, hosts, cluster(hosts=4, gpus=8))
    assert [placed[f"rollout-{n}"].seats.start for n in range(5)] == [0, 1, 0, 1, 0]


def test_replicas_that_hosts_do_not_divide_are_spread_as_evenly_as_can_be():
    hosts = HostSettings(generator=RolePlacement(hosts=2))
    placed = place([*replicas(3, tp=2), role("trainer"), HUB], hosts, cluster(hosts=2, gpus=8))
    assert [placed[f"generator-{n}"].seats.start for n in range(3)] == [0, 0, 1]


def test_a_mesh_of_two_hosts_has_the_roles_ranks_and_not_twice_as_many():
    on = cluster(meshes={"trainer": 2, "generator": 2, "hub": 1, "rollout": 2}, gpus=4)
    placed = place([*replicas(2, tp=2), role("trainer", 4), HUB, *workers(2)], HostSettings(), on)
    assert gpus(placed) == {
        "trainer": ["0:0", "0:1", "1:0", "1:1"], "generator-0": ["2:0", "2:1"], "generator-1": ["3:0", "3:1"],
    }  # fmt: skip
    assert placed["trainer"].seats == range(2)
    assert placed["generator-1"].seats == range(1, 2)
    assert placed["rollout-1"].ranks[0].host == "host-6"
    assert refused([role("trainer", 3), *replicas(1), HUB], HostSettings(), on) == [
        "hosts.trainer.hosts=null: must be a divisor of trainer.pp * trainer.fsdp * trainer.tp * trainer.cp=3, "
        "the mesh trainer has 2 hosts"
    ]


def test_two_positions_of_a_mesh_on_one_machine_draw_from_the_same_gpus():
    host = Host(name="box", gpus=tuple(Gpu(name=str(number)) for number in range(4)))
    on = Cluster(hosts=(host,), meshes={"trainer": (0, 0), "hosts": (0,)})
    placed = place([role("trainer", 2), *replicas(2), HUB], HostSettings(), on)
    assert [rank.gpu.name for found in placed.values() for rank in found.ranks if rank.gpu] == ["0", "1", "2", "3"]
    assert len(refused([role("trainer", 2), *replicas(3), HUB], HostSettings(), on)) == 1


def test_shared_gpus_are_the_other_roles_in_its_order():
    hosts = HostSettings(reference=RolePlacement(share_with="trainer"), critic=RolePlacement(share_with="reference"))
    processes = [*replicas(1, tp=4), role("trainer", 4), role("reference", 2), role("critic", 2), HUB]
    placed = place(processes, hosts, cluster(gpus=8))
    assert gpus(placed)["reference"] == gpus(placed)["critic"] == ["0:0", "0:1"]
    assert gpus(placed)["generator-0"] == ["0:4", "0:5", "0:6", "0:7"]
    place(
        [*replicas(2), role("trainer", 2), HUB],
        HostSettings(generator=RolePlacement(share_with="trainer")),
        cluster(gpus=2),
    )
    cpus = place(processes, hosts, cluster())
    assert gpus(cpus) == {}, "the same settings run where there are no GPUs"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"trainer": RolePlacement(hosts=3)}, "hosts.trainer.hosts=3: needs 3 hosts, there are 2"),
        (
            {"trainer": RolePlacement(gpus=1)},
            "hosts.trainer.gpus=1: needs 4 hosts, there are 2",
        ),
        (
            {"trainer": RolePlacement(gpus=3)},
            "hosts.trainer.gpus=3: must divide trainer.pp * trainer.fsdp * trainer.tp * trainer.cp=4",
        ),
        (
            {"trainer": RolePlacement(hosts=2, gpus=4)},
            "hosts.trainer: hosts=2 * gpus=4 must be trainer.pp * trainer.fsdp * trainer.tp * trainer.cp=4",
        ),
        (
            {"generator": RolePlacement(hosts=2)},
            "hosts.generator.hosts=2: must divide generator.replicas * generator.tp=3",
        ),
        ({"critic": RolePlacement(gpus=1)}, "hosts.critic: has no effect, the run has no critic"),
        (
            {"reference": RolePlacement(share_with="critic")},
            "hosts.reference.share_with=critic: must be a role of the run",
        ),
        (
            {"reference": RolePlacement(share_with="generator")},
            "hosts.reference.share_with=generator: reference.pp * reference.fsdp * reference.tp * reference.cp=4: "
            "needs 4 GPUs, generator has 3 on host-0",
        ),
        ({"rollout": WorkerPlacement(hosts=3)}, "hosts.rollout.hosts=3: must be at most 2, the hosts there are"),
        ({"bind": {"generator": [0, 9]}}, "hosts.bind.generator=[0, 9]: host-1 has no core 9 for this run"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_key(given: dict[str, Any], said: str):
    processes = [*replicas(1, tp=3), role("trainer", 4), role("reference", 4), HUB, *workers(1)]
    on = cluster(hosts=2, gpus=8, cores=8)
    assert gpus(place(processes, HostSettings(), on))["generator-0"] == ["1:0", "1:1", "1:2"]
    assert refused(processes, HostSettings(**given), on) == [said]


def test_too_few_gpus_are_refused_with_what_is_free_and_how_to_share():
    processes = [*replicas(1), role("trainer"), HUB]
    assert refused(processes, HostSettings(), cluster(gpus=1)) == [
        "generator.replicas * generator.tp=1: needs 1 GPUs, free are none; use fewer, or share with a role by "
        "hosts.generator.share_with"
    ]
    hosts = HostSettings(trainer=RolePlacement(hosts=2))
    assert refused([*replicas(1), role("trainer", 6), HUB], hosts, cluster(hosts=2, gpus=2)) == [
        "trainer.pp * trainer.fsdp * trainer.tp * trainer.cp=6: needs 6 GPUs, 3 on each of 2 hosts in a row, "
        "free are 2 on host-0, 2 on "
        "host-1; use fewer, or share with a role by hosts.trainer.share_with"
    ]
    assert refused(processes, HostSettings(trainer=RolePlacement(gpus=1)), cluster()) == [
        "hosts.trainer.gpus=1: must be null, the hosts have no GPUs"
    ]
    assert refused(processes, HostSettings(), cluster(meshes={"trainer": 1, "hub": 1})) == [
        "hosts.job=local: must have a mesh named generator or hosts, it has trainer, hub"
    ]


def test_a_tensor_parallel_group_leaves_its_host_only_on_request():
    processes = [*replicas(2, tp=4), role("trainer", 1, tp=4), HUB]
    groups = "to be within one, or set hosts.{0}.tp_across_hosts=true"
    assert refused(processes, HostSettings(), cluster(hosts=6, gpus=2)) == [
        f"{each}.tp=4: must divide 2, the ranks on a host, {groups.format(each)}" for each in ("trainer", "generator")
    ]
    across = RolePlacement(tp_across_hosts=True)
    placed = place(processes, HostSettings(trainer=across, generator=across), cluster(hosts=6, gpus=2))
    assert gpus(placed)["generator-1"] == ["4:0", "4:1", "5:0", "5:1"]
    whole = place([role("trainer", 3, tp=2)], HostSettings(), cluster(hosts=3, gpus=3))
    assert gpus(whole)["trainer"] == ["0:0", "0:1", "1:0", "1:1", "2:0", "2:1"], "not three on each of two hosts"
    assert [rank.visible for rank in placed["generator-1"].ranks] == [("0", "1")] * 4
    stated = RolePlacement(hosts=2, gpus=6, tp_across_hosts=True)
    said = "generator.tp=4: must divide 6, the ranks on a host, to be within one, or be a multiple of it"
    assert refused([*replicas(3, tp=4), HUB], HostSettings(generator=stated), cluster(hosts=2, gpus=8)) == [said]
    stated = RolePlacement(hosts=2, gpus=6)
    assert refused([*replicas(3, tp=4), HUB], HostSettings(generator=stated), cluster(hosts=2, gpus=8)) == [
        f"generator.tp=4: must divide 6, the ranks on a host, {groups.format('generator')}"
    ]


def test_cores_are_those_of_the_gpus_numa_node_unless_they_are_named():
    processes = [*replicas(1), role("trainer", 2), HUB]
    on = cluster(gpus=4, cores=8, numa=2)
    placed = place(processes, HostSettings(bind={"hub": [7]}), on)
    low, high = tuple(range(4)), tuple(range(4, 8))
    assert [rank.cores for rank in placed["trainer"].ranks] == [low, low]
    assert placed["generator-0"].ranks[0].cores == high
    assert placed["hub"].ranks[0].cores == (7,)
    named = place(processes, HostSettings(bind={"trainer": [5]}), on)
    assert [rank.cores for rank in named["trainer"].ranks] == [(5,), (5,)]
    one_node = place(processes, HostSettings(), cluster(gpus=4, cores=8))
    assert one_node["trainer"].ranks[0].cores is None
    unknown = place(processes, HostSettings(bind={"trainer": [99]}), cluster(gpus=4))
    assert unknown["trainer"].ranks[0].cores == (99,), "nobody said which cores there are"
    far = Host(name="box", gpus=(Gpu(name="0"),), nodes={0: low, 1: high})
    assert place([role("trainer")], HostSettings(), one_host(far))["trainer"].ranks[0].cores is None


def test_memory_is_checked_where_roles_share_and_where_one_alone_is_too_large():
    processes = [*replicas(1), role("trainer", 2), role("reference"), HUB]
    gib = {"trainer": 50.0, "reference": 20.0, "generator": 30.0}
    hosts = HostSettings(reference=RolePlacement(share_with="trainer"))
    place(processes, hosts, cluster(gpus=3, gpu_gib=74), gib)
    place(processes, hosts, cluster(gpus=3), gib)
    assert refused(processes, hosts, cluster(gpus=3, gpu_gib=73), gib) == [
        "hosts.reference.share_with=trainer: together they need 70.0 GiB (50.0 of trainer + 20.0 of reference) and "
        "3.7 free for the libraries and their buffers, GPU 0 of host-0 has 73.0 GiB"
    ]
    assert refused(processes, HostSettings(), cluster(gpus=4, gpu_gib=40), gib) == [
        "trainer.pp * trainer.fsdp * trainer.tp * trainer.cp=2: a rank needs 50.0 GiB and 2.0 free "
        "for the libraries and their buffers, GPU 0 of host-0 has 40.0 GiB"
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"trainer": {"share_with": "hub"}},
            "hosts.trainer.share_with=hub: must be one of trainer, reference, critic, ",
        ),
        ({"trainer": {"share_with": "trainer"}}, "hosts.trainer.share_with=trainer: must be a role with GPUs of its"),
        ({"generator": {"gpus": 0}}, "hosts.generator.gpus=0: must be at least 1"),
        ({"rollout": {"hosts": 0}}, "hosts.rollout.hosts=0: must be at least 1"),
        ({"imagine": {"hosts": 0}}, "hosts.imagine.hosts=0: must be at least 1"),
        ({"imagine": {"gpu_gib": 0}}, "hosts.imagine.gpu_gib=0: must be above 0"),
        ({"imagine": {"gpus": -1}}, "hosts.imagine.gpus=-1: must be at least 0"),
        ({"imagine": {"cores": 1, "numa": 2}}, "hosts.imagine.numa=2: must be at most hosts.imagine.cores=1"),
        ({"imagine": {"meshes": {"trainers": 1}}}, "hosts.imagine.meshes.trainers: must be a role ("),
        ({"bind": {"trainers": [1]}}, "hosts.bind.trainers: unknown role"),
    ],
)
def test_settings_that_never_work_are_refused_without_a_cluster(given: dict[str, Any], said: str):
    (found,) = check(HostSettings, given, "hosts")[1]
    assert found.startswith(said)


def test_roles_that_share_in_a_circle_are_refused():
    hosts = HostSettings(trainer=RolePlacement(share_with="critic"), critic=RolePlacement(share_with="trainer"))
    assert hosts.problems("hosts.") == [
        "hosts.trainer.share_with=critic: must be a role with GPUs of its own, not trainer's",
        "hosts.critic.share_with=trainer: must be a role with GPUs of its own, not critic's",
    ]


def test_the_modules_that_processes_import_ahead_exist():
    """A missing one would be skipped, and its users would import it later."""
    assert [name for names in IMPORTS.values() for name in names if find_spec(name) is None] == []


@pytest.mark.parametrize(
    ("actor", "process"),
    [
        ("store", "hub"),
        ("queue-2", "hub-2"),
        ("hub-1", "hub-1"),
        ("generator-0-1", "generator-0-1"),
        ("trainer", "trainer"),
    ],
)
def test_the_death_of_an_actor_of_the_hub_is_that_of_its_process(actor: str, process: str) -> None:
    assert process_of(actor) == process
