"""Invariant labels: each is defined in one docstring, and cited by a test that defends it.

A label is the name of its room and a number, as `weights-7: A digest ...`; older ones have two letters for the name.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.documents

ROOT = Path(__file__).parents[2]
ROOMS = "|".join(path.stem for path in (ROOT / "src" / "goaly").iterdir() if path.stem.isidentifier())
LABEL = re.compile(rf"\b(?:[A-Z]{{2}}|(?<![./-])(?:{ROOMS}))-[1-9]\d*\b(?![.-]\d)")
DEFINITION = re.compile(rf"\s*([A-Z]{{2}}-\d+(?=  \S)|(?:{ROOMS})-\d+(?=: \S))")


def lines(*tops: str) -> Iterator[tuple[str, str]]:
    """`(path, line)` of every line of source and documentation under these folders and files."""
    of_tasks = {*ROOT.glob("apps/coding/tasks/*/**/*")}
    for top in tops:
        for path in sorted({*(ROOT / top).rglob("*")} - of_tasks if (ROOT / top).is_dir() else [ROOT / top]):
            if path.suffix in (".py", ".md"):
                name = str(path.relative_to(ROOT))
                yield from ((name, line) for line in path.read_text(encoding="utf-8").splitlines())


def defined() -> dict[str, list[str]]:
    """The files that define each label."""
    found = defaultdict(list)
    for path, line in lines("src", "apps", "bench"):
        if match := DEFINITION.match(line):
            found[match[1]].append(path)
    return found


def cited(*tops: str) -> dict[str, set[str]]:
    """The files that cite each label outside of its definition."""
    found = defaultdict(set)
    for path, line in lines(*tops):
        definition = DEFINITION.match(line)
        code, _, comment = line.partition("#")
        for label in LABEL.findall(comment if '"' in code.replace('"""', "") else line):  # a name in quotes is none
            if definition is None or label != definition[1]:
                found[label].add(path)
    return found


def test_a_label_is_defined_once():
    assert {label: paths for label, paths in defined().items() if len(paths) > 1} == {}


def test_a_cited_label_is_defined():
    everywhere, known = cited("src", "apps", "bench", "tests", "docs", "README.md", "ARCHITECTURE.md"), defined()
    assert {label: paths for label, paths in everywhere.items() if label not in known} == {}


def test_a_label_is_cited_in_a_test():
    tests = cited("tests")
    assert {label for label in defined() if label not in tests} == set()
