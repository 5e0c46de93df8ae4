"""A folder of Harbor's form as a coding task: `task.toml`, `instruction.md`, `environment`, `tests` and `solution`.

The agent works in the container of `environment`; then `tests/test.sh` runs in a fresh one with the agent's changes of
the working folder and the `artifacts`, and writes its reward. Every field is used or refused by its name: fields of
several containers, of steps, of accelerators and of other systems than Linux cannot be kept here.
"""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from goaly.base.config.settings import Settings
from goaly.base.config.wording import show
from goaly.grading.task import CodingTask, Repository, TaskProblem, TaskSeconds, TestScript
from goaly.sandboxes.contract import Limits

CONFIG, INSTRUCTION, ENVIRONMENT = "task.toml", "instruction.md", "environment"
VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")

_FIELDS = {
    "": "schema_version version task metadata verifier agent environment solution source artifacts steps "
    "multi_step_reward_strategy",
    "task": "name version description authors keywords",
    "agent": "timeout_sec user network_mode allowed_hosts",
    "verifier": "timeout_sec env user network_mode allowed_hosts environment_mode environment collect",
    "environment": "build_timeout_sec docker_image os cpus memory_mb memory storage_mb storage gpus gpu_types tpu "
    "mcp_servers env skills_dir healthcheck workdir network_mode allowed_hosts allow_internet",
    "solution": "env",
}
"""The published fields of each section."""

_REFUSED = {
    "steps": "a task of several steps",
    "multi_step_reward_strategy": "a task of several steps",
    "agent.user": "the agent as another user; its commands run as coding.user",
    "verifier.user": "the tests as another user; they run as a user that the agent never was",
    "verifier.environment": "a container of the verifier's own; tests run in a fresh copy of the task's",
    "verifier.collect": "commands between the agent and the tests",
    "environment.gpus": "GPUs in a sandbox",
    "environment.gpu_types": "GPUs in a sandbox",
    "environment.tpu": "TPUs in a sandbox",
    "environment.mcp_servers": "MCP servers beside the sandbox",
    "environment.skills_dir": "skills, which belong to single agents",
    "environment.healthcheck": "services that have to come up",
}
"""Fields that ask for what sandboxes here don't have. A field that asks for none of it, such as `gpus = 0`, is fine."""

_FILES_OF_OTHERS = {
    "environment/docker-compose.yaml": "several containers",
    "environment/docker-compose.yml": "several containers",
    "environment/singularity-compose.yaml": "several containers",
    "tests/test.bat": "Windows",
    "trajectory.json": "a chat that goes on",
    "steps": "a task of several steps",
}

_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_SIZES = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}


class HarborSettings(Settings):
    """How tasks of Harbor's form run here."""

    offline: bool = False
    """Take tasks that ask for network (`network_mode` other than no-network, or `allow_internet`), whose agents and
    tests reach no host here all the same. Tests that install packages then fail."""


def is_harbor(folder: Path) -> bool:
    """Whether a folder with a `task.toml` is of Harbor's form, not of our own."""
    return any((folder / name).exists() for name in (INSTRUCTION, ENVIRONMENT, "steps"))


def read_harbor(folder: Path, settings: HarborSettings | None = None, *, root: Path | None = None) -> CodingTask:
    """The task of a folder; a TaskProblem names the file, the field, its value, and why it cannot be kept.

    With `root` that folder is the sandbox's root in place of the image: it must have what the Dockerfile installs. The
    files beside the Dockerfile are then laid into the working folder."""
    config = _Config(folder)
    config.refuse((settings or HarborSettings()).offline)
    environment = folder / ENVIRONMENT
    image = config.get("environment.docker_image", str)
    if image is None and root is None:
        if not (environment / "Dockerfile").is_file():
            raise TaskProblem(f"{folder}: needs environment/Dockerfile, or environment.docker_image in {CONFIG}")
        image = str(environment)
    tests = _files(folder / "tests")
    if "test.sh" not in tests:
        raise TaskProblem(f"{folder}: needs tests/test.sh, which writes the reward")
    solution = _files(folder / "solution")
    script = solution.get("solve.sh")
    return CodingTask(
        id=config.id,
        problem=config.text(INSTRUCTION),
        tests=TestScript(files=tests, environment=config.variables("verifier.env")),
        repository=Repository(path=environment if root is not None and environment.is_dir() else None),
        workdir=config.workdir,
        root=root,
        image=None if root is not None else image,
        environment=config.variables("environment.env"),
        artifacts=config.artifacts(),
        solution=None if script is None else _with_variables(script.decode(), config.variables("solution.env")),
        solution_files={name: contents for name, contents in solution.items() if name != "solve.sh"},
        limits=config.limits(),
        seconds=config.seconds(),
        metadata=config.metadata(),
    )


