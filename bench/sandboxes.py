"""Measures sandboxes against plain processes, against containers, and by way of a server on this machine, in turns.

    python -m bench.sandboxes [--alive 5000] [--files 50000] [--sockets /run/docker.sock,/run/podman.sock] [--json FILE]
    python -m bench.sandboxes --server [--alive 500] [--mib 64] [--json FILE]

- `starts_per_second_core`: sandboxes from start to removal, with limits, filter and an overlay root, by the seconds of
  cores that this process, the server and the sandboxes used.
- `command_ms_over_subprocess`: the median time of `true` in a live sandbox beyond that of a subprocess.
- `snapshot_ms` and `fork_50k_ms`: a snapshot of `--files` files, and a sandbox that starts from it.
- `alive_in_10s`: sandboxes that were alive 10 s after the first start, `--alive` at most.
- `gib_for_1000`: memory that 1,000 idle ones need, as the machine's free memory says.
- `docker_start_ms` and others: those of containers at `--sockets`, in turns with `namespaces_start_ms` and others.

With `--server`, `local_` numbers are those without a server:

- `command_ms` and `start_ms`: the median time of `true` in a live sandbox, and of a start and an end.
- `alive_seconds`: until `--alive` sandboxes are alive at once on the server; `commands_per_second`: of all of them.
- `server_mib`: memory of the server's process with all of them alive.
- `upload_mib_per_second`, `download_mib_per_second`: of a file of `--mib` MiB.
"""

import asyncio
import os
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median

from bench.container_turns import in_turns
from bench.report import Machine, options, show, write
from goaly.sandboxes.contract import Limits, SandboxSpec
from goaly.sandboxes.namespaces import NamespaceHost, NamespaceSandbox
from goaly.sandboxes.remote import RemoteHost
from goaly.sandboxes.sandbox import Sandbox, SandboxHost
from goaly.sandboxes.settings import RemoteSettings

AT_ONCE = 16
ROUNDS = 200
SMALL = SandboxSpec(limits=Limits(memory_mib=256, disk_mib=16, files=1000, processes=32))


