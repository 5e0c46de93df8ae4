"""Load the config of an app from a YAML file and `key=value` overrides.

    run_cli(main, RunConfig, prog="python -m apps.grpo.main", description="…")

The settings classes are the schema, and the docstring below each field is its documentation. One `ConfigError` lists
all problems, a line each: unknown keys, wrong values, missing values, and the lines that the `problems(prefix)` methods
of the settings return.

`--resume FOLDER` takes the config of the run in this folder; the schema's `refused_changes` says which overrides the
run may not have.

`load` raises ConfigError, or SystemExit(0) after `--help`. `run_cli` is for scripts: it prints a ConfigError, of `load`
or of `main` before it starts anything, to stderr and exits with code 2.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

from goaly.base.errors import ConfigError
from goaly.base.process import exit_quickly

T = TypeVar("T")

RUN_CONFIG = "config.yaml"
"""The resolved config in the folder of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Generic[T]):
    """A valid config, and the rest of the command line."""

    config: T
    dry_run: bool
    path: Path | None
    resume: Path | None = None
    """The folder of the run that goes on, if one does."""
    arguments: tuple[str, ...] | None = field(default=None, compare=False)
    """The command line that it was loaded from."""


def load(schema: type[T], argv: Sequence[str], *, prog: str, description: str) -> Loaded[T]:
    """The config that these arguments describe; ConfigError with every problem, SystemExit(0) after `--help`."""
    line, problems = _parse(argv)
    if line.help:
        from goaly.base.config.help import help_text

        sys.stdout.write(help_text(schema, prog=prog, description=description))
        raise SystemExit(0)
    # OmegaConf and pydantic take 0.5 s to import, which `--help` need not wait for.
    from goaly.base.config.check import check
    from goaly.base.config.schema import keys
    from goaly.base.config.sources import read
    from goaly.base.config.wording import type_words

    for key in keys(schema):
        type_words(key.annotation)  # a field of a type that no YAML can hold is our bug: it raises here
    resume = Path(line.resume) if line.resume else None
    if resume is not None:
        problems += _resume_problems(resume, line.files, schema)
        line.files = [str(resume / RUN_CONFIG)]
    file, *others = [file for file in line.files if file] or [None]
    problems += [f"--config={other}: --config={file} is given already, there can be one" for other in others]
    if resume is not None and problems:
        raise ConfigError(problems)
    given = read(file, line.overrides, schema)
    config, found = check(schema, given.values, unresolved=given.unresolved)
    problems += [*given.problems, *map(given.blame, found)]
    if resume is not None and not problems:
        before, problems = check(schema, read(file, [], schema).values)
        problems += map(given.blame, before.refused_changes(config)) if not problems else []
    if problems:
        raise ConfigError(problems)
    path = Path(file) if file is not None else None
    return Loaded(config=config, dry_run=line.dry_run, path=path, resume=resume, arguments=tuple(argv))


def run_cli(
    main: Callable[[Loaded[T]], int | None],
    schema: type[T],
    *,
    prog: str,
    description: str,
) -> NoReturn:
    """Load the config, run `main` with it, and exit with its result (None is 0), or with 2 if the config is wrong."""
    exit_quickly(exit_code(main, schema, sys.argv[1:], prog=prog, description=description))


def exit_code(
    main: Callable[[Loaded[T]], int | None], schema: type[T], argv: Sequence[str], *, prog: str, description: str
) -> int:
    """The exit code of `run_cli`."""
    try:
        loaded = load(schema, argv, prog=prog, description=description)
        return main(loaded) or 0
    except ConfigError as error:
        count = f"{len(error.problems)} problems" if len(error.problems) != 1 else "a problem"
        sys.stderr.write(f"{prog}: {count} with the configuration\n")
        sys.stderr.writelines(f"  {problem}\n" for problem in error.problems)
        sys.stderr.write(f"`{prog} --help` explains every key.\n")
        return 2


def to_yaml(config: object) -> str:
    """The config with every key, as YAML that loads as the same config."""
    from omegaconf import OmegaConf

    from goaly.base.config.schema import plain

    return OmegaConf.to_yaml(OmegaConf.create(plain(config)))


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The arguments of a script: `files`, `dry_run`, `help` and `overrides`; and one line for each wrong flag."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", dest="files", nargs="?", action="append", default=[])
    parser.add_argument("--resume", nargs="?", const="")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("overrides", nargs="*")
    line, unknown = parser.parse_known_intermixed_args(argv)
    flags = "--config FILE, --resume FOLDER, --dry-run, --help"
    problems = [f"{flag}: unknown flag; known are {flags}, and key=value" for flag in unknown]
    problems += ["--config: names no file, write --config FILE" for file in line.files if not file]
    problems += ["--resume: names no run folder, write --resume FOLDER"] if line.resume == "" else []
    return line, problems


def _resume_problems(folder: Path, configs: Sequence[str], schema: type) -> list[str]:
    if not hasattr(schema, "refused_changes"):
        return [f"--resume={folder}: is for RL runs, which have a log; this script starts anew"]
    if configs:
        return [f"--config={configs[0]}: a resumed run has its own config; override single keys by key=value"]
    if not (folder / RUN_CONFIG).exists():
        return [f"--resume={folder}: must be the folder of a run, which has a {RUN_CONFIG}"]
    return []
