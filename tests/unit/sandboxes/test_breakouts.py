"""Attempts to get out of a sandbox of this machine. Each prints OUT where it succeeds."""

import asyncio
import os
import re
import secrets
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from goaly.sandboxes.contract import Limit, Limits, SandboxSpec
from goaly.sandboxes.files import write_folder
from goaly.sandboxes.sandbox import Sandbox, SandboxHost
from tests.unit.sandboxes.conftest import LOCAL, SMALL

SYSTEM_CALLS = """
import ctypes, fcntl, os, platform, termios
libc = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == "x86_64"
memory = ctypes.create_string_buffer(256)
calls = {
    "ptrace": (101 if x86 else 117, 16, 1, 0, 0),
    "add_key": (248 if x86 else 217, b"user", b"k", b"v", 1, -3),
    "keyctl": (250 if x86 else 219, 0, -3, 0),
    "io_uring_setup": (425, 1, memory),
    "bpf": (321 if x86 else 280, 0, memory, 48),
    "userfaultfd": (323 if x86 else 282, 1),
    "perf_event_open": (298 if x86 else 241, memory, 0, -1, -1, 0),
    "mount": (165 if x86 else 40, b"none", b"/tmp", b"tmpfs", 0, None),
    "umount": (166 if x86 else 39, b"/proc", 2),
    "unshare users": (272 if x86 else 97, 0x10000000),
    "unshare mounts": (272 if x86 else 97, 0x20000),
    "clone users": (56 if x86 else 220, 0x10000000 | 17, 0, 0, 0, 0),
    "clone3": (435, memory, 88),
    "setns": (308 if x86 else 268, os.open("/proc/self/ns/net", os.O_RDONLY), 0),
    "open_tree": (428, -100, b"/", 1),
    "fsopen": (430, b"tmpfs", 0),
    "open_by_handle_at": (304 if x86 else 265, -100, memory, 0),
    "pivot_root": (155 if x86 else 41, b".", b"."),
    "chroot": (161 if x86 else 51, b"/tmp"),
    "x32": (0x40000000 + 39,) if x86 else (435, 0, 0),
}
for name, arguments in calls.items():
    if libc.syscall(*arguments) >= 0:
        print("OUT", name)
try:
    fcntl.ioctl(0, termios.TIOCSTI, b"x")
    print("OUT TIOCSTI")
except OSError:
    pass
"""
CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


def text_of(path: str | Path) -> str:
    """A file of the host; empty if it is not there, as that of a process that has just ended."""
    try:
        return Path(path).read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def processes() -> list[Path]:
    """The folders of the host's processes."""
    return list(Path("/proc").glob("[0-9]*"))


async def said(sandbox: Sandbox, script: str, *, user: int | None = None, python: bool = False) -> str:
    command = ["python3", "-c", script] if python else ["bash", "-c", script]
    result = await sandbox.run(command, user=user, seconds=30)
    return result.stdout.text() + result.stderr.text()


@pytest.fixture(params=LOCAL)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[0, 1000], ids=["its root", "its user"])
def user(request: pytest.FixtureRequest) -> int:
    return request.param


async def test_system_calls_of_break_outs_are_refused(sandbox: Sandbox, user: int):
    result = await sandbox.run(["/usr/bin/python3", "-c", SYSTEM_CALLS], user=user)
    assert (result.exit_code, result.stdout.text()) == (0, ""), result.stderr.text()


async def test_no_capability_no_host_user_and_no_way_to_gain_either(sandbox: Sandbox, user: int, backend: str):
    status = await said(sandbox, "grep -E 'Cap(Inh|Prm|Eff|Bnd|Amb)|NoNewPrivs|Seccomp:' /proc/self/status", user=user)
    nothing = [word for name in CAPABILITIES for word in (f"{name}:", "0" * 16)]
    assert status.split() == [*nothing, "NoNewPrivs:", "1", "Seccomp:", "2"]
    mark = f"{secrets.randbelow(1 << 40)}"
    inside = await sandbox.start(f"exec sleep {mark}", user=user)
    await sandbox.run(f"until ps -eo args | grep -q '^sleep {mark}'; do :; done", user=user)
    sleeping = [process for process in processes() if text_of(process / "cmdline") == f"sleep\0{mark}\0"]
    owners = {re.findall(r"Uid:\s+(\d+)", text_of(process / "status"))[0] for process in sleeping}
    assert sleeping
    assert "0" not in owners or (backend, user) == ("containers", 0)  # without a capability: see above
    await inside.kill()
    await inside.ended
    inside.close()


