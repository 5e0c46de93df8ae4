"""Rows of SWE-bench's form as coding tasks: SWE-bench, SWE-Gym, SWE-rebench and SWE-smith, as JSONL or Parquet.

A row names a commit of a repository, a problem, a patch that solves it, and a patch that brings the hidden tests with
the ids of those that must pass. SWE-smith has no patch of tests: its `patch` puts a bug into the repository, which the
agent finds there, and the solution is its reverse.

A repository comes from a container image (a column of the row, or `swe.image`) or from a folder or archive
(`swe.repository`). Tests run by pytest, or by a runner of `RUNNERS`; a row of another runner is refused.
"""

from __future__ import annotations

import json
import re
import shlex
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from goaly.base.config.settings import Section, Settings
from goaly.base.config.wording import show
from goaly.grading.patch_reader import read_patch
from goaly.grading.published_ids import problem_of
from goaly.grading.reverse_patch import reversed_patch
from goaly.grading.task import CodingTask, Repository, Runner, TaskProblem, TestSuite
from goaly.sandboxes.sandbox import DEFAULTS

IMAGE_COLUMNS = ("docker_image", "image_name", "image")
KEPT = ("repo", "version", "created_at", "difficulty", "environment_setup_commit", "license_name")
"""Columns that become metadata of the task."""
_NOT_USED = (
    *("hints_text", "issue_numbers", "pull_number", "issue_url", "pr_url", "commit_urls", "meta", "text", "language"),
    *("environment", "requirements", "FAIL_TO_FAIL", "PASS_TO_FAIL", "all_hints_text", "commit_url", "commit_name"),
    *("interface", "dataset", "rp", "strategy"),
)
"""Published columns without use here: what was said later, and how the images were built."""
PYTHON_OF_IMAGES = "/opt/miniconda3/envs/testbed/bin"
KNOWN = {
    *("instance_id", "base_commit", "patch", "test_patch", "problem_statement", "FAIL_TO_PASS", "PASS_TO_PASS"),
    *("install_config", *IMAGE_COLUMNS, *KEPT, *_NOT_USED),
}
OF_OTHERS = {
    "expected_output_json": "R2E-Gym's rows have no test ids",
    "image_assets": "SWE-bench Multimodal's tests are JavaScript's",
    "before_repo_set_cmd": "SWE-bench Pro's tests are run by commands of each repository",
    "fix_patch": "Multi-SWE-bench's tests are run by commands of each language",
}
"""Columns that show another form, and why it is refused."""

RUNNERS: Mapping[str, Runner] = {"django/django": "django", "sympy/sympy": "sympy"}
"""The runner of a repository whose test ids are not pytest's."""
_TEST_FILES = {"django": re.compile(r"tests/.*\.py"), "sympy": re.compile(r"sympy/.*\btest_\w+\.py")}
_SWE_SMITH = "swesmith"


class SweSettings(Settings):
    """Where the repositories of SWE-bench's form are."""

    image: str | None = None
    """Container image of an instance whose row names none. `{id}`, `{owner}`, `{name}`, `{repo}`, `{version}` and
    `{commit}` are filled in; of the id `django__django-11099`, `{owner}` is `django` and `{name}` is `django-11099`.
    SWE-bench: `swebench/sweb.eval.x86_64.{owner}_1776_{name}`; SWE-Gym: `xingyaoww/sweb.eval.x86_64.{owner}_s_{name}`.
    It becomes lower case."""
    repository: str | None = None
    """Folder or archive with a clone of an instance's repository, which is laid into the workdir and set to its commit,
    such as `clones/{repo}`; with the same words as `image`. null: the image has it."""
    workdir: str = "/testbed"
    """The repository's folder in the sandbox."""
    python: str | None = None
    """Folder that comes first in PATH: the one with the Python that has what the repository needs. null: in an image
    `/opt/miniconda3/envs/testbed/bin`, where published images have it, and none in `root`."""
    other_columns: tuple[str, ...] = ()
    """Columns that are in no published set; they become metadata. Without them here they are an error."""

    def _problems(self, at: Section) -> Iterator[str]:
        for key in ("image", "repository"):
            for word in _words(getattr(self, key) or ""):
                if word not in _WORDS:
                    yield f"{getattr(at, key)}: {{{word}}} must be one of {', '.join(f'{{{one}}}' for one in _WORDS)}"
        if not self.workdir.startswith("/"):
            yield f"{at.workdir}: must be an absolute path"


