"""Measures sandboxes by way of a server on this machine against those without one, in turns.

    python -m bench.remote_sandboxes [--alive 500] [--mib 64] [--json FILE]

- `command_ms` and `local_command_ms`: the median time of `true` in a live sandbox.
- `start_ms` and `local_start_ms`: the median time of a start and an end, one after the other.
- `alive_seconds`: until `--alive` sandboxes are alive at once on the server; `commands_per_second`: of all of them.
- `server_mib`: memory of the server's process with all of them alive.
- `upload_mib_per_second`, `download_mib_per_second`: of a file of `--mib` MiB, and `local_` for those without a server.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median

from bench.report import Machine, options, write
from goaly.sandboxes.contract import Limits, SandboxSpec
from goaly.sandboxes.namespaces import NamespaceHost
from goaly.sandboxes.remote import RemoteHost
from goaly.sandboxes.sandbox import Sandbox, SandboxHost
from goaly.sandboxes.settings import RemoteSettings

ROUNDS = 200
SMALL = SandboxSpec(limits=Limits(memory_mib=256, disk_mib=16, files=1000, processes=32))


async def medians_ms(works: Sequence[Callable[[], Awaitable[object]]], rounds: int) -> list[float]:
    """The median time of each of these, in turns."""
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for work, taken in zip(works, seconds, strict=True):
            began = time.perf_counter()
            await work()
            taken.append(time.perf_counter() - began)
    return [median(taken) * 1e3 for taken in seconds]


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
    """So many sandboxes at once, the seconds until they live, and their commands a second, all at the same time."""
    began = time.monotonic()
    living = await asyncio.gather(*(host.start(SMALL) for _ in range(count)))
    alive = time.monotonic() - began
    began = time.monotonic()
    results = await asyncio.gather(*(sandbox.run("true") for sandbox in living for _ in range(4)))
    assert all(result.ok for result in results)
    return list(living), alive, len(results) / (time.monotonic() - began)


async def measure(url: str, server: int, count: int, mib: int) -> dict[str, float]:
    local, remote = await NamespaceHost.open(), await RemoteHost.open(RemoteSettings(servers=(url,)))
    boxes = [await host.start(SMALL) for host in (local, remote)]
    commands = await medians_ms([lambda box=box: box.run(["/bin/true"]) for box in boxes], ROUNDS)
    starts = await medians_ms([start_and_end(host) for host in (local, remote)], ROUNDS)
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


def main() -> None:
    parser = options(__doc__, "json", alive=500, mib=64)
    arguments = parser.parse_args()
    machine = Machine.now()
    print(machine)
    words = [sys.executable, "-m", "apps.sandboxes.main", "port=0", f"sandboxes={arguments.alive + 8}"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        url = server.stdout.readline().split()[-1]
        numbers = asyncio.run(measure(url, server.pid, arguments.alive, arguments.mib))
        server.terminate()
    for name, value in numbers.items():
        print(f"{name:32} {value:10.3f}")
    write(arguments.json, {"machine": machine.record(), **numbers})


if __name__ == "__main__":
    main()
