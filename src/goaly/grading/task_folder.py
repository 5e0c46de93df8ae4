"""Reads our own format of tasks: a folder with the repository, its hidden tests and a solution.

task.toml         [task] problem (or a file problem.md), fail_to_pass, pass_to_pass, setup, safe_to_repeat, ...
repository/       what the agent finds
hidden_tests/     files that are laid over the repository when it is graded, with the same relative paths
solution.patch    a change that solves the task, in the form of `git diff`
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from math import inf
from pathlib import Path
from typing import Any, Final

from goaly.base.errors import ConfigError
from goaly.grading.task import CodingTask, Repository, TaskProblem, TaskSeconds, TestSuite
from goaly.sandboxes.contract import Limits
from goaly.sandboxes.files import folder_entries

TEXTS: Final = ("problem", "root", "image")
LISTS: Final = ("fail_to_pass", "pass_to_pass", "protected", "setup", "setup_hosts", "artifacts")
KEYS: Final = (*TEXTS, *LISTS, "safe_to_repeat")
SECTIONS: Final = ("task", "seconds", "limits", "environment", "metadata")


def read_task(folder: Path, *, without_ids: bool = False) -> CodingTask:
    """The task of a folder, named after it; TaskProblem if a file or a value is wrong. With `without_ids` the
    ids of its tests are left out."""
    return _TaskFolder(folder).task(without_ids)


class _TaskFolder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "task.toml"

    def task(self, without_ids: bool) -> CodingTask:
        try:
            sections = tomllib.loads(self.file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise TaskProblem(f"{self.file}: there is no such file") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise TaskProblem(f"{self.file}: not a TOML file: {error}") from None
        self.known("", sections, SECTIONS)
        for name, section in sections.items():
            if not isinstance(section, dict):
                self.wrong(name, section, "a section such as [task]")
        given = sections.get("task", {})
        self.known("task.", given, KEYS)
        texts = {name: self.text(f"task.{name}", given.get(name)) for name in TEXTS}
        lists = {name: self.texts(f"task.{name}", given.get(name, [])) for name in LISTS}
        if without_ids:
            lists |= dict.fromkeys(("fail_to_pass", "pass_to_pass"), ())
        elif not lists["fail_to_pass"]:
            self.wrong(
                "task.fail_to_pass",
                given.get("fail_to_pass"),
                "the ids of at least one test; `validate --write` finds them",
            )
        safe_to_repeat = given.get("safe_to_repeat", False)
        if not isinstance(safe_to_repeat, bool):
            self.wrong("task.safe_to_repeat", safe_to_repeat, "true or false")
        repository = self.folder / "repository"
        if not repository.is_dir():
            raise TaskProblem(f"{repository}: there is no such folder")
        suite = TestSuite(
            fail_to_pass=self.ids("fail_to_pass", lists["fail_to_pass"]),
            pass_to_pass=self.ids("pass_to_pass", lists["pass_to_pass"]),
            files=self.hidden_tests(),
            protected=lists["protected"],
        )
        self.check_tests(suite, repository)
        limits = sections.get("limits", {})
        return CodingTask(
            id=self.folder.name,
            problem=self.problem(texts["problem"]),
            tests=suite,
            repository=Repository(path=repository),
            root=Path(texts["root"]) if texts["root"] else None,
            image=texts["image"],
            environment=self.words("environment", sections.get("environment", {})),
            setup=lists["setup"],
            setup_hosts=lists["setup_hosts"],
            artifacts=lists["artifacts"],
            solution=self.optional("solution.patch"),
            limits=self.limits(limits) if limits else None,
            seconds=self.seconds(sections.get("seconds", {})),
            safe_to_repeat=safe_to_repeat,
            metadata=self.words("metadata", sections.get("metadata", {})),
        )

    def wrong(self, key: str, value: Any, right: str) -> None:
        raise TaskProblem(f"{self.file}: {key}={value!r}: must be {right}")

    def known(self, prefix: str, given: Mapping[str, Any], names: tuple[str, ...]) -> None:
        for name in given:
            if name not in names:
                raise TaskProblem(f"{self.file}: {prefix}{name}: no such key; there are {', '.join(names)}")

    def text(self, key: str, value: Any) -> str | None:
        if value is not None and not (isinstance(value, str) and value.strip()):
            self.wrong(key, value, "a text")
        return value

    def texts(self, key: str, value: Any) -> tuple[str, ...]:
        if not (isinstance(value, list) and all(isinstance(one, str) and one for one in value)):
            self.wrong(key, value, "a list of texts")
        return tuple(value)

    def words(self, key: str, given: Mapping[str, Any]) -> dict[str, str]:
        for name, value in given.items():
            if not isinstance(value, str):
                self.wrong(f"{key}.{name}", value, "a text")
        return dict(given)

    def limits(self, given: Mapping[str, Any]) -> Limits:
        try:
            return Limits(**given)
        except ConfigError as error:
            raise TaskProblem(f"{self.file}: {str(error).replace('Limits.', 'limits.')}") from None

    def seconds(self, given: Mapping[str, Any]) -> TaskSeconds:
        self.known("seconds.", given, tuple(field.name for field in fields(TaskSeconds)))
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
                self.wrong(f"seconds.{name}", value, "a number above 0")
        return TaskSeconds(**given)

    def ids(self, key: str, ids: tuple[str, ...]) -> tuple[str, ...]:
        for one in ids:
            if "::" not in one or one.startswith("/") or ".." in one.partition("::")[0].split("/"):
                self.wrong(f"task.{key}", one, "ids such as tests/test_x.py::test_y, relative to repository/")
        if len(set(ids)) < len(ids):
            self.wrong(f"task.{key}", list(ids), "a list without repeated ids")
        return ids

    def check_tests(self, suite: TestSuite, repository: Path) -> None:
        both = set(suite.fail_to_pass) & set(suite.pass_to_pass)
        if both:
            raise TaskProblem(f"{self.file}: {sorted(both)[0]}: is in fail_to_pass and in pass_to_pass")
        for one in (*suite.fail_to_pass, *suite.pass_to_pass):
            path = one.partition("::")[0]
            if path not in suite.files and not (repository / path).is_file():
                raise TaskProblem(f"{self.file}: {one}: {path} is neither in hidden_tests/ nor in repository/")

    def hidden_tests(self) -> dict[str, bytes]:
        entries = folder_entries(self.folder / "hidden_tests")
        for entry in entries:
            if entry.kind == "link":
                raise TaskProblem(f"{self.folder / 'hidden_tests' / entry.path}: a link; must be a file")
        return {entry.path: entry.contents for entry in entries if entry.kind == "file" and _is_kept(entry.path)}

    def problem(self, given: str | None) -> str:
        text = self.optional("problem.md")
        if (given is None) == (text is None):
            raise TaskProblem(f"{self.file}: give the problem once: as task.problem, or as the file problem.md")
        problem = (given or text or "").strip()
        if not problem:
            raise TaskProblem(f"{self.folder / 'problem.md'}: is empty")
        return problem

    def optional(self, name: str) -> str | None:
        path = self.folder / name
        try:
            return path.read_bytes().decode() if path.exists() else None
        except UnicodeDecodeError as error:
            raise TaskProblem(f"{path}: not a text in UTF-8: {error}") from None


def _is_kept(path: str) -> bool:
    """Not what Python or pytest left there when someone ran the tests in place."""
    return not any(part in ("__pycache__", ".pytest_cache") for part in path.split("/"))