MOST_PATCH_BYTES = 1 << 28
_WORDS = ("id", "owner", "name", "repo", "version", "commit")


def _words(template: str) -> list[str]:
    try:
        return [name for _, name, *_ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:  # a brace without its other one
        return [str(error)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweRow:
    """A row whose fields have been checked."""

    where: Any
    """Where it stands, for errors."""
    id: str
    repo: str
    base_commit: str | None
    problem: str
    patch: str
    tests: TestSuite
    image: str | None
    injects: bool
    """Whether `patch` is a bug that belongs to the repository, as SWE-smith's are."""
    metadata: Mapping[str, str]

    def task(self, settings: SweSettings, root: Path | None = None) -> CodingTask:
        """The task, in its image, or with `root` in that folder in place of any image."""
        words = {"id": self.id, "repo": self.repo, "commit": self.base_commit or ""}
        owner, _, name = self.id.partition("__")
        words |= {"owner": owner, "name": name, "version": self.metadata.get("version", "")}
        image = None if root is not None else self.image or (settings.image and settings.image.format(**words).lower())
        path = None if settings.repository is None else Path(settings.repository.format(**words))
        if path is None and image is None:
            lacks = "has no column " + " or ".join(f"`{column}`" for column in IMAGE_COLUMNS[:2])
            raise TaskProblem(f"{self.where}: {self.id}: {lacks}; set swe.image or swe.repository")
        if path is not None and not path.exists():
            raise TaskProblem(f"{self.where}: {self.id}: swe.repository: there is no {path}")
        python = settings.python or (PYTHON_OF_IMAGES if image is not None else None)
        return CodingTask(
            id=self.id,
            problem=self.problem,
            tests=self.tests,
            repository=Repository(path=path, base_commit=self.base_commit),
            workdir=settings.workdir,
            root=root,
            image=image,
            environment={} if python is None else {"PATH": f"{python}:{DEFAULTS['PATH']}"},
            setup=(_applying(self.patch),) if self.injects else (),
            solution=reversed_patch(self.patch, most_bytes=MOST_PATCH_BYTES) if self.injects else self.patch,
            metadata=self.metadata,
        )


def _applying(patch: str) -> str:
    return f"printf %s {shlex.quote(patch)} | git -c safe.directory='*' apply -"


@dataclass(frozen=True, slots=True)
class _At:
    """The place and the id of a row, which becomes text in errors only: to count lines takes time."""

    where: Any
    id: str

    def __str__(self) -> str:
        return f"{self.where}: {self.id}"


def read_row(record: Mapping[str, Any], where: Any, other_columns: tuple[str, ...] = ()) -> SweRow:
    """The row of this record; a TaskProblem that begins with `where` names the column, its value and what is right."""
    id = _text(record, "instance_id", where)
    at = _At(where, id)
    for column, why in OF_OTHERS.items():
        if record.get(column) is not None:
            raise TaskProblem(f"{at}: `{column}`: {why}, which cannot be run here")
    if unknown := [key for key in record if key not in KNOWN and key not in other_columns]:
        of_none = "is" if len(unknown) == 1 else "are"
        names = ", ".join(f"`{key}`" for key in unknown)
        raise TaskProblem(f"{at}: {names} {of_none} no known column; name others in swe.other_columns")
    repo, patch = _text(record, "repo", at), _text(record, "patch", at)
    image = next((_text(record, key, at) for key in IMAGE_COLUMNS if record.get(key) is not None), None)
    injects = record.get("test_patch") is None and (repo.startswith(f"{_SWE_SMITH}/") or _SWE_SMITH in (image or ""))
    test_patch = "" if injects else _text(record, "test_patch", at, empty=True)
    problem = _text(record, "problem_statement", at)
    kept = {key: record[key] for key in (*KEPT, *other_columns) if record.get(key) is not None}
    return SweRow(
        where=where,
        id=id,
        repo=repo,
        base_commit=None if injects else _text(record, "base_commit", at),
        problem=problem,
        patch=patch,
        tests=_tests(record, at, repo, patch, test_patch),
        image=image,
        injects=injects,
        metadata={key: value if isinstance(value, str) else str(value) for key, value in kept.items()},
    )


def _tests(record: Mapping[str, Any], at: Any, repo: str, patch: str, test_patch: str) -> TestSuite:
    fail, keep = _ids(record, "FAIL_TO_PASS", at), _ids(record, "PASS_TO_PASS", at)
    if not fail:
        raise TaskProblem(f"{at}: `FAIL_TO_PASS`=[]: must name a test, or nothing tells whether it is solved")
    if both := sorted(set(fail) & set(keep)):
        raise TaskProblem(f"{at}: `PASS_TO_PASS` has {both[0]!r}, which is in `FAIL_TO_PASS`, too")
    changed = {key: _paths(text, key, at) for key, text in (("patch", patch), ("test_patch", test_patch))}
    ids = (*fail, *keep)
    runner = RUNNERS.get(repo, "pytest") if any(problem_of(one, "pytest") for one in ids) else "pytest"
    config = record.get("install_config")
    command = str(config.get("test_cmd") or "") if isinstance(config, Mapping) else ""
    if command and "pytest" not in command and runner == "pytest":
        raise TaskProblem(f"{at}: its tests run by {command!r}; must run by pytest")
    for one in ids:
        if (problem := problem_of(one, runner)) is not None:
            raise TaskProblem(f"{at}: the test id {one!r} of {repo}: {problem}")
    if runner != "pytest":
        files = {path for path in changed["test_patch"] if _TEST_FILES[runner].fullmatch(path)}
        if not files:
            raise TaskProblem(f"{at}: `test_patch` changes no file of tests; must name those that {repo}'s runner runs")
        return TestSuite(
            fail_to_pass=fail,
            pass_to_pass=keep,
            patch=test_patch,
            runner=runner,
            test_files=tuple(sorted(files)),
        )
    files = {one.partition("::")[0] for one in ids}
    return TestSuite(
        fail_to_pass=fail,
        pass_to_pass=keep,
        patch=test_patch,
        protected=tuple(sorted(files - changed["patch"] - changed["test_patch"])),
    )


def _paths(patch: str, key: str, at: Any) -> set[str]:
    """The paths of all files that a patch changes."""
    try:
        changes = read_patch(patch, most_bytes=MOST_PATCH_BYTES)
    except ValueError as error:
        raise TaskProblem(f"{at}: `{key}`: {error}") from None
    return {path for change in changes for path in (change.old_path, change.new_path) if path is not None}


def _text(record: Mapping[str, Any], key: str, at: Any, *, empty: bool = False) -> str:
    value = record.get(key)
    if isinstance(value, str) and (empty or value.strip()):
        return value
    if value is None:
        raise TaskProblem(f"{at}: `{key}` is missing; its columns are {', '.join(record)}")
    raise TaskProblem(f"{at}: `{key}`={show(value)}: must be a text{'' if empty else ' that is not empty'}")


def _ids(record: Mapping[str, Any], key: str, at: Any) -> tuple[str, ...]:
    """The test ids of a list, or of the JSON text of one, as published; one that comes twice counts once."""
    value = record.get(key)
    if value is None:
        raise TaskProblem(f"{at}: `{key}` is missing; its columns are {', '.join(record)}")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = value.strip()
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise TaskProblem(f"{at}: `{key}`={show(value)}: must be a list of test ids, or the JSON text of one")
    return tuple(dict.fromkeys(value))
