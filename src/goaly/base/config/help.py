"""The text of `--help`: every key of a config with its default, its type and its docstring."""

import ast
import functools
import inspect
import shutil
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import is_dataclass
from itertools import pairwise

from goaly.base.config.schema import Key, keys, members, plain
from goaly.base.config.wording import show, type_words

FLAGS = (
    ("--config FILE", "a YAML file with any of the keys below"),
    ("--dry-run", "check everything, show what would run, start nothing"),
    ("--help", "this text"),
)


def help_text(schema: type, *, prog: str, description: str, width: int | None = None) -> str:
    """The whole help page, wrapped to the terminal."""
    width = width or min(max(shutil.get_terminal_size().columns, 60), 120)
    lines = [f"usage: {prog} [--config FILE] [--dry-run] [--help] [key=value ...]"]
    flags = [*FLAGS]
    if hasattr(schema, "refused_changes"):
        lines.append(f"       {prog} --resume FOLDER [--dry-run] [key=value ...]")
        flags.insert(1, ("--resume FOLDER", "go on with the run in this folder; some keys may be changed"))
    lines += ["", *_wrapped(description, "", width), ""]
    lines += [f"  {flag:<15} {meaning}" for flag, meaning in flags]
    lines += ["", *_wrapped(_OVERRIDES, "", width)]
    found = list(keys(schema))
    leaves = [key for key in found if key.section is None]
    roots = [key for key in leaves if "." not in key.path]
    if roots:
        lines += ["", *_block(roots, width)]
    for section in (key for key in found if key.section is not None):
        lines += ["", *_heading(section, width)]
        lines += _block([key for key in leaves if key.path.rpartition(".")[0] == section.path], width)
    return "\n".join(lines) + "\n"


_OVERRIDES = (
    "A key=value on the command line wins over the file, the file over the one that its `base: FILE` names, that over "
    "the defaults. Values are YAML: "
    "names=[a,b] is a list, key=null is no value, and ${other.key} stands for another key's value."
)


def _heading(section: Key, width: int) -> Iterator[str]:
    doc = docs(section.owner).get(section.name) or docs(typing.cast(type, section.section))[""].partition("\n\n")[0]
    optional = " (off unless set)" if section.default is None and type(None) in members(section.annotation) else ""
    yield from _wrapped(f"{section.path}{optional}: {' '.join(doc.split())}", "", width)


def _block(block: list[Key], width: int) -> Iterator[str]:
    for key in block:
        default = "(required)" if key.required else f"= {show(plain(key.default))}"
        yield from _wrapped(f"{key.path} {default}: {type_words(key.annotation, with_bounds=True)}", "  ", width)
        yield from _wrapped(docs(key.owner).get(key.name, ""), "      ", width)
        for option in members(key.annotation):
            for item in filter(is_dataclass, typing.get_args(option)):  # a list or a mapping of sections
                for name, doc in docs(item).items():
                    yield from _wrapped(f"{name}: {doc}" if name else "", "        ", width)


@functools.cache
def docs(schema: type) -> dict[str, str]:
    """The docstrings below the fields of a class and of its bases, by field; "" is the class itself."""
    found = {"": ""}
    for base in reversed(schema.__mro__[:-1]):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except (OSError, TypeError, SyntaxError):  # no source
            continue
        assert isinstance(body, ast.ClassDef)
        found[""] = ast.get_docstring(body) or ""
        for statement, below in pairwise(body.body):
            if isinstance(statement, ast.AnnAssign) and isinstance(below, ast.Expr):
                text = ast.literal_eval(below.value)
                found[ast.unparse(statement.target)] = " ".join(text.split())
    return found


def _wrapped(text: str, indent: str, width: int) -> list[str]:
    return [
        line
        for paragraph in text.split("\n")
        for line in textwrap.wrap(
            paragraph, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False
        )
    ]
