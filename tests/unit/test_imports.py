"""Which modules may import which: no cycles in `goaly`, and only tests of `bench` import it. No two classes of `goaly`
have the same name."""

import ast
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.documents

ROOT = Path(__file__).parents[2]


def modules() -> dict[str, Path]:
    source = ROOT / "src"
    names = {".".join(path.relative_to(source).with_suffix("").parts): path for path in source.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


def imports(path: Path, *, annotations: bool = True) -> set[str]:
    """What a file imports anywhere, also inside functions, and for `annotations` only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    left_out = set() if annotations else {inner for node in typing for inner in ast.walk(node)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node not in left_out:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return found


@pytest.mark.parametrize("annotations", [False, True], ids=["code", "annotations"])
def test_no_module_imports_itself_by_way_of_others(annotations: bool):
    known = modules()
    loose = ("goaly.generate.", "goaly.prompts.")  # where two files name each other's classes in annotations
    graph = {
        name: {
            other
            for other in imports(path, annotations=annotations and not name.startswith(loose))
            if other in known and known[other].name != "__init__.py"
        }
        - {name}
        for name, path in known.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from error


def test_a_class_name_means_one_thing():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in modules().values()]
    names = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == set()


def test_a_test_file_has_a_name_of_its_own():
    """Tests are imported by their file's name alone: of two with one name, one would not run."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert {name for name, count in names.items() if count > 1} == set()


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
