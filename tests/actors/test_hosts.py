"""Several hosts on one machine, as Monarch's own job has them, and GPUs that are only pretended: every process says
what it was given."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from monarch.actor import Actor, endpoint
from monarch.job import ProcessJob

from goaly.base.errors import RunFailed
from goaly.plan.cluster import Cluster, imagined
from goaly.plan.host_settings import HostSettings, ImaginedCluster
from goaly.plan.placement import Processes, place
from goaly.run.fork_server import SHARED
from goaly.run.hosts import Hosts
from goaly.run.rendezvous import rendezvous
from tests.loop.launched import gone_within, logging_to

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

Said = dict[str, str | None]


def two_hosts_each() -> ProcessJob:
    return ProcessJob({"trainer": 2, "hosts": 2})


@pytest.fixture(autouse=True)
def no_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that compute nothing need not import what their role computes with."""
    monkeypatch.setattr("goaly.run.hosts.IMPORTS", {})


class Witness(Actor):
    """Says what its process was given."""

    @endpoint
    def say(self) -> Said:
        names = ("RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HYPERACTOR_PROCESS_NAME")
        threads = [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]
        cores = ",".join(map(str, sorted(set().union(*threads))))
        return {name: os.environ.get(name) for name in names} | {
            "title": Path("/proc/self/cmdline").read_text().rstrip("\0"),
            "pid": str(os.getpid()),
            "agent": str(os.getppid()),
            "cores": cores,
        }


@asynccontextmanager
async def hosts_of(settings: HostSettings, run_dir: Path) -> AsyncIterator[Hosts]:
    failures: list[tuple[str, str]] = []
    hosts = Hosts(settings, run_dir, lambda *failure: failures.append(failure), trace=False)
    try:
        yield hosts
        assert [failure for failure in failures if failure[0].startswith("witness")] == []  # others are earlier tests'
    finally:
        await hosts.stop_all()


async def told(
    hosts: Hosts, processes: Processes, settings: HostSettings, on: Cluster, *, with_ranks: bool
) -> list[Said]:
    placed = place([processes], settings, on)[processes.name]
    mesh = hosts.spawn(processes, placed)
    if with_ranks:
        await rendezvous(mesh, "ranks")
    answers = await mesh.spawn(f"witness-{processes.name}", Witness).say.call()
    return [said for _, said in sorted(answers.items(), key=lambda answer: answer[0].rank)]


async def test_every_process_sees_its_own_gpus_on_the_host_and_cores_that_were_planned(tmp_path: Path) -> None:
    job = f"{__name__}:two_hosts_each"
    settings = HostSettings(job=job, bind={"hub": [0]})
    on = imagined(ImaginedCluster(meshes={"trainer": 2, "hosts": 2}, gpus=2))
    async with hosts_of(settings, tmp_path) as hosts:
        trainer, generator, hub = await asyncio.gather(
            told(hosts, Processes(name="trainer", role="trainer", count=4), settings, on, with_ranks=True),
            told(
                hosts, Processes(name="generator-0", role="generator", count=2, group=2), settings, on, with_ranks=True
            ),
            told(hosts, Processes(name="hub", role="hub"), settings, on, with_ranks=False),
        )
    assert [said["RANK"] for said in trainer] == ["0", "1", "2", "3"], "two on each of two hosts, not four on each"
    assert [said["CUDA_VISIBLE_DEVICES"] for said in trainer] == ["0", "1", "0", "1"]
    assert [said["LOCAL_RANK"] for said in trainer] == ["0"] * 4, "the number of its GPU among those that it sees"
    assert [trainer[0]["agent"] == other["agent"] for other in trainer] == [True, True, False, False]
    assert [(said["CUDA_VISIBLE_DEVICES"], said["LOCAL_RANK"]) for said in generator] == [("0,1", "0"), ("0,1", "1")]
    assert len({said["agent"] for said in generator}) == 1
    assert {said["CUDA_DEVICE_ORDER"] for said in (*trainer, *generator)} == {"PCI_BUS_ID"}
    assert (hub[0]["CUDA_VISIBLE_DEVICES"], hub[0]["cores"]) == ("", "0")
    assert generator[0]["cores"] == ",".join(map(str, sorted(os.sched_getaffinity(0))))


