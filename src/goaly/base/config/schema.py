"""The keys of a settings class with their types and defaults, and its values as those of a YAML file."""

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated, Any

if typing.TYPE_CHECKING:
    from pydantic import TypeAdapter

STRICT: Any = {"extra": "forbid", "strict": True, "allow_inf_nan": False, "arbitrary_types_allowed": True}
"""pydantic's configuration: no unknown keys, no conversions but from integer to float, and only finite numbers."""


@functools.cache
def adapter(schema: Any) -> "TypeAdapter[Any]":
    """pydantic's view of a settings class, or of the annotation of a function's option."""
    from pydantic import TypeAdapter

    return TypeAdapter(schema, config=None if dataclasses.is_dataclass(schema) else STRICT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a config: a leaf, or a section that holds keys."""

    path: str
    annotation: Any
    default: Any
    required: bool
    owner: type
    section: type | None

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition(".")[2]


def keys(schema: type, path: str = "", defaults: Any = None) -> Iterator[Key]:
    """Every key below `schema`, sections before their keys; the defaults are those of `defaults` if it is given."""
    for field in dataclasses.fields(schema):
        annotation = hints(schema)[field.name]
        has_default, default = field_default(field)
        if defaults is not None:
            has_default, default = True, getattr(defaults, field.name)
        section = section_of(annotation)
        key = Key(
            path=join(path, field.name),
            annotation=annotation,
            default=default,
            required=not has_default and section is None,
            owner=schema,
            section=section,
        )
        yield key
        if section is not None:
            yield from keys(section, key.path, default)


def field_default(field: dataclasses.Field[Any]) -> tuple[bool, Any]:
    """Whether the field has a default, and the default."""
    if field.default is not MISSING:
        return True, field.default
    if field.default_factory is not MISSING:
        return True, field.default_factory()
    return False, None


@functools.cache
def hints(schema: Any) -> dict[str, Any]:
    """The evaluated annotations of a class's fields, bounds included."""
    found = typing.get_type_hints(schema, include_extras=True)
    return {name: kind for name, kind in found.items() if typing.get_origin(kind) is not typing.ClassVar}


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, without their bounds; a plain type is its own only one."""
    return tuple(kind for kind, _ in bounded_members(annotation))


def bounded_members(annotation: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    """The alternatives of a union, each with the bounds that are written beside its type."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    options = typing.get_args(annotation) if union else (annotation,)
    return [
        (option.__origin__, option.__metadata__) if typing.get_origin(option) is Annotated else (option, ())
        for option in options
    ]


def section_of(annotation: Any) -> type | None:
    """The settings class that this annotation nests, if it nests one (perhaps optionally)."""
    return next(
        (kind for kind in members(annotation) if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None
    )


def join(*names: object) -> str:
    """The path of these names; the root's path is empty."""
    return ".".join(str(name) for name in names if name != "")


def plain(value: Any) -> Any:
    """A config as the plain values of a YAML file that reads back as the same config."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str):
        # OmegaConf reads `${` as a reference unless an odd number of backslashes stands before it.
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    return value


def default_values(schema: type) -> dict[str, Any]:
    """The schema's defaults as plain values, without the keys that have none."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(schema):
        has_default, default = field_default(field)
        section = section_of(hints(schema)[field.name])
        if has_default:
            values[field.name] = plain(default)
        elif section is not None:
            values[field.name] = default_values(section)
    return values
