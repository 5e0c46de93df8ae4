"""Which modules may import which: no cycles in `goaly`, and only tests of `bench` import it."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRANSPORTS = "goaly.weights."
"""Not checked: transports import `transport.py`, which imports them when the settings name them."""


def modules() -> dict[str, Path]:
    source = ROOT / "src"
    names = {".".join(path.relative_to(source).with_suffix("").parts): path for path in source.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


def imports(path: Path) -> set[str]:
    """What a file imports anywhere, also inside functions, except for annotations only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    for_annotations = {inner for node in typing for inner in ast.walk(node)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node not in for_annotations:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return found


def test_no_module_imports_itself_by_way_of_others():
    known = modules()
    graph = {
        name: {other for other in imports(path) if other in known and known[other].name != "__init__.py"} - {name}
        for name, path in known.items()
        if not name.startswith(TRANSPORTS)
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from error


def test_only_tests_of_bench_import_bench():
    users = {
        str(path.relative_to(ROOT / "tests"))
        for path in (ROOT / "tests").rglob("*.py")
        if any(name.partition(".")[0] == "bench" for name in imports(path))
    }
    allowed = {
        "actors/test_lagged.py",
        "loop/test_chaos.py",
        *(name for name in users if name.startswith("unit/benchmarks/")),
    }
    assert users - allowed == set()