def id_of(folder: Path) -> str:
    """The task's name, or that of its folder if its `task.toml` cannot be read."""
    try:
        return _Config(folder).id
    except TaskProblem:
        return folder.resolve().name


def summary_of(folder: Path) -> tuple[str, str, dict[str, str]]:
    """The id, the problem, and the fields that describe the task of a folder."""
    config = _Config(folder)
    return config.id, config.text(INSTRUCTION), config.metadata()


class _Config:
    """The checked `task.toml` of a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.file = folder / CONFIG
        try:
            self._values = tomllib.loads(self.text(CONFIG))
        except tomllib.TOMLDecodeError as error:
            raise TaskProblem(f"{self.file}: not TOML: {error}") from None
        self._check_keys()

    @property
    def id(self) -> str:
        return self.get("task.name", str) or self.folder.resolve().name

    def text(self, name: str) -> str:
        """The contents of a file of the folder that must not be empty."""
        try:
            text = (self.folder / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TaskProblem(f"{self.folder / name}: cannot be read: {error}") from None
        if not text.strip():
            raise TaskProblem(f"{self.folder / name}: is empty")
        return text

    def get(self, path: str, kind: Any) -> Any:
        """The value of a dotted field, of this type; None if it is not there."""
        value: Any = self._values
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        number = kind is float and isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not isinstance(value, kind) and not number:
            raise self.problem(path, value, f"must be of type {kind.__name__}")
        return value

    def problem(self, path: str, value: Any, what: str) -> TaskProblem:
        return TaskProblem(f"{self.file}: {path}={show(value)}: {what}")

    def _check_keys(self) -> None:
        for section, known in _FIELDS.items():
            table = self._values if not section else self.get(section, dict) or {}
            if unknown := [key for key in table if key not in known.split()]:
                prefix = f"{section}." if section else ""
                raise self.problem(prefix + unknown[0], table[unknown[0]], "Harbor has no such field")
        version = self.get("schema_version", str) or self.get("version", str)
        if version is not None and version not in VERSIONS:
            raise self.problem("schema_version", version, f"must be one of {', '.join(VERSIONS)}")

    def refuse(self, offline: bool) -> None:
        """Raise a TaskProblem if a field asks for what cannot be kept."""
        for name, what in _FILES_OF_OTHERS.items():
            if (self.folder / name).exists():
                raise TaskProblem(f"{self.folder / name}: {what} cannot be had here")
        for path, what in _REFUSED.items():
            if value := self.get(path, object):
                raise self.problem(path, value, f"asks for {what}, which cannot be had here")
        if (system := self.get("environment.os", str) or "linux").lower() != "linux":
            raise self.problem("environment.os", system, "must be linux")
        if (mode := self.get("verifier.environment_mode", str)) not in (None, "shared", "separate"):
            raise self.problem("verifier.environment_mode", mode, "must be shared or separate")
        for path in ("environment.allow_internet", *(f"{one}.network_mode" for one in ("environment", *_ROLES))):
            value = self.get(path, object)
            if value not in (None, False, "no-network") and not offline:
                what = "asks for network, which agents and tests never have here; coding.tasks.harbor.offline=true"
                raise self.problem(path, value, f"{what} takes the task without it")

    @property
    def workdir(self) -> str:
        """The folder of `environment.workdir`, or the last WORKDIR of the Dockerfile."""
        if (named := self.get("environment.workdir", str)) is not None:
            return named
        dockerfile = self.folder / ENVIRONMENT / "Dockerfile"
        here = ""
        for line in dockerfile.read_text().splitlines() if dockerfile.is_file() else ():
            if found := re.fullmatch(r"\s*WORKDIR\s+(\S.*?)\s*", line, re.IGNORECASE):
                here = os.path.normpath(os.path.join(here or "/", found[1].strip("\"'")))
            elif re.match(r"\s*FROM\s", line, re.IGNORECASE):
                here = ""
        if not here or "$" in here:
            why = f"its Dockerfile has WORKDIR {here}" if here else "its Dockerfile has no WORKDIR"
            raise TaskProblem(f"{self.file}: environment.workdir must name the folder that the agent works in; {why}")
        return here

    def variables(self, path: str) -> dict[str, str]:
        """Variables of a field; `${NAME}` and `${NAME:-default}` in them are this process's."""
        found = {}
        for name, value in (self.get(path, dict) or {}).items():
            if not isinstance(value, str):
                raise self.problem(f"{path}.{name}", value, "must be a text")
            for word, default in _VARIABLE.findall(value):
                if word not in os.environ and f"${{{word}:-" not in value:
                    raise self.problem(f"{path}.{name}", value, f"the variable {word} is not set here")
                value = value.replace(f"${{{word}:-{default}}}", os.environ.get(word) or default)
                value = value.replace(f"${{{word}}}", os.environ.get(word, ""))
            found[name] = value
        return found

    def artifacts(self) -> tuple[str, ...]:
        """The paths that go over to the tests beside the working folder."""
        found = []
        for number, entry in enumerate(self.get("artifacts", list) or ()):
            given: Mapping[str, Any] = {"source": entry} if isinstance(entry, str) else entry
            for key, value in given.items():
                at = f"artifacts[{number}].{key}"
                if key not in ("source", "destination", "exclude", "service"):
                    raise self.problem(at, value, "Harbor has no such field")
                if key in ("exclude", "service", "destination") and value and (key, value) != ("service", "main"):
                    raise self.problem(at, value, "cannot be kept here: the whole path goes to the tests as it is")
            source = given.get("source")
            if not isinstance(source, str) or not source or ".." in source.split("/"):
                raise self.problem(f"artifacts[{number}].source", source, "must be a path without `..`")
            found.append(os.path.join(self.workdir, source))
        return tuple(found)

    def limits(self) -> Limits | None:
        given: dict[str, Any] = {
            "cpus": self.get("environment.cpus", float),
            "memory_mib": self._mib("memory"),
            "disk_mib": self._mib("storage"),
        }
        given = {key: value for key, value in given.items() if value is not None}
        for key, value in given.items():
            if not value > 0:
                raise TaskProblem(f"{self.file}: environment: {key}={show(value)}: must be above 0")
        return Limits(**given) if given else None

    def _mib(self, name: str) -> int | None:
        """A size in MiB; older tasks write it as `2G`."""
        size, text = self.get(f"environment.{name}_mb", int), self.get(f"environment.{name}", str)
        if text is None:
            return size
        if size is not None or not (found := re.fullmatch(r"\s*([\d.]+)\s*([GMK])\s*", text.upper())):
            raise self.problem(f"environment.{name}", text, f"must be a size as 2G or 512M, without {name}_mb")
        return int(float(found[1]) * _SIZES[found[2]])

    def seconds(self) -> TaskSeconds:
        given = {
            "setup": self.get("environment.build_timeout_sec", float),
            "agent": self.get("agent.timeout_sec", float),
            "grading": self.get("verifier.timeout_sec", float),
        }
        for key, value in given.items():
            if value is not None and not value > 0:
                raise TaskProblem(f"{self.file}: the time limit of {key} is {show(value)} s, must be above 0")
        return TaskSeconds(**{key: float(value) for key, value in given.items() if value is not None})

    def metadata(self) -> dict[str, str]:
        """The fields that describe the task."""
        about = {**(self.get("task", dict) or {}), **(self.get("metadata", dict) or {})}
        about |= {"source": source} if (source := self.get("source", str)) is not None else {}
        return {key: value if isinstance(value, str) else show(value) for key, value in about.items() if key != "name"}


_ROLES = ("agent", "verifier")


def _files(folder: Path) -> dict[str, bytes]:
    """The files of a folder by their relative paths; none if there is no folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def _with_variables(script: str, variables: Mapping[str, str]) -> str:
    """The script with these variables set at its beginning."""
    if not variables:
        return script
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    first, end, rest = script.partition("\n")
    return f"{first}{end}{exports}{rest}" if first.startswith("#!") else exports + script
