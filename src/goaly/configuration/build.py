"""Plain values into config dataclasses: unknown keys, missing ones and wrong types, all of them, a line each.

Invariants
    CF-1  Every problem of a config is told at once: one wrong key never hides another.
    CF-2  `build(schema, plain(config))` is `config`: what a run writes into its folder starts the same run again.
"""

import difflib
import math
import re
import typing
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

from goaly.configuration import schema as schemas
from goaly.configuration.schema import join, wording
from goaly.configuration.sources import BROKEN, Given

_NOTHING = object()
_YAML_WORDS = {True: ("on", "yes", "true"), False: ("off", "no", "false")}


class Builder:
    """Builds one config, and collects what is wrong with it in `problems`."""

    def __init__(self, schema: type, given: Given):
        self.given = given
        self.problems = list(given.problems)
        self._keys = [key.path for key in schemas.keys(schema)]

    def section(self, schema: type, values: Any, path: str) -> Any:
        """An instance of `schema`; None if anything in it is wrong."""
        if values is None:
            values = {}  # `train:` with nothing below it
        if not isinstance(values, dict):
            names = ", ".join(join(path, field.name) for field in schemas.init_fields(schema))
            return self._wrong(path, values, f"is a section, set its keys: {names}")
        annotations = schemas.hints(schema)
        arguments: dict[str, Any] = {}
        sound = self._known(schema, values, path)
        for field in schemas.init_fields(schema):
            inner = join(path, field.name)
            section = schemas.section_of(annotations[field.name])
            if field.name in values:
                value = self._value(annotations[field.name], values[field.name], inner)
            elif schemas.field_default(field)[0]:
                continue
            elif section is not None:
                value = self.section(section, {}, inner)
            else:
                self.problems.append(f"{inner}: missing, must be {wording(annotations[field.name])}")
                value = BROKEN
            sound = sound and value is not BROKEN
            arguments[field.name] = value
        return self._checked(schema, arguments, path) if sound else BROKEN

    def _known(self, schema: type, values: dict[Any, Any], path: str) -> bool:
        known = [field.name for field in schemas.init_fields(schema)]
        unknown = [name for name in values if name not in known]
        for name in unknown:
            full, hint = join(path, name), self._suggestion(str(name), known, path)
            written = self.given.written.get(full, values[name])
            self.problems.append(self.given.blame(full, written, f"unknown key; {hint}"))
        return not unknown

    def _suggestion(self, name: str, siblings: list[str], path: str) -> str:
        close = difflib.get_close_matches(name, siblings, 1)
        if close:
            return f"did you mean {join(path, close[0])}?"
        full = join(path, name)
        elsewhere = [key for key in self._keys if key.rpartition(".")[2] == name]
        elsewhere += difflib.get_close_matches(full, self._keys, 1, 0.8)
        if elsewhere:
            return f"did you mean {' or '.join(dict.fromkeys(elsewhere))}?"
        return f"known here are {', '.join(siblings)}"

    def _checked(self, schema: type, arguments: dict[str, Any], path: str) -> Any:
        try:
            built = schema(**arguments)
        except ValueError as error:
            self.problems.append(f"{path or schema.__name__}: {error}")
            return BROKEN
        check: Callable[[str], list[str]] | None = getattr(built, "problems", None)
        for line in check(f"{path}." if path else "") if check is not None else []:
            key = re.match(r"[\w.]+(?==)", line)
            line = f"{line} ({self.given.source(key.group())})" if key else line
            if line not in self.problems:
                self.problems.append(line)
        return built

    def _value(self, annotation: Any, value: Any, path: str) -> Any:
        if value is BROKEN:
            return BROKEN
        options = schemas.members(annotation)
        if value is None and type(None) in options:
            return None
        section = schemas.section_of(annotation)
        if section is not None and (isinstance(value, dict) or not set(options) - {section, type(None)}):
            return self.section(section, value, path)
        exact = [option for option in options if type(value) is option]
        for option in [*exact, *options]:
            converted = self._converted(option, value, path)
            if converted is not _NOTHING:
                return converted
        return self._wrong(path, value, f"must be {wording(annotation)}")

    def _converted(self, kind: Any, value: Any, path: str) -> Any:
        """The value as this kind; BROKEN if something inside is wrong (and told), _NOTHING if it isn't of this kind."""
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if origin is typing.Literal:
            return self._choice({option: option for option in args}, value, path)
        if isinstance(kind, type) and issubclass(kind, Enum):
            return self._choice({member.value: member for member in kind}, value, path)
        if (origin or kind) in (list, tuple):
            return self._sequence(origin or kind, args, value, path)
        if (origin or kind) is dict:
            return self._mapping(args, value, path)
        if kind is Any:
            return value
        if kind in (str, Path):
            text = self.given.texts.get(path)
            if not isinstance(value, str) and text is not None and (value is not None or text == ""):
                value = text  # `name=007` on the command line is text where text is due
            return kind(value) if isinstance(value, str) else _NOTHING
        if kind is bool:
            return value if isinstance(value, bool) else _NOTHING
        if kind is int:
            return value if type(value) is int else _NOTHING
        if kind is float:
            return float(value) if type(value) in (int, float) and not math.isnan(value) else _NOTHING
        return _NOTHING

    def _choice(self, choices: dict[Any, Any], value: Any, path: str) -> Any:
        words = (self.given.texts.get(path), *_YAML_WORDS.get(value, ())) if isinstance(value, bool) else ()
        for candidate in (value, *words, self.given.texts.get(path)):
            for choice in schemas.matching(choices, candidate):
                return choices[choice]
        return _NOTHING

    def _sequence(self, kind: type, args: tuple[Any, ...], value: Any, path: str) -> Any:
        if not isinstance(value, list):
            return _NOTHING
        fixed = kind is tuple and bool(args) and args[-1] is not Ellipsis
        if fixed and len(args) != len(value):
            return _NOTHING
        kinds = args if fixed else [args[0] if args else Any] * len(value)
        items = [self._value(one, item, join(path, i)) for i, (one, item) in enumerate(zip(kinds, value, strict=True))]
        return BROKEN if any(item is BROKEN for item in items) else kind(items)

    def _mapping(self, args: tuple[Any, ...], value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            return _NOTHING
        kind = args[1] if args else Any
        items = {str(name): self._value(kind, item, join(path, name)) for name, item in value.items()}
        return BROKEN if any(item is BROKEN for item in items.values()) else items

    def _wrong(self, path: str, value: Any, complaint: str) -> Any:
        self.problems.append(self.given.blame(path, value, complaint))
        return BROKEN
