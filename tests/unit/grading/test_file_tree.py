"""The clean files of a task, which several attempts read at the same time."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from goaly.grading.file_tree import FileTree
from goaly.sandboxes.contract import Entry

FILES = {f"{name}.txt": str(name).encode() * (50 + name) for name in range(200)}


@pytest.fixture
def busy_threads() -> Iterator[None]:
    """Threads that are interrupted everywhere."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("busy_threads")
def test_threads_that_read_a_tree_at_once_get_each_file_whole():
    tree = FileTree([Entry(path=path, contents=contents) for path, contents in FILES.items()])

    def wrong(number: int) -> list[str]:
        return [
            path
            for path in sorted(FILES, key=lambda path: (hash(path) * number) % 997)
            if tree[path].contents != FILES[path]
        ]

    with ThreadPoolExecutor(8) as threads:
        assert not any(threads.map(wrong, range(1, 40)))
    tree.close()