async def test_the_hosts_files_are_out_of_reach_and_the_shared_ones_are_not_written(
    sandbox: Sandbox, user: int, tmp_path: Path
):
    secret = tmp_path / "secret"
    secret.write_text("OUT")
    tries = [
        f"cat {secret}",
        f"cat /proc/1/root{secret}",
        f"cat /proc/1/cwd/../..{secret}",
        f"cat /../../..{secret}",
        "cat /proc/1/environ | grep -c PATH=.*OUT",
    ]
    for attempt in tries:
        assert "OUT" not in (await said(sandbox, attempt, user=user)).replace(attempt, "")
    await sandbox.run(
        f"echo OUT > /usr/goaly-out; rm -rf /etc; mkdir -p {tmp_path}; echo OUT > {tmp_path}/planted", user=user
    )
    assert not text_of("/usr/goaly-out")
    assert text_of("/etc/passwd")
    assert not text_of(tmp_path / "planted")


SWITCHES = ("sys/vm/swappiness", "sys/kernel/core_pattern", "1/mem", "1/oom_score_adj")


async def test_the_kernels_switches_cannot_be_written(sandbox: Sandbox, user: int):
    switches = [f"/proc/{name}" for name in SWITCHES]
    before = [text_of(path) for path in switches[:2]]
    for path in [*switches, "/sys/power/state"]:
        assert "OUT" not in await said(sandbox, f"(echo 1 > {path}) 2>/dev/null && echo OUT", user=user), path
    await said(sandbox, "echo 1 > /proc/sysrq-trigger", user=user)
    assert [text_of(path) for path in switches[:2]] == before


async def test_devices_and_kernel_memory_are_not_there(sandbox: Sandbox, user: int, backend: str):
    names = set((await said(sandbox, "ls /dev", user=user)).split())
    harmless = "null zero full random urandom tty fd stdin stdout stderr ptmx pts shm"
    if backend == "containers":
        harmless += " mqueue core"  # a folder in memory, and a link to /proc/kcore
    assert names <= set(harmless.split())
    assert "OUT" not in await said(
        sandbox,
        "mknod /tmp/disk b 254 0 2>/dev/null && echo OUT; mknod /tmp/n c 1 3 2>/dev/null && echo OUT",
        user=user,
    )
    if (backend, user) != ("containers", 0):  # whose /dev is a small file system in memory that its root may write
        assert "OUT" not in await said(sandbox, "(touch /dev/x || echo 1 > /dev/y) 2>/dev/null && echo OUT", user=user)
    assert (await said(sandbox, "cat /proc/keys /proc/kcore 2>/dev/null | wc -c", user=user)).strip() == "0"


async def test_setuid_programs_give_no_user(sandbox: Sandbox):
    await sandbox.run("cp /usr/bin/id /tmp/id; chmod 4755 /tmp/id", user=0)
    assert "euid" not in await said(
        sandbox, "/tmp/id; for p in $(find /usr/bin -perm -4000 2>/dev/null | head -3); do :; done", user=1000
    )


async def test_the_hosts_network_and_sockets_are_out_of_reach(sandbox: Sandbox, user: int):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        name = f"goaly-test-{os.getpid()}"
        abstract.bind("\0" + name)
        abstract.listen()
        tries = f"""
import socket
hosts = [(socket.AF_INET, ("127.0.0.1", {server.getsockname()[1]})), (socket.AF_INET, ("1.1.1.1", 53))]
for family, address in [*hosts, (socket.AF_UNIX, "\\0{name}")]:
    s = socket.socket(family); s.settimeout(2)
    try: s.connect(address); print("OUT", address)
    except OSError: pass
try: socket.socket(socket.AF_PACKET, socket.SOCK_RAW); print("OUT raw")
except OSError: pass
"""
        socket.create_connection(server.getsockname()).close()
        result = await sandbox.run(["/usr/bin/python3", "-c", tries], user=user)
        assert (result.exit_code, result.stdout.text()) == (0, ""), result.stderr.text()


async def test_processes_outside_are_neither_seen_nor_signalled(sandbox: Sandbox, user: int):
    outside = await asyncio.create_subprocess_exec("sleep", "1000")
    try:
        assert "OUT" not in await said(
            sandbox,
            f"kill -0 {outside.pid} 2>/dev/null && echo OUT; ls /proc | grep -qx {outside.pid} && echo OUT",
            user=user,
        )
        await sandbox.run("kill -9 -1; kill -9 1", user=user)
        assert outside.returncode is None
    finally:
        outside.kill()
        await outside.wait()
    assert (await sandbox.run("echo lives")).stdout.text() == "lives\n"


