"""Config dataclasses from a YAML file and `key=value` overrides: one door for every app.

The dataclasses are the schema, and the docstring below each field is its documentation. Reading never stops at the
first mistake: unknown keys, wrong types, missing values and every line of the `problems(prefix)` methods of the
settings (and of the root, with prefix "") come together in one `ConfigError`, a line each.

    run_cli(main, GrpoConfig, prog="python -m apps.grpo.main", description="…")

`load` raises (ConfigError, or SystemExit(0) after `--help`); `run_cli` is what a script calls: it turns a ConfigError,
raised by `load` or by `main` before it starts anything, into lines on stderr and exit code 2.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

from goaly.errors import ConfigError
from goaly.process import exit_quickly

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Generic[T]):
    """A sound config, and what else the command line said."""

    config: T
    dry_run: bool
    path: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """The arguments of a script, sorted."""

    file: str | None
    overrides: tuple[str, ...]
    dry_run: bool
    wants_help: bool
    problems: tuple[str, ...]


def load(schema: type[T], argv: Sequence[str], *, prog: str, description: str) -> Loaded[T]:
    """The config that these arguments describe; ConfigError with every problem, SystemExit(0) after `--help`."""
    line = parse(argv)
    if line.wants_help:
        from goaly.configuration.help import help_text

        sys.stdout.write(help_text(schema, prog=prog, description=description))
        raise SystemExit(0)
    # OmegaConf takes 0.3 s to import, which `--help` need not wait for.
    from goaly.configuration.build import Builder
    from goaly.configuration.plain import default_values
    from goaly.configuration.schema import keys, members, wording
    from goaly.configuration.sources import read

    found = list(keys(schema))
    for key in found:
        wording(key.annotation)  # a field of a type that no YAML can hold is our bug: it raises here
    mappings = {key.path for key in found if isinstance(key.default, dict)}
    sections = {key.path for key in found if key.section is not None and type(None) not in members(key.annotation)}
    given = read(line.file, line.overrides, default_values(schema), mappings=mappings, sections=sections)
    builder = Builder(schema, given)
    builder.problems[:0] = line.problems
    config = builder.section(schema, given.values, "")
    if builder.problems:
        raise ConfigError(builder.problems)
    return Loaded(config=config, dry_run=line.dry_run, path=Path(line.file) if line.file is not None else None)


def run_cli(
    main: Callable[[Loaded[T]], int | None],
    schema: type[T],
    *,
    prog: str,
    description: str,
) -> NoReturn:
    """Load the config, run `main` with it, and exit with what that returns (None is 0); with 2 if the config is bad."""
    exit_quickly(exit_code(main, schema, sys.argv[1:], prog=prog, description=description))


def exit_code(
    main: Callable[[Loaded[T]], int | None], schema: type[T], argv: Sequence[str], *, prog: str, description: str
) -> int:
    """What `run_cli` exits with."""
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

    from goaly.configuration.plain import plain

    return OmegaConf.to_yaml(OmegaConf.create(plain(config)))


def parse(argv: Sequence[str]) -> CommandLine:
    """Sort the arguments of a script into flags and overrides."""
    files: list[str] = []
    overrides: list[str] = []
    problems: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if flag == "--config":
            file = value if equals else next(arguments, None)
            if not file:
                problems.append("--config: names no file, write --config FILE")
            elif files:
                problems.append(f"--config={file}: --config={files[0]} is given already, there can be one")
            else:
                files.append(file)
        elif argument.startswith("-") and argument not in ("--dry-run", "--help", "-h"):
            problems.append(f"{argument}: unknown flag; known are --config FILE, --dry-run, --help, and key=value")
        elif not argument.startswith("-"):
            overrides.append(argument)
    return CommandLine(
        file=files[0] if files else None,
        overrides=tuple(overrides),
        dry_run="--dry-run" in argv,
        wants_help="--help" in argv or "-h" in argv,
        problems=tuple(problems),
    )