def core_seconds(server: int) -> float:
    """Seconds of cores that this process, its children, and a server with its children have used, also live ones."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = 0
    for pid in (server, *Path(f"/proc/{server}/task/{server}/children").read_text().split()):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(int(field) for field in fields[11:15])
    return sum(one.ru_utime + one.ru_stime for one in (own, children)) + ticks / os.sysconf("SC_CLK_TCK")


async def starts(host: NamespaceHost, count: int) -> tuple[float, float]:
    """Sandboxes a second, and a second of one core: from the request until nothing of them is left."""
    assert host.server
    waiting = iter(range(count))

    async def worker() -> None:
        for _ in waiting:
            await (await host.start(SMALL)).stop()

    before, began = core_seconds(host.server.process.pid), time.monotonic()
    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    return count / (time.monotonic() - began), count / (core_seconds(host.server.process.pid) - before)


async def medians_ms(works: Sequence[Callable[[], Awaitable[object]]], rounds: int = ROUNDS) -> list[float]:
    """The median time of each of these, in turns."""
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for work, taken in zip(works, seconds, strict=True):
            began = time.perf_counter()
            await work()
            taken.append(time.perf_counter() - began)
    return [median(taken) * 1e3 for taken in seconds]


async def subprocess_ends() -> None:
    process = await asyncio.create_subprocess_exec("/bin/true", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    await process.communicate()


async def command_ms(host: NamespaceHost) -> list[float]:
    """Medians of `true` in a sandbox and as a subprocess."""
    sandbox = await host.start(SMALL)
    found = await medians_ms([lambda: sandbox.run(["/bin/true"]), subprocess_ends])
    await sandbox.stop()
    return found


async def fork_ms(host: NamespaceHost, files: int) -> tuple[float, float]:
    """Medians of a snapshot of a sandbox with this many new files, and of a sandbox that starts from it."""
    limits = Limits(memory_mib=4096, disk_mib=1024, files=2 * files + 1000)
    sandbox = await host.start(SandboxSpec(limits=limits))
    folders = f"for d in $(seq {max(1, files // 500)}); do mkdir $d; (cd $d; split -n 500 -a 4 /usr/bin/env); done"
    script = f"mkdir /tmp/f; cd /tmp/f; {folders}"
    result = await sandbox.run(script, seconds=300)
    assert result.ok, result.stderr.text()
    snapshots, forks = [], []
    for _ in range(9):
        began = time.perf_counter()
        snapshot = await sandbox.snapshot()
        snapshots.append(time.perf_counter() - began)
        began = time.perf_counter()
        fork = await host.start(sandbox.spec, origin=snapshot)
        forks.append(time.perf_counter() - began)
        assert (await fork.run("ls /tmp/f/1 | wc -l")).stdout.text() == "500\n"
        await fork.stop()
    await sandbox.stop()
    return median(snapshots) * 1e3, median(forks) * 1e3


def available() -> int:
    """Bytes of memory that are free or can be freed."""
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) << 10


async def alive(host: NamespaceHost, most: int) -> tuple[int, float]:
    """The sandboxes alive after 10 s, and GiB for 1,000 of them."""
    free, end = available(), time.monotonic() + 10
    living: list[NamespaceSandbox] = []

    async def worker() -> None:
        while len(living) + AT_ONCE <= most and time.monotonic() < end:
            living.append(await host.start(SMALL))

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    count, gib = len(living), (free - available()) / len(living) * 1000 / 2**30
    for at in (0, count // 2, count - 1):
        assert (await living[at].run("echo lives")).ok
    return count, gib


async def measure(most: int, files: int) -> dict[str, float | int]:
    host = await NamespaceHost.open()
    try:
        await starts(host, 50)
        per_second, per_core = await starts(host, 1000)
        inside, plain = await command_ms(host)
        snapshot, fork = await fork_ms(host, files)
        count, gib = await alive(host, most)
    finally:
        began = time.monotonic()
        await host.close()
    return {
        "starts_per_second": per_second,
        "starts_per_second_core": per_core,
        "command_ms": inside,
        "subprocess_ms": plain,
        "command_ms_over_subprocess": inside - plain,
        "snapshot_50k_ms": snapshot,
        "fork_50k_ms": fork,
        "alive_in_10s": count,
        "gib_for_1000": gib,
        "end_of_all_seconds": time.monotonic() - began,
    }


def start_and_end(host: SandboxHost) -> Callable[[], Awaitable[object]]:
    async def work() -> None:
        await (await host.start(SMALL)).stop()

    return work


async def mib_per_second(host: SandboxHost, mib: int) -> tuple[float, float]:
    """The speed of an upload and of a download of one file."""
    contents, limits = bytes(mib << 20), Limits(disk_mib=2 * mib, memory_mib=4 * mib + 256)
    sandbox = await host.start(SandboxSpec(limits=limits))
    (up,) = await medians_ms([lambda: sandbox.write("/tmp/x", contents)], 5)
    (down,) = await medians_ms([lambda: sandbox.read("/tmp/x", most_bytes=2 * mib << 20)], 5)
    await sandbox.stop()
    return mib / up * 1e3, mib / down * 1e3


async def many(host: SandboxHost, count: int) -> tuple[list[Sandbox], float, float]:
    """This many sandboxes at once, the seconds until they live, and their commands a second, all at the same time."""
    began = time.monotonic()
    living = await asyncio.gather(*(host.start(SMALL) for _ in range(count)))
    alive = time.monotonic() - began
    began = time.monotonic()
    results = await asyncio.gather(*(sandbox.run("true") for sandbox in living for _ in range(4)))
    assert all(result.ok for result in results)
    return list(living), alive, len(results) / (time.monotonic() - began)


async def by_server(url: str, server: int, count: int, mib: int) -> dict[str, float | int]:
    """The numbers of `--server`."""
    local, remote = await NamespaceHost.open(), await RemoteHost.open(RemoteSettings(servers=(url,)))
    boxes = [await host.start(SMALL) for host in (local, remote)]
    commands = await medians_ms([lambda box=box: box.run(["/bin/true"]) for box in boxes])
    starts = await medians_ms([start_and_end(host) for host in (local, remote)])
    speeds = [await mib_per_second(host, mib) for host in (local, remote)]
    _, alive_seconds, per_second = await many(remote, count)
    status = Path(f"/proc/{server}/status").read_text()  # noqa: ASYNC240
    began = time.monotonic()
    await asyncio.gather(local.close(), remote.close())
    return {
        "command_ms": commands[1],
        "local_command_ms": commands[0],
        "start_ms": starts[1],
        "local_start_ms": starts[0],
        "alive": count,
        "alive_seconds": alive_seconds,
        "commands_per_second": per_second,
        "end_of_all_seconds": time.monotonic() - began,
        "server_mib": int(status.split("VmRSS:")[1].split()[0]) / 1024,
        "upload_mib_per_second": speeds[1][0],
        "local_upload_mib_per_second": speeds[0][0],
        "download_mib_per_second": speeds[1][1],
        "local_download_mib_per_second": speeds[0][1],
    }


def with_server(count: int, mib: int) -> dict[str, float | int]:
    """Start a server, and measure it."""
    words = [sys.executable, "-m", "apps.sandboxes.main", "port=0", f"sandboxes={count + 8}"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        numbers = asyncio.run(by_server(server.stdout.readline().split()[-1], server.pid, count, mib))
        server.terminate()
        return numbers


def main() -> None:
    parser = options(__doc__, "json", alive=0, files=50_000, sockets="", mib=64)
    parser.add_argument("--server", action="store_true", help="by way of a server on this machine")
    arguments = parser.parse_args()
    machine = Machine.now()
    if arguments.server:
        numbers = with_server(arguments.alive or 500, arguments.mib)
    else:
        numbers = asyncio.run(measure(arguments.alive or 5000, arguments.files))
        if arguments.sockets:
            numbers |= asyncio.run(in_turns(arguments.sockets.split(","), SMALL))
    show(numbers, str(machine))
    write(arguments.json, {"machine": machine.record(), **numbers})


if __name__ == "__main__":
    main()
