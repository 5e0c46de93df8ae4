"""Finds the Python that runs a root's tests, and lays pytest into the roots that lack it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from goaly.grading.pytest_bundle import FOLDER, OLDEST, OWN_PREFIX, OWN_PYTHON, PYTHON, bundle, own_interpreter
from goaly.grading.task import TaskProblem
from goaly.sandboxes.contract import Entry, FileSnapshot, SandboxSpec
from goaly.sandboxes.files import folder_entries
from goaly.sandboxes.sandbox import DEFAULTS, Sandbox, SandboxHost

RUNNER: Final = f"{FOLDER}/suite_runner.py"
"""The program that runs suites, in sandboxes."""
RUNNERS: Final = ("suite_runner.py", "django_runner.py", "sympy_runner.py")
PROBE: Final = """
import json, sys
try:
    import pytest
    from importlib.metadata import entry_points
    found = entry_points()
    found = found.select(group="pytest11") if hasattr(found, "select") else found.get("pytest11", [])
    plugins = [[one.name, one.value] for one in found]
except ImportError:
    pytest, plugins = None, []
print(json.dumps([sys.executable, sys.version_info[:2], pytest and pytest.__version__, plugins]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolbox:
    """A root, or an image, in which tests can run."""

    snapshot: FileSnapshot
    python: str | None
    """The interpreter that has pytest; None if there is no Python."""
    own_python: str | None = None
    """The first interpreter in PATH, of any version and with pytest or without."""
    plugins: tuple[str, ...] = ()
    """Modules of pytest plugins that are installed there."""
    path: str = DEFAULTS["PATH"]
    """PATH of agents."""


async def find_tools(host: SandboxHost, spec: SandboxSpec, files: Mapping[str, str]) -> Toolbox:
    """The Python with pytest of a root, or one that is laid into it. `files` of this host are laid there, too."""
    sandbox = await host.start(replace(spec, workdir="/", user=0))
    try:
        for inside, outside in files.items():
            await _lay_files(sandbox, Path(outside), inside)
        for name in RUNNERS:
            await sandbox.write(f"{FOLDER}/{name}", Path(__file__).with_name(name).read_bytes())
        path = spec.environment.get("PATH", DEFAULTS["PATH"])
        found: tuple[str, tuple[int, int]] | None = None
        own: str | None = None
        for name in ("python", "python3", OWN_PYTHON):
            result = await sandbox.run([name, "-c", PROBE], env=spec.environment)
            if not result.ok:
                continue
            python, (major, minor), pytest, plugins = json.loads(result.stdout.text())
            own = own or python
            if pytest:
                modules = tuple(value.partition(":")[0] for _, value in plugins)
                return Toolbox(
                    snapshot=await sandbox.snapshot(), python=python, own_python=own, plugins=modules, path=path
                )
            found = found or ((python, (major, minor)) if (major, minor) >= OLDEST else None)
        if found is None and spec.image is None:
            await sandbox.upload(await asyncio.to_thread(own_interpreter), OWN_PREFIX, user=0)
            found = (OWN_PYTHON, sys.version_info[:2])
        if found is not None:
            await sandbox.upload(await asyncio.to_thread(bundle, *found), FOLDER, user=0)
            if found[1] != sys.version_info[:2]:
                await sandbox.run([PYTHON, "-m", "compileall", "-q", f"{FOLDER}/lib"], user=0, seconds=120.0)
            result = await sandbox.run([PYTHON, "-c", "import pytest"])
            if not result.ok:
                raise TaskProblem(f"pytest does not start on {found[0]} of the sandbox: {result.stderr.text()}")
            path = f"{FOLDER}/bin:{path}"
        python = found and PYTHON
        return Toolbox(snapshot=await sandbox.snapshot(), python=python, own_python=own or python, path=path)
    finally:
        await sandbox.stop()


async def _lay_files(sandbox: Sandbox, outside: Path, inside: str) -> None:
    entries = await asyncio.to_thread(_entries, outside, inside)
    try:
        await sandbox.upload(entries, "/", user=0)
    except OSError as error:
        raise TaskProblem(f"coding.files.{inside}={outside}: cannot be laid into the sandbox: {error}") from error


def _entries(outside: Path, inside: str) -> list[Entry]:
    """A file or a folder of this host, as it goes below a sandbox's root."""
    below = inside.strip("/")
    if outside.is_dir():
        folder = Entry(path=below, kind="folder", mode=0o755)
        return [folder, *(replace(entry, path=f"{below}/{entry.path}") for entry in folder_entries(outside))]
    return [Entry(path=below, contents=outside.read_bytes(), mode=outside.stat().st_mode & 0o777)]
