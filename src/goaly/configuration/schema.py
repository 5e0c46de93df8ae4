"""What a config dataclass says about itself: its keys with type, default and docstring.

A field's docstring is the string literal directly below it. Python drops those, so they are read from the source.
"""

import ast
import dataclasses
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

Node = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a config: a leaf, or a section that holds keys."""

    path: str
    annotation: Any
    default: Any
    required: bool
    doc: str
    section: type | None

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition(".")[2]


def keys(schema: type, path: str = "", defaults: Any = None) -> Iterator[Key]:
    """Every key below `schema`, sections before what they hold, with the defaults that `defaults` holds if given."""
    docs = attribute_docs(schema)
    annotations = hints(schema)
    for field in init_fields(schema):
        annotation = annotations[field.name]
        has_default, default = field_default(field)
        if defaults is not None:
            has_default, default = True, getattr(defaults, field.name)
        section = section_of(annotation)
        key = Key(
            path=join(path, field.name),
            annotation=annotation,
            default=default,
            required=not has_default and section is None,
            doc=docs.get(field.name, ""),
            section=section,
        )
        yield key
        if section is not None:
            yield from keys(section, key.path, default)


def init_fields(schema: type) -> list[dataclasses.Field[Any]]:
    """The fields that a config can set."""
    return [field for field in dataclasses.fields(schema) if field.init]


def field_default(field: dataclasses.Field[Any]) -> tuple[bool, Any]:
    """Whether the field has a default, and the default."""
    if field.default is not dataclasses.MISSING:
        return True, field.default
    if field.default_factory is not dataclasses.MISSING:
        return True, field.default_factory()
    return False, None


def changed(settings: Any) -> dict[str, Any]:
    """The keys of a config object that differ from their defaults, and their values."""
    values = {
        field.name: (field_default(field), getattr(settings, field.name)) for field in init_fields(type(settings))
    }
    return {name: value for name, (default, value) in values.items() if default != (True, value)}


@cache
def hints(schema: type) -> dict[str, Any]:
    """The evaluated annotations of a class."""
    return typing.get_type_hints(schema)


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union; a plain type is its own only one."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def section_of(annotation: Any) -> type | None:
    """The dataclass that this annotation nests, if it nests one (perhaps optionally)."""
    for member in members(annotation):
        if isinstance(member, type) and dataclasses.is_dataclass(member):
            return member
    return None


def matching(choices: Iterable[Any], value: Any) -> list[Any]:
    """Those of the choices that are the value: equal and of its type, for `True` is no `1`."""
    return [choice for choice in choices if type(choice) is type(value) and choice == value]


class KnownWords:
    """Base of settings whose fields are one of several words: a word that a field's `Literal` does not list is a
    ValueError, also where Python code builds them."""

    __slots__ = ()

    def __post_init__(self) -> None:
        annotations = hints(type(self))
        found = [
            f"{type(self).__name__}.{field.name}={show(value)}: must be {wording(annotations[field.name])}"
            for field in init_fields(type(self))
            if not _word_known(annotations[field.name], value := getattr(self, field.name))
        ]
        if found:
            raise ValueError("; ".join(found))


def _word_known(annotation: Any, value: Any) -> bool:
    """Whether the value is one that the annotation lists; True where it lists none."""
    options = members(annotation)
    words = [
        word for option in options if typing.get_origin(option) is typing.Literal for word in typing.get_args(option)
    ]
    others = [option for option in options if isinstance(option, type)]
    others += [int] if float in others else []
    return not words or bool(matching(words, value)) or type(value) in others


def join(path: str, name: object) -> str:
    """`name` below `path`; the root's path is empty."""
    return f"{path}.{name}" if path else str(name)


def wording(annotation: Any) -> str:
    """A type in words that complete `must be …`."""
    options = members(annotation)
    if len(options) > 1:
        return " or ".join(wording(option) for option in options)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return f"one of {', '.join(map(show, args))}" if len(args) > 1 else show(args[0])
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return f"one of {', '.join(show(member.value) for member in annotation)}"
    if origin is tuple and args and args[-1] is not Ellipsis:
        return f"a list of {len(args)}: {', '.join(wording(arg) for arg in args)}"
    if origin in (list, tuple) or annotation in (list, tuple):
        return f"a list, each {wording(args[0])}" if args and args[0] is not Any else "a list"
    if origin is dict or annotation is dict:
        return f"a mapping, each value {wording(args[1])}" if args and args[1] is not Any else "a mapping"
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return f"a section ({', '.join(field.name for field in init_fields(annotation))})"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    words |= {type(None): "null", Any: "any value"}
    if annotation not in words:
        raise TypeError(f"a config can't hold {annotation!r}")
    return words[annotation]


def show(value: Any) -> str:
    """A value as one would write it, cut short when long."""
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        text = f"[{', '.join(show(item) for item in value)}]"
    elif isinstance(value, dict):
        text = f"{{{', '.join(f'{key}: {show(item)}' for key, item in value.items())}}}"
    else:
        text = '""' if value == "" else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def class_doc(schema: type) -> str:
    """The docstring written in the class; empty where there is only the one that `dataclass` makes up."""
    node = _classes(schema.__module__).get(schema.__qualname__)
    return ast.get_docstring(node) or "" if node is not None else ""


def attribute_docs(schema: type) -> dict[str, str]:
    """Attribute name -> the docstring below it, for a class and the classes it inherits from."""
    docs: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        node = _classes(base.__module__).get(base.__qualname__) if base is not object else None
        body = node.body if node is not None else []
        for statement, below in pairwise(body):
            name = _assigned(statement)
            text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else None
            if name and isinstance(text, str):
                docs[name] = " ".join(text.split())
    return docs


def _assigned(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.AnnAssign):
        target: ast.expr = statement.target
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    else:
        return None
    return target.id if isinstance(target, ast.Name) else None


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Every class of a module by qualified name; none where the source can't be had."""
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8")) if file else None
    except (OSError, SyntaxError, ValueError):
        tree = None
    found: dict[str, ast.ClassDef] = {}
    pending: list[tuple[str, ast.AST]] = [("", tree)] if tree is not None else []
    while pending:
        prefix, parent = pending.pop()
        for node in ast.iter_child_nodes(parent):
            inner = prefix
            if isinstance(node, Node):
                inner = f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else f"{prefix}{node.name}.<locals>."
            if isinstance(node, ast.ClassDef):
                found[f"{prefix}{node.name}"] = node
            if not isinstance(node, ast.expr):
                pending.append((inner, node))
    return found
