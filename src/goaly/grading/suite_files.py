"""The files of a suite's run: the agent's changes where they may be, and the task's tests and settings over them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final

from goaly.grading.canaries import with_canary, with_canary_method
from goaly.grading.file_tree import PLAIN, File
from goaly.grading.patch_apply import apply_patch
from goaly.grading.patch_reader import read_patch
from goaly.grading.published_ids import report_ids
from goaly.grading.pytest_settings import SETTINGS_FILES, pytest_settings
from goaly.grading.task import TestSuite

STEERS_TESTS: Final = re.compile(
    r"(^|/)(conftest\.py|\.?pytest\.(ini|toml)|(site|user)customize\.py|[^/]+\.pth|[^/]+\.(egg|dist)-info/.*)$"
)
"""Files that act on a run of tests whatever their folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteFiles:
    """Files that a run of the tests needs beside the clean ones."""

    changes: Mapping[str, File | None]
    """Contents by path, None for a deleted file."""
    test_files: tuple[str, ...]
    """The files that run."""
    ids: Mapping[str, tuple[str, ...]]
    """The ids in the report of each expected test."""
    canaries: Mapping[str, str]
    """The id of a test that must fail by its file."""
    own_files: tuple[str, ...]
    """Python files of the task's tests."""
    settings: str
    """pytest's, as an ini file."""


def suite_files(
    clean: Mapping[str, File], changed: Mapping[str, File | None], suite: TestSuite, chance: Random
) -> SuiteFiles:
    """The files of one run; each run has other canaries."""
    tests = dict(apply_patch(clean, read_patch(suite.patch, most_bytes=1 << 26)))
    for path, contents in suite.files.items():
        tests[path] = File(clean[path].mode if path in clean else PLAIN, contents)
    ids = report_ids(suite, {*clean, *tests})
    reported = [one for found in ids.values() for one in found]
    named = suite.test_files or tuple(dict.fromkeys(one.partition("::")[0] for one in reported))
    own = _OwnPaths([*tests, *named, *suite.protected])
    changes = {path: file for path, file in changed.items() if path not in own} | tests
    canaries = {}
    test_files = []
    for path in named:
        file = tests[path] if path in tests else clean.get(path)
        if file is None:
            continue
        test_files.append(path)
        names = [one.partition("::")[2].partition("[")[0] for one in reported if one.startswith(f"{path}::")]
        plant = with_canary_method if suite.runner == "django" else with_canary
        try:
            source, name = plant(file.contents.decode(), names, chance)
        except UnicodeDecodeError:
            continue
        changes[path] = File(file.mode, source.encode())
        canaries[path] = f"{path}::{name}"
    python = {path for path in (*clean, *tests) if path.endswith(".py") and path in own}
    settings = {name: tests.get(name) or clean.get(name) for name in SETTINGS_FILES}
    return SuiteFiles(
        changes=changes,
        test_files=tuple(test_files),
        ids=ids,
        canaries=canaries,
        own_files=tuple(sorted(python)),
        settings=pytest_settings({name: file for name, file in settings.items() if file is not None}),
    )


class _OwnPaths:
    """The paths that a task's tests own: an agent's change of one has no effect."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = set()
        self._folders = set()
        for path in paths:
            parts = path.rstrip("/").split("/")
            self._paths.add("/".join(parts))
            self._folders.update("/".join(parts[: n + 1]) for n in range(len(parts) - 1))
            top = next((n for n, part in enumerate(parts[:-1]) if part in ("test", "tests")), None)
            if top is not None:
                self._paths.add("/".join(parts[: top + 1]))

    def __contains__(self, path: str) -> bool:
        parts = path.split("/")
        above = ("/".join(parts[: n + 1]) for n in range(len(parts)))
        return bool(STEERS_TESTS.search(path)) or path in self._folders or any(one in self._paths for one in above)
