"""Starts and stops the processes of a run on the hosts of a Monarch job. No other file knows Monarch's jobs.

A process that ends or hangs is reported (`process_watch.py`). No process of a stopped mesh is left on this host. A
process sees only the GPUs of its place, from before CUDA is loaded. On a host with GPUs, a process without a GPU sees
none.

    run-8: Every process of the run dies with the controller, however the controller ends (Monarch sets the parent-death
        signal), and not before: a terminal's Ctrl-C reaches only the controller, because each process is in a group of
        its own; the SIGTERM that schedulers send to all processes ends none of them (base-2).
"""

import asyncio
import atexit
import contextlib
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch._src.actor import config as monarch_config
from monarch.actor import HostMesh, ProcMesh, current_rank, shutdown_context
from monarch.job import JobTrait, LocalJob

from goaly.base.atomic_files import open_lines
from goaly.base.errors import ConfigError, RunFailed
from goaly.base.registry import function_at
from goaly.base.telemetry.process_logs import log_file, process_name
from goaly.plan.cluster import POOL, Cluster, Host, one_host, this_machine
from goaly.plan.host_settings import ROLES, HostSettings
from goaly.plan.placement import ANYWHERE, IMPORTS, Place, Placed, Processes
from goaly.run.fork_server import FORKED, SHARED, ForkServer, fork_command
from goaly.run.process_watch import START_SECONDS, ProcessAgent, ProcessWatch

monarch_config.prefix_python_logs_with_actor = False  # do not name an actor in each line of the controller's log

logger = logging.getLogger(__name__)

STOP_SECONDS = 3.0
EXIT_SECONDS = 3.0


class Hosts:
    """Spawns processes for roles, and stops them all."""

    def __init__(self, settings: HostSettings, run_dir: Path, on_failure: Callable[[str, str], None], *, trace: bool):
        """`on_failure(name, report)` is called in the controller's event loop when an actor or processes of this name
        die, possibly more than once."""
        self._settings = settings
        self._run_dir = run_dir
        self._trace = trace
        self._meshes: dict[str, ProcMesh] = {}
        self._watches: dict[str, ProcessWatch] = {}
        self._fork_servers: dict[int, ForkServer] = {}
        self._loop = asyncio.get_running_loop()
        self._on_failure = on_failure
        with _stderr_to(run_dir / "logs" / "monarch.log"):  # Monarch prints the name of its log file there
            self._job = _job(settings.job)
            self._state = self._job.state(cached_path=None)
        atexit.unregister(_shut_monarch_down)
        atexit.register(_shut_monarch_down)  # registered last, so it runs before Monarch's own handler
        monarch.actor.unhandled_fault_hook = self._fault

    async def cluster(self) -> Cluster:
        """The hosts of the run, with their GPUs and cores."""
        if self._settings.job == "local":
            return one_host(await asyncio.to_thread(this_machine))
        names = [name for name in (POOL, *ROLES) if self._mesh(name) is not None]
        surveys = dict(zip(names, await asyncio.gather(*map(self._survey, names)), strict=True))
        found = {machine: host for machines in surveys.values() for machine, host in machines}
        numbers = {machine: number for number, machine in enumerate(found)}
        meshes = {name: tuple(numbers[machine] for machine, _ in machines) for name, machines in surveys.items()}
        return Cluster(hosts=tuple(found.values()), meshes=meshes)

    def spawn(self, processes: Processes, placed: Placed) -> ProcMesh:
        """Start these processes at their places. Returns the processes of this name if they are started already.

        They log to the run folder, and import the modules of their role while the caller continues.
        """
        name = processes.name
        if name not in self._meshes:
            hosts = self._mesh(processes.role) or self._mesh(POOL)
            assert hosts is not None, "the placement uses only meshes that the job has"
            mesh = self._meshes[name] = self._start(processes, placed, _part(hosts, placed.seats))
            ranks = range(processes.count)
            logs = [log_file(self._run_dir, process_name(name, rank, len(ranks))) for rank in ranks]
            silent_seconds = self._settings.silent_seconds
            self._watches[name] = ProcessWatch(
                name, mesh, logs=logs, silent_seconds=silent_seconds, on_lost=self._on_failure
            )
        return self._meshes[name]

    async def stop(self, name: str) -> None:
        """Stop the processes spawned under this name."""
        mesh = self._meshes.pop(name, None)
        if mesh is not None:
            watch = self._watches.pop(name)
            watch.stop_reporting()
            await _stop(name, mesh)
            watch.kill()  # processes that did not stop

    async def kill(self, name: str) -> None:
        """Kill the processes spawned under this name. Used when one died: the others may wait for it forever."""
        if name in self._watches:
            self._watches[name].kill()
        await self.stop(name)

    async def stop_all(self) -> None:
        """Stop every process of the run. Those that do not stop within seconds die with the controller (run-8)."""
        await asyncio.gather(*(self.stop(name) for name in list(self._meshes)))
        for server in self._fork_servers.values():
            server.close()
        self._fork_servers.clear()
        if self._settings.job != "local":
            await asyncio.to_thread(self._job.kill)

    def _mesh(self, name: str) -> HostMesh | None:
        return getattr(self._state, name, None)

    def _start(self, processes: Processes, placed: Placed, hosts: HostMesh) -> ProcMesh:
        per_host, rest = divmod(len(placed.ranks), len(placed.seats))
        assert not rest, "every host has as many of the ranks as the others"
        stuck_seconds = self._settings.stuck_seconds
        bootstrap = _bootstrap(
            processes, placed.ranks, self._run_dir.absolute(), trace=self._trace, stuck_seconds=stuck_seconds
        )
        return hosts.spawn_procs(
            per_host={"procs": per_host},
            name=processes.name,
            bootstrap=bootstrap,
            bootstrap_command=self._fork(processes, placed),
        )

    def _fork(self, processes: Processes, placed: Placed) -> BootstrapCommand | None:
        """The command that starts these processes as forks; None if each starts alone."""
        is_here = self._settings.job == "local" and processes.libraries in FORKED
        sees_gpus = any(place.visible is not None for place in placed.ranks)
        if not (self._settings.fork and is_here) or sees_gpus:
            return None
        threads = processes.threads
        shared = os.environ.get(SHARED)
        if shared is None and threads not in self._fork_servers:
            self._fork_servers[threads] = ForkServer(threads, log_file(self._run_dir, f"fork-server-{threads}"))
        return fork_command(shared or self._fork_servers[threads].name, processes.libraries, threads)

    async def _survey(self, mesh: str) -> list[tuple[str, Host]]:
        """Each host of a mesh: a unique name, and its GPUs and cores."""
        hosts = self._mesh(mesh)
        assert hosts is not None
        count = math.prod(hosts.sizes.values())
        one_each = Placed(seats=range(count), ranks=(ANYWHERE,) * count)
        processes = Processes(name=f"survey-{mesh}", role="survey", count=count)
        started = self._start(processes, one_each, hosts)
        try:
            async with asyncio.timeout(START_SECONDS):
                answers = await started.spawn("surveyor", ProcessAgent).machine.call()
        except TimeoutError:
            raise RunFailed(
                f"hosts.job={self._settings.job}: a host of its mesh {mesh} did not report its GPUs and cores within "
                f"{START_SECONDS:.0f} s"
            ) from None
        finally:
            await _stop(processes.name, started)
        return [answer for _, answer in sorted(answers.items(), key=lambda answer: answer[0].rank)]

    def _fault(self, failure: Any) -> None:
        name = failure.mesh_name.rpartition("-")[0]  # Monarch adds a suffix to the name
        if not name:  # this process's own client, with a message to processes that have been stopped or are watched
            logger.warning("%s", failure.report())
            return
        reasons = self._watches[name].fatal_reasons() if name in self._watches else []
        with contextlib.suppress(RuntimeError):  # the loop is closed: the death is reported after the run's end
            self._loop.call_soon_threadsafe(self._on_failure, name, "\n".join([failure.report(), *reasons]))


