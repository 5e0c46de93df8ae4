"""The programs in C of this room: compiled at the first use, and kept in the user's cache."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from goaly.sandboxes.contract import SandboxUnavailable

NATIVE = Path(__file__).parent / "native"
SHARED = ("commands.c", "files.c", "filter.c", "wire.c")
SOURCES = {
    "sandboxes": ("server.c", "layers.c", "starter.c", "sandbox.c", *SHARED),
    "resident": ("resident.c", "relay.c", *SHARED),
}


def compilers(*, static: bool = False) -> list[list[str]]:
    """Commands that compile C here, the best first."""
    found = [[path] for name in ("cc", "gcc", "clang") if (path := shutil.which(name))]
    if importlib.util.find_spec("ziglang"):
        found.append([sys.executable, "-m", "ziglang", "cc"])
        if static:
            found[-1] += ["-target", f"{platform.machine()}-linux-musl"]
    return [[*command, "-static"] for command in found] if static else found


def build(name: str, *, static: bool = False) -> Path:
    """A program of `SOURCES`. SandboxUnavailable if no compiler here makes it."""
    sources = [NATIVE / source for source in SOURCES[name]]
    read = [*sources, *sorted(NATIVE.glob("*.h"))]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in read)).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "goaly"
    program = cache / f"{name}-{digest}"
    if program.exists():
        return program
    said, kind = "there is none", "a static program" if static else "a program"
    cache.mkdir(parents=True, exist_ok=True)
    for command in compilers(static=static):
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder, name)
            words = [*command, "-O2", "-o", str(made), *(str(path) for path in sources)]
            done = subprocess.run(words, capture_output=True, text=True)
            if not done.returncode:
                made.rename(program)
                return program
            said = f"{command[0]} says: {done.stderr.strip()[-1000:]}"
    raise SandboxUnavailable(
        f"sandboxes need a compiler that makes {kind} in C (gcc, clang, or `pip install ziglang`): {said}"
    )
