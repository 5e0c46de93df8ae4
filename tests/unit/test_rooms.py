"""The rooms under src/goaly: their order, their number and their size, and no circle of imports in a room.

Imports inside functions and under TYPE_CHECKING count. The exceptions below may only become fewer: the tests fail when
one of them is gone from the code.
"""

import ast
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src/goaly"
ORDER = (
    *("base", "trajectory", "prompts", "losses", "reward", "backlog", "weights", "numerics", "models", "generate"),
    *("train", "environments", "sandboxes", "grading", "agents", "rollout", "coding"),
    *("journal", "live", "simulator", "plan", "run", "parity", "replay"),
)
"""Each room may import those before it."""
MOST_ROOMS = 21
MOST_LINES_OF_A_ROOM = 4000
MOST_LINES_OF_A_FILE = 400

ARROWS_BACK: set[tuple[str, str]] = set()
"""Files, and the later rooms that they still import."""
CIRCLES = {"generate"}
"""Rooms whose files still import each other in a circle."""
LARGE_ROOMS = {"agents", "sandboxes"}
LARGE_FILES: set[str] = set()


def name_of(file: Path) -> str:
    """The file's path under src/goaly."""
    return str(file.relative_to(SOURCE))


def room_of(name: str) -> str:
    """The room of a file or a dotted module, given without `goaly`; the files of parity are one room."""
    room = name.replace(".", "/").partition("/")[0]
    return "parity" if room.startswith("parity_") else room


@cache
def imports(file: Path) -> frozenset[str]:
    """The modules of goaly that the file imports, as paths under src/goaly."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{file} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    paths = set()
    for dotted in (one for one in found if one.startswith("goaly.")):
        path = SOURCE.joinpath(*dotted.split(".")[1:])
        candidates = (
            path.with_suffix(".py"),
            path / "__init__.py",
            path.parent.with_suffix(".py"),
            path.parent / "__init__.py",
        )
        paths.add(next(name_of(one) for one in candidates if one.exists()))
    return frozenset(paths)


FILES = sorted(SOURCE.rglob("*.py"))


def lines_of(file: Path) -> int:
    return len(file.read_text().splitlines())


def test_a_room_imports_only_rooms_before_it():
    back = {
        (name_of(file), room_of(other))
        for file in FILES
        for other in imports(file)
        if name_of(file) != "__init__.py"
        if ORDER.index(room_of(other.removesuffix(".py"))) > ORDER.index(room_of(name_of(file).removesuffix(".py")))
    }
    assert back == ARROWS_BACK


def test_the_files_of_a_room_do_not_import_each_other_in_a_circle():
    rooms: dict[str, dict[str, frozenset[str]]] = defaultdict(dict)
    for file in FILES:
        rooms[room_of(name_of(file).removesuffix(".py"))][name_of(file)] = imports(file)
    circles = {room: found for room, files in rooms.items() if (found := circle(files))}
    assert circles.keys() == CIRCLES, circles


def circle(graph: dict[str, frozenset[str]]) -> list[str]:
    """The nodes of one circle in the graph; empty if there is none."""
    try:
        TopologicalSorter({node: after & graph.keys() for node, after in graph.items()}).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_rooms_are_few_and_rooms_and_files_are_small():
    assert len([folder for folder in SOURCE.iterdir() if any(folder.rglob("*.py"))]) <= MOST_ROOMS
    sizes: dict[str, int] = defaultdict(int)
    for file in FILES:
        sizes[room_of(name_of(file).removesuffix(".py"))] += lines_of(file)
    assert {room for room, lines in sizes.items() if lines > MOST_LINES_OF_A_ROOM} == LARGE_ROOMS
    assert {name_of(file) for file in FILES if lines_of(file) > MOST_LINES_OF_A_FILE} == LARGE_FILES
