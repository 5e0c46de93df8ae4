"""Measures sandboxes of namespaces against plain processes of the same commands, in turns.

    python -m bench.sandboxes [--alive 5000] [--files 50000] [--sockets /run/docker.sock,/run/podman.sock] [--json FILE]

- `starts_per_second_core`: sandboxes from start to removal, with limits, filter and an overlay root, by the seconds of
  cores that this process, the server and the sandboxes used.
- `command_ms_over_subprocess`: the median time of `true` in a live sandbox beyond that of a subprocess.
- `snapshot_ms` and `fork_50k_ms`: a snapshot of `--files` files, and a sandbox that starts from it.
- `alive_in_10s`: sandboxes that were alive 10 s after the first start, `--alive` at most.
- `gib_for_1000`: memory that 1,000 idle ones need, as the machine's free memory says.
- `docker_start_ms` and others: those of containers at `--sockets`, in turns with `namespaces_start_ms` and others.
"""

import asyncio
import os
import resource
import subprocess
import time
from pathlib import Path
from statistics import median

from bench.container_turns import in_turns
from bench.report import Machine, options, write
from goaly.sandboxes.contract import Limits, SandboxSpec
from goaly.sandboxes.namespaces import NamespaceHost, NamespaceSandbox

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


async def command_ms(host: NamespaceHost) -> tuple[float, float]:
    """Medians of `true` in a sandbox and as a subprocess, in turns."""
    sandbox = await host.start(SMALL)
    inside, plain = [], []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        await sandbox.run(["/bin/true"])
        inside.append(time.perf_counter() - began)
        began = time.perf_counter()
        process = await asyncio.create_subprocess_exec("/bin/true", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        await process.communicate()
        plain.append(time.perf_counter() - began)
    await sandbox.stop()
    return median(inside) * 1e3, median(plain) * 1e3


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


def main() -> None:
    parser = options(__doc__, "json", alive=5000, files=50_000, sockets="")
    arguments = parser.parse_args()
    machine = Machine.now()
    print(machine)
    numbers = asyncio.run(measure(arguments.alive, arguments.files))
    if arguments.sockets:
        numbers |= asyncio.run(in_turns(arguments.sockets.split(","), SMALL))
    for name, value in numbers.items():
        print(f"{name:32} {value:10.3f}")
    write(arguments.json, {"machine": machine.record(), **numbers})


if __name__ == "__main__":
    main()
