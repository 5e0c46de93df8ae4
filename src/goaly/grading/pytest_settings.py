"""The pytest settings of a repository's clean files, as one ini file that a grading names on its command line.

An agent may change `pyproject.toml`, `setup.cfg` and `tox.ini` as its task needs; pytest does not read them.
"""

from __future__ import annotations

import configparser
import shlex
import tomllib
from collections.abc import Mapping
from typing import Any, Final

from goaly.grading.file_tree import File

TOML: Final = ("pytest.toml", ".pytest.toml")
INI: Final = ("pytest.ini", ".pytest.ini")
SETTINGS_FILES: Final = (*TOML, *INI, "pyproject.toml", "tox.ini", "setup.cfg")
"""In the order in which pytest looks for its settings."""
OF_LINES: Final = ("filterwarnings", "markers", "env", "log_file_format", "log_cli_format", "log_format")
"""Settings that are read line by line; others are split into words."""
NOT_HERE: Final = ("-n", "--numprocesses", "--dist", "--cov", "--no-cov", "--junit", "-x", "--exitfirst", "--maxfail")
"""Options of `addopts` that would run tests in other processes, or stop before the last one."""
WITH_VALUE: Final = ("-n", "--numprocesses", "--dist", "--maxfail", "--cov-report", "--cov-config", "--junitxml")


def pytest_settings(files: Mapping[str, File]) -> str:
    """The text of the ini file."""
    given = _given(files)
    lines = ["[pytest]"]
    for name, value in given.items():
        text = _without_processes(value) if name == "addopts" else value
        lines.append(f"{name} = " + text.strip().replace("\n", "\n    "))
    return "\n".join(lines) + "\n"


def _given(files: Mapping[str, File]) -> dict[str, str]:
    for name in TOML:
        if name in files:
            return _of_toml(_toml(files[name]).get("pytest", {}))
    for name in INI:
        if name in files:
            return _section(files[name], "pytest") or {}
    if "pyproject.toml" in files:
        tool = _toml(files["pyproject.toml"]).get("tool", {}).get("pytest", {})
        if tool:
            return _of_toml(tool.get("ini_options") or tool)
    for name, section in (("tox.ini", "pytest"), ("setup.cfg", "tool:pytest")):
        if name in files and (found := _section(files[name], section)) is not None:
            return found
    return {}


def _toml(file: File) -> dict[str, Any]:
    try:
        return tomllib.loads(file.contents.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        return {}


def _of_toml(given: Mapping[str, Any]) -> dict[str, str]:
    texts = {}
    for name, value in given.items():
        if isinstance(value, bool):
            texts[name] = str(value).lower()
        elif isinstance(value, list):
            words = [str(one) for one in value]
            texts[name] = "\n".join(words if name in OF_LINES else map(shlex.quote, words))
        else:
            texts[name] = str(value)
    return texts


def _section(file: File, section: str) -> dict[str, str] | None:
    reader = configparser.RawConfigParser(strict=False, allow_no_value=True, delimiters=("=", ":"))
    try:
        reader.read_string(file.contents.decode(errors="replace"))
    except configparser.Error:
        return None
    return {name: value or "" for name, value in reader[section].items()} if reader.has_section(section) else None


def _without_processes(options: str) -> str:
    try:
        words = shlex.split(options)
    except ValueError:
        return options
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word.startswith(NOT_HERE):
            skip = word in WITH_VALUE
        else:
            kept.append(word)
    return shlex.join(kept)