async def test_a_second_sandbox_sees_nothing_of_the_first(host: SandboxHost, sandbox: Sandbox):
    await sandbox.run("echo secret > /tmp/mine; mkdir -p /dev/shm/x")
    running = await sandbox.start("sleep 4242")
    other = await host.start(sandbox.spec)
    assert "4242" not in await said(other, "ps -eo args; ls /tmp /dev/shm; ls /proc/*/root/tmp 2>/dev/null")
    assert (await said(other, "ls -A /tmp /dev/shm | grep -v :")).strip() == ""
    await running.kill()
    running.close()


async def test_bombs_hit_the_sandboxes_limits_and_the_host_goes_on(host: SandboxHost, sandbox: Sandbox, backend: str):
    forks = await sandbox.run(["bash", "-c", "f() { f | f & }; f; sleep 1; ls /proc | grep -c '^[0-9]'"], seconds=10)
    assert forks.limit or int(forks.stdout.text().split()[-1] or 0) <= SMALL.processes
    bombed = await host.start(sandbox.spec)
    memory = await bombed.run(["python3", "-c", "x = bytearray(1 << 30)"])
    assert memory.limit is Limit.MEMORY
    disk = await bombed.run("dd if=/dev/zero of=/tmp/big bs=1M count=500; stat -c %s /tmp/big; rm /tmp/big")
    assert 0 < int(disk.stdout.text()) <= SMALL.file_mib << 20
    sparse = await bombed.run("touch /tmp/s; truncate -s 1T /tmp/s")
    assert not sparse.ok
    if backend == "containers":  # its daemon bounds the sum of files only where the file system has quotas
        return
    spread = await bombed.run(
        "for n in 1 2 3 4 5; do head -c 30M /dev/zero > /tmp/$n; done; du -sm /tmp | cut -f1; rm /tmp/?"
    )
    assert 0 < int(spread.stdout.text()) <= SMALL.disk_mib
    inodes = await bombed.run(
        [
            "python3",
            "-c",
            "n = 0\ntry:\n  while True: open(f'/tmp/f{n}', 'w').close(); n += 1\nexcept OSError: print(n)",
        ]
    )
    assert int(inodes.stdout.text()) <= SMALL.files


async def test_endless_output_is_bounded(sandbox: Sandbox):
    result = await sandbox.run("yes", seconds=1, output_bytes=1000)
    assert result.limit is Limit.TIME
    assert len(result.stdout.head) + len(result.stdout.tail) <= 1000 < result.stdout.omitted


async def test_links_and_pipes_in_a_download_lead_nowhere_on_the_host(sandbox: Sandbox, tmp_path: Path):
    links = "ln -s / root; ln -s /etc/shadow shadow; ln -s ../../../../etc up; ln -s /proc/self/root proc"
    await sandbox.run(f"mkdir /tmp/d; cd /tmp/d; {links}; mkfifo pipe; echo x > file")
    entries = await sandbox.download("/tmp/d")
    assert {entry.path for entry in entries if entry.kind == "file"} == {"file"}
    left_out = write_folder(entries, tmp_path / "out")
    assert sorted(left_out) == ["proc", "root", "shadow", "up"]
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["file"]
    await sandbox.run("ln -s /tmp/elsewhere /tmp/linked; rm -rf /tmp/d")
    host_file = tmp_path / "host"
    host_file.write_text("host")
    await sandbox.run(f"mkdir -p {tmp_path} && ln -s {host_file} /tmp/to_host")
    assert not (await sandbox.run(f"test -e {host_file}")).ok
    with pytest.raises(OSError, match="symbolic links"):
        await sandbox.write("/tmp/to_host", b"OUT")
    assert host_file.read_text() == "host"


async def test_nothing_outlives_the_sandbox(host: SandboxHost, spec: SandboxSpec):
    sandbox = await host.start(replace(spec, limits=Limits(processes=32)))
    mark = f"{secrets.randbelow(1 << 40)}"
    await sandbox.run(f"setsid nohup sleep {mark} >/dev/null 2>&1 & disown; (setsid sleep {mark} &)")
    async with asyncio.timeout(10):
        await sandbox.stop()
    assert not any(mark in text_of(process / "cmdline") for process in processes())