async def test_a_message_that_comes_too_late_for_stopped_processes_is_no_death(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with hosts_of(HostSettings(), tmp_path) as hosts:
        hosts._fault(SimpleNamespace(mesh_name="client", report=lambda: "undeliverable: actor stopped"))
        await asyncio.sleep(0)
    assert "undeliverable: actor stopped" in caplog.text


async def test_a_job_is_asked_what_its_hosts_have_and_two_of_one_machine_are_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = HostSettings(job=f"{__name__}:two_hosts_each")
    async with hosts_of(settings, tmp_path) as hosts:
        found = await hosts.cluster()
        monkeypatch.setattr("goaly.run.hosts.START_SECONDS", 0)
        with pytest.raises(
            RunFailed, match=r"two_hosts_each: a host of its mesh \w+ did not report its GPUs and cores within 0 s"
        ):
            await hosts.cluster()
    assert dict(found.meshes) == {"hosts": (0, 0), "trainer": (0, 0)}
    assert found.hosts[0].cores == os.sched_getaffinity(0)


@pytest.mark.parametrize("forks", [True, False])
async def test_on_cpus_a_process_keeps_the_environment_that_it_came_with_and_outlives_a_sigterm(
    tmp_path: Path, forks: bool
) -> None:
    settings = HostSettings(fork=forks)
    async with hosts_of(settings, tmp_path) as hosts:
        on = await hosts.cluster()
        generator = Processes(name="generator-0", role="generator", count=2, group=2)
        found = await told(hosts, generator, settings, on, with_ranks=True)
        assert [said["title"] for said in found] == ["goaly generator-0.0", "goaly generator-0.1"]
        for said in found:
            os.kill(int(said["pid"] or 0), signal.SIGTERM)  # run-8
        mesh = hosts.spawn(generator, place([generator], settings, on)["generator-0"])
        again = await mesh.spawn("witness-after-the-signal", Witness).say.call()
    assert {said["pid"] for _, said in again.items()} == {said["pid"] for said in found}
    assert [said["LOCAL_RANK"] for said in found] == ["0", "1"]
    assert {said["CUDA_VISIBLE_DEVICES"] for said in found} == {os.environ.get("CUDA_VISIBLE_DEVICES")}


@pytest.mark.parametrize("settings", [HostSettings(), HostSettings(fork=False)])
async def test_processes_are_forks_of_a_server_that_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: HostSettings
) -> None:
    monkeypatch.delenv(SHARED)
    async with hosts_of(settings, tmp_path) as hosts:
        on = await hosts.cluster()
        one, two = [
            await told(hosts, Processes(name=name, role="hub", threads=threads), settings, on, with_ranks=False)
            for name, threads in (("one", 1), ("two", 2))
        ]
        parents = [int(said["agent"] or 0) for (said,) in (one, two)]
        servers = logging_to(tmp_path)
        started = [servers.get(parent) for parent in parents]
        assert started == (["fork-server-1", "fork-server-2"] if settings.fork else [None, None])
    assert not settings.fork or gone_within(parents) == []


async def test_a_process_on_a_host_with_gpus_starts_alone(tmp_path: Path) -> None:
    settings = HostSettings()
    async with hosts_of(settings, tmp_path) as hosts:
        on = imagined(ImaginedCluster(gpus=1))
        (said,) = await told(hosts, Processes(name="hub", role="hub"), settings, on, with_ranks=False)
        assert (said["agent"], said["CUDA_VISIBLE_DEVICES"]) == (str(os.getpid()), "")