def _shut_monarch_down() -> None:
    """Shut Monarch's client down at exit. Monarch's own handler allows one second and then prints a traceback; on a
    busy machine that is too short. Processes that are left after that die with this process (run-8)."""
    with contextlib.suppress(TimeoutError):
        shutdown_context(host_timeout=0.3).get(timeout=EXIT_SECONDS)


async def _stop(name: str, mesh: ProcMesh) -> None:
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await mesh.stop()
    except Exception as error:  # a dead mesh cannot be stopped and need not be
        logger.info("stopping %s: %s", name, error)


def _part(hosts: HostMesh, seats: range) -> HostMesh:
    """The hosts at these positions of a mesh."""
    if not hosts.sizes:  # this machine alone: its mesh has no axis
        return hosts
    (axis,) = hosts.sizes
    return hosts.slice(**{axis: slice(seats.start, seats.stop)})


def _job(kind: str) -> JobTrait:
    if kind == "local":
        return LocalJob((POOL,))
    job = function_at(kind)()
    if not isinstance(job, JobTrait):
        raise ConfigError([f"hosts.job={kind}: returned {type(job).__name__}, must return a Monarch job"])
    return job


def _bootstrap(
    processes: Processes, places: Sequence[Place], run_dir: Path, *, trace: bool, stuck_seconds: float | None
) -> Callable[[], None]:
    name, threads, imports = processes.name, processes.threads, IMPORTS.get(processes.libraries, ())
    module_path = list(sys.path)

    def bootstrap() -> None:
        sys.path.extend(path for path in module_path if path not in sys.path)  # includes the folder of a user's script
        from goaly.base.process import outlive_stop_signals

        os.setpgid(0, 0)  # run-8
        outlive_stop_signals()
        os.environ["OMP_NUM_THREADS"] = str(threads)  # before torch is imported
        rank = current_rank()
        place = places[rank.rank]
        if place.visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(place.visible)
            os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order in which the placement numbers them
        if place.cores is not None:
            for thread in os.listdir("/proc/self/task"):  # Monarch's threads run already, and actors run in some
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread), place.cores)
        from goaly.base.process import give_up_when_a_callback_fails, give_up_when_a_thread_fails, import_ahead, show_as
        from goaly.base.telemetry import process_logs, spans
        from goaly.base.watchdog import limit_work

        process = process_logs.process_name(name, rank.rank, rank.extent.nelements)
        process_logs.quiet(process_logs.log_file(run_dir, process))
        show_as(f"goaly {process}")
        spans.configure(run_dir if trace else None, process)
        give_up_when_a_thread_fails()
        give_up_when_a_callback_fails()
        limit_work(stuck_seconds)
        import_ahead(imports)

    return bootstrap


@contextlib.contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    sys.stderr.flush()
    saved = os.dup(2)
    with os.fdopen(open_lines(path, cut=False), "ab") as log:
        os.dup2(log.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
