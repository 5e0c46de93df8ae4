"""The text of `--help`: every key of a config with its type, its default and its docstring."""

import shutil
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

from goaly.configuration import schema as schemas
from goaly.configuration.plain import plain
from goaly.configuration.schema import Key, show

FLAGS = (
    ("--config FILE", "a YAML file with any of the keys below"),
    ("--dry-run", "check everything, show what would run, start nothing"),
    ("--help", "this text"),
)


def help_text(schema: type, *, prog: str, description: str, width: int | None = None) -> str:
    """The whole help page, wrapped to the terminal."""
    width = width or min(max(shutil.get_terminal_size().columns, 60), 120)
    lines = [f"usage: {prog} [--config FILE] [--dry-run] [--help] [key=value ...]", ""]
    lines += [*_wrapped(description, "", width), ""]
    lines += [f"  {flag:<15} {meaning}" for flag, meaning in FLAGS]
    lines += ["", *_wrapped(_OVERRIDES, "", width)]
    found = list(schemas.keys(schema))
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
    assert section.section is not None
    doc = section.doc or schemas.class_doc(section.section).partition("\n\n")[0]
    optional = (
        " (off unless set)" if section.default is None and type(None) in schemas.members(section.annotation) else ""
    )
    yield from _wrapped(f"{section.path}{optional}: {' '.join(doc.split())}", "", width)


def _block(keys: list[Key], width: int) -> Iterator[str]:
    for key in keys:
        default = "(required)" if key.required else f"= {show(plain(key.default))}"
        yield f"  {key.path}  {type_text(key.annotation)} {default}"
        yield from _wrapped(key.doc, "      ", width)
        for name, doc in _choices(key.annotation):
            yield from _wrapped(f"{name}: {doc}", "        ", width)


def type_text(annotation: Any) -> str:
    """A type as short as it can be said."""
    options = schemas.members(annotation)
    if len(options) > 1:
        return "|".join(type_text(option) for option in options)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return "|".join(show(arg) for arg in args)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "|".join(show(member.value) for member in annotation)
    if origin in (list, tuple, dict):
        inner = ", ".join("..." if arg is Ellipsis else type_text(arg) for arg in args)
        return f"{origin.__name__}[{inner}]"
    return "null" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))


def _choices(annotation: Any) -> Iterator[tuple[str, str]]:
    """What a value or its parts may be, each with its meaning."""
    for option in schemas.members(annotation):
        if isinstance(option, type) and issubclass(option, Enum):
            docs = schemas.attribute_docs(option)
            yield from ((show(member.value), docs[member.name]) for member in option if member.name in docs)
        for inner in typing.get_args(option):
            if is_dataclass(inner):  # a list or mapping of sections
                yield from schemas.attribute_docs(inner).items()


def _wrapped(text: str, indent: str, width: int) -> list[str]:
    return [
        line
        for paragraph in text.split("\n")
        for line in textwrap.wrap(
            paragraph, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False
        )
    ]
