"""A virtual environment with pytest alone, as files for a sandbox whose own Python has no pytest.

It is made of the packages of this Python, so tasks run without network. Its interpreter is one of the sandbox's, or a
copy of this process's where the sandbox has none that pytest runs on.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from goaly.grading.task import TaskProblem
from goaly.sandboxes.contract import Entry

FOLDER: Final = "/opt/goaly"
PYTHON: Final = f"{FOLDER}/bin/python"
OLDEST: Final = (3, 10)
"""The oldest Python on which this pytest runs."""
OWN_PREFIX: Final = sys.base_prefix
OWN_PYTHON: Final = f"{OWN_PREFIX}/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
PACKAGES: Final = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
LEXERS: Final = ("__init__", "_mapping", "python", "diff", "special", "configs", "data")
NOT_OF_A_LIBRARY: Final = ("test", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "site-packages")
PYTEST_PROGRAM: Final = f"#!{PYTHON}\nimport sys\nimport pytest\nsys.exit(pytest.main())\n"
SOURCE_IS_NOT_COMPARED: Final = (1).to_bytes(4, "little") + bytes(8)
"""The head of compiled Python that is valid whatever the time of its source: uploaded files have another one."""


def bundle(interpreter: str, version: tuple[int, int]) -> list[Entry]:
    """Files below `FOLDER`, for an interpreter; compiled if it is like this one."""
    home = interpreter.rpartition("/")[0]
    library = f"lib/python{version[0]}.{version[1]}/site-packages"
    files = _packages(version == sys.version_info[:2])
    return [
        Entry(path="pyvenv.cfg", contents=f"home = {home}\ninclude-system-site-packages = true\n".encode()),
        Entry(path="bin/python", kind="link", contents=interpreter.encode()),
        Entry(path="bin/python3", kind="link", contents=b"python"),
        Entry(path="bin/pytest", contents=PYTEST_PROGRAM.encode(), mode=0o755),
        *(Entry(path=f"{library}/{name}", contents=contents) for name, contents in files.items()),
    ]


@cache
def _packages(compiled: bool) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for package in PACKAGES:
        try:
            files = distribution(package).files or []
        except PackageNotFoundError:
            raise TaskProblem(f"tests of tasks need the package {package} here: `pip install pytest`") from None
        for file in files:
            if file.suffix != ".py" or ".." in file.parts or not _is_needed(file.as_posix()):
                continue
            source = Path(str(file.locate()))
            found[file.as_posix()] = source.read_bytes()
            if compiled:
                cache_file = importlib.util.cache_from_source(file.as_posix())
                found[cache_file] = _compiled(source)
    return found


def _is_needed(path: str) -> bool:
    """Of pygments, only what pytest shows Python and differences with."""
    folder, _, name = path.rpartition("/")
    return folder != "pygments/lexers" or name.removesuffix(".py") in LEXERS


def _compiled(source: Path) -> bytes:
    """The source compiled, from this Python's cache if it is there."""
    kept = Path(importlib.util.cache_from_source(str(source)))
    data = kept.read_bytes() if kept.exists() else b""
    changed = source.stat()
    current = data[:4] == importlib.util.MAGIC_NUMBER and data[4:8] == bytes(4)
    current = current and int.from_bytes(data[8:12], "little") == int(changed.st_mtime) & 0xFFFFFFFF
    current = current and int.from_bytes(data[12:16], "little") == changed.st_size & 0xFFFFFFFF
    if not current:
        import marshal

        data = bytes(16) + marshal.dumps(compile(source.read_bytes(), source.name, "exec", dont_inherit=True))
    return importlib.util.MAGIC_NUMBER + SOURCE_IS_NOT_COMPARED + data[16:]


def own_interpreter() -> list[Entry]:
    """This process's interpreter with its standard library, as files below `OWN_PREFIX`, where it finds them."""
    prefix = Path(OWN_PREFIX)
    program = Path(OWN_PYTHON)
    name = program.name
    if not program.is_file():
        raise TaskProblem(f"the root of sandboxes has no Python of {OLDEST[0]}.{OLDEST[1]} or newer, nor has {prefix}")
    entries = [Entry(path=f"bin/{name}", contents=program.read_bytes(), mode=0o755)]
    for library in (prefix / "lib").glob(f"lib{name}*.so*"):
        entries.append(Entry(path=f"lib/{library.name}", contents=library.read_bytes(), mode=0o755))
    for path in (prefix / "lib" / name).rglob("*"):
        inside = path.relative_to(prefix / "lib" / name)
        is_left_out = inside.parts[0] in NOT_OF_A_LIBRARY or inside.parts[0].startswith("config-")
        if not is_left_out and "__pycache__" not in inside.parts and path.is_file():
            entries.append(Entry(path=f"lib/{name}/{inside.as_posix()}", contents=path.read_bytes(), mode=0o755))
    return entries
