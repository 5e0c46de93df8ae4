"""A daemon of containers for tests, with folders of its own, and an image of this machine's own programs."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = """sh bash env cat ls cp rm mv mkdir rmdir mkfifo mknod touch chmod chown ln stat head tail wc cut sort
seq sleep true false id uname grep sed find ps dd du df split yes tr nohup setsid expr dirname basename readlink date
test truncate timeout kill python3 git tar"""
NOT_NEEDED = {"test", "idlelib", "tkinter", "ensurepip", "lib2to3", "__pycache__", "pydoc_data"}
FOLDERS = {"tmp": 0o1777, "usr": 0o755, "var": 0o755, "proc": 0o755, "dev": 0o755, "etc": 0o755}
ACCOUNTS = {"etc/passwd": b"root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n", "etc/group": b"root:x:0:\n"}


def missing() -> str | None:
    """Why a daemon cannot run here, if it cannot."""
    if os.geteuid() != 0:
        return "a daemon of containers needs root"
    absent = [name for name in ("dockerd", "runc", "setpriv") if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


@contextmanager
def dockerd(folder: Path) -> Iterator[Path]:
    """The socket of a daemon that ends with this block, or with this process."""
    address, group = folder / "docker.sock", f"daemon-of-tests-{os.getpid()}"
    words = ["setpriv", "--pdeathsig", "TERM", "dockerd", "--data-root", str(folder / "data")]
    words += ["--exec-root", str(folder / "exec"), "--pidfile", str(folder / "pid"), "--host", f"unix://{address}"]
    words += ["--iptables=false", "--ip-forward=false", "--bridge=none", "--cgroup-parent", group]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout
    said: list[bytes] = []
    try:
        while b"API listen on" not in (line := process.stdout.readline()):
            said.append(line)
            if not line:
                raise RuntimeError(f"dockerd has ended: {b''.join(said[-20:]).decode()}")
        rest = threading.Thread(target=process.stdout.read, daemon=True)
        rest.start()
        yield address
    finally:
        process.terminate()
        process.wait(60)
        for made in [path for path in Path("/sys/fs/cgroup").glob(f"*/{group}") if path.is_dir()]:
            made.rmdir()
        shutil.rmtree(folder, ignore_errors=True)


def _libraries_of(path: Path) -> set[Path]:
    said = subprocess.run(
        ["ldd", str(path)], capture_output=True, text=True, env={}
    ).stdout  # no library of this process
    return {Path(found) for found in re.findall(r"(/\S+) \(0x", said)}


def _files() -> set[Path]:
    """The usual programs, Python's library, and what they are linked with."""
    found = {Path(path) for name in PROGRAMS.split() if (path := shutil.which(name, path="/usr/bin:/bin"))}
    linked = set(found)
    for library in Path("/usr/lib").glob("python3.*"):
        for path in library.rglob("*"):
            if path.is_file() and not NOT_NEEDED & set(path.relative_to(library).parts):
                found.add(path)
                linked |= {path} if ".so" in path.suffixes else set()
    return found.union(*(_libraries_of(path) for path in linked))


def _with_targets(path: Path) -> Iterator[Path]:
    """A file, or a link and what it leads to, below folders that are no links."""
    real = path.parent.resolve() / path.name
    yield real
    if real.is_symlink():
        yield from _with_targets(real.parent / os.readlink(real))


def write_root(to: Path) -> None:
    """A tar of a root with a shell, the usual programs and Python, from this machine's files."""
    with tarfile.open(to, "w") as archive:
        for name, mode in FOLDERS.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            archive.addfile(entry)
        for name in ("bin", "lib", "lib64", "sbin"):
            if Path("/", name).is_symlink():
                archive.add(Path("/", name), name)
        for path in sorted({step for file in _files() for step in _with_targets(file)}):
            archive.add(path, str(path.relative_to("/")))
        for name, contents in ACCOUNTS.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(contents)
            archive.addfile(entry, io.BytesIO(contents))
