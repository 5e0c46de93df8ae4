"""Where the mutants of a module are, and mutmut's verdicts of them."""

from pathlib import Path

MUTANTS = Path("mutants")
VERDICTS = ".meta"
"""mutmut's addition to the name of a source file."""


def file_of(module: str) -> Path:
    """A module's source file; below `MUTANTS` it has the mutants."""
    path = Path("src", *module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def module_of(file: Path) -> str:
    """The module of a source file."""
    return ".".join(file.relative_to("src").with_suffix("").parts).removesuffix(".__init__")


def verdicts_of(module: str) -> Path:
    """The file of the verdicts of a module's mutants."""
    return MUTANTS / f"{file_of(module)}{VERDICTS}"


def with_verdicts() -> dict[str, Path]:
    """The file of verdicts of each module that has one."""
    files = sorted(MUTANTS.rglob(f"*.py{VERDICTS}"))
    return {module_of(file.relative_to(MUTANTS).with_suffix("")): file for file in files}
