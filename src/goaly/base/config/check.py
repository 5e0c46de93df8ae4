"""Turns plain values into settings, and words each problem that pydantic or the settings' own `problems` find.

All problems are reported at once. Only the `problems` of a section with a wrong required key have to wait. A config
that `to_yaml` wrote reads back as the same config.
"""

import contextlib
import copy
import difflib
import json
import re
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from pydantic import ValidationError

from goaly.base.config.schema import adapter, hints, join, keys, members, section_of
from goaly.base.config.wording import bounds_words, show, type_words

OUT_OF_BOUNDS = {
    "greater_than",
    "greater_than_equal",
    "less_than",
    "less_than_equal",
    "multiple_of",
    "string_too_short",
}
"""pydantic's error types for a value of the right type that breaks a bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One wrong key."""

    kind: str
    """missing, unknown or wrong"""
    path: str
    steps: tuple[str | int, ...]
    """Names and list positions that lead from the checked values to the key."""
    value: Any
    complaint: str

    @property
    def line(self) -> str:
        """The problem with its key, its value and what would be right."""
        return f"{self.path}{'' if self.kind == 'missing' else f'={show(self.value)}'}: {self.complaint}"


def check(
    schema: type, values: dict[str, Any], path: str = "", unresolved: Iterable[str] = ()
) -> tuple[Any, list[str]]:
    """Build the section at `path` from plain values (None if they are wrong), and list its problems, a line each.

    `unresolved` are keys whose values could not be read; their problem is reported already."""
    try:
        config, found = _validated(schema, values), []
    except ValidationError as error:
        config, found = None, faults(error, schema, path)
    found = [fault for fault in found if fault.kind != "missing" or fault.path not in unresolved]
    values, wrong = copy.deepcopy(values), set(unresolved)
    for fault in found:
        removed = _remove(values, fault.steps)
        wrong |= {join(path, *removed)} if fault.kind != "unknown" else set()
    of_sections = _section_problems(schema, values, path) if config is None else all_problems(config, path)
    # The defaults of wrong keys stood in for them: leave out lines about those defaults.
    others = (line for line in of_sections if not any(_names(line, key) for key in wrong))
    return config, list(dict.fromkeys([*(fault.line for fault in found), *others]))


def all_problems(settings: Any, path: str = "") -> Iterator[str]:
    """The lines of the `problems` methods of all sections below the settings, then of the settings themselves."""
    inner: Iterable[tuple[Any, Any]] = ()
    if is_dataclass(settings):
        inner = ((field.name, getattr(settings, field.name)) for field in fields(settings))
    elif isinstance(settings, dict):
        inner = settings.items()
    elif isinstance(settings, (list, tuple)):
        inner = enumerate(settings)
    for name, value in inner:
        yield from all_problems(value, join(path, name))
    if is_dataclass(settings):
        yield from typing.cast(Any, settings).problems(f"{path}." if path else "")


def _names(line: str, key: str) -> bool:
    """Whether the line names the key, or a key below it."""
    after = r"(?!\w)" if "." in key else r"(?=[=:]|\.\w)"  # `steps` alone is also an English word
    return re.search(rf"(?<![\w.]){re.escape(key)}{after}", line) is not None


def _section_problems(schema: type, values: dict[str, Any], path: str) -> Iterator[str]:
    """The problems of the whole, or of those sections that these values can build."""
    try:
        yield from all_problems(_validated(schema, values), path)
    except ValidationError:
        for name, annotation in hints(schema).items():
            section = section_of(annotation)
            if section is not None and isinstance(values.get(name), dict):
                yield from _section_problems(section, values[name], join(path, name))


def _validated(schema: type, values: dict[str, Any]) -> Any:
    return adapter(schema).validate_json(json.dumps(values))  # JSON has YAML's types; strict Python refuses its lists


def _remove(values: Any, steps: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Remove the key, or the list that the item is in; return its steps."""
    while steps and isinstance(steps[-1], int):
        steps = steps[:-1]
    with contextlib.suppress(KeyError, TypeError):  # removed before, with what it was in, or pydantic's name of a type
        for step in steps[:-1]:
            values = values[step]
        del values[steps[-1]]
    return steps


def faults(error: ValidationError, schema: Any, path: str = "") -> list[Fault]:
    """The faults that pydantic found in the section at `path`."""
    found: dict[tuple[str | int, ...], Fault] = {}
    for one in error.errors(include_url=False, include_context=False):
        kind, location = one["type"], one["loc"]
        if kind == "missing" and location and isinstance(location[-1], int):
            kind, location = "too_short", location[:-1]  # a tuple's last items
        steps, annotation = _follow(schema, location)
        if kind == "unexpected_keyword_argument":
            complaint = f"unknown key; {_suggestion(schema, steps, str(location[-1]), path)}"
            steps = (*steps, str(location[-1]))
        elif kind == "missing":
            complaint = f"missing, must be {type_words(annotation)}"
        elif kind == "dataclass_type":
            names = hints(section_of(annotation))
            complaint = f"is a section, set its keys: {', '.join(join(path, *steps, name) for name in names)}"
        elif kind in OUT_OF_BOUNDS:
            complaint = f"must be {bounds_words(annotation)}"
        elif kind == "finite_number":
            complaint = f"must be a finite number{', or null' if type(None) in members(annotation) else ''}"
        else:
            complaint = f"must be {type_words(annotation)}"
        if steps not in found or kind in OUT_OF_BOUNDS:
            name = {"missing": "missing", "unexpected_keyword_argument": "unknown"}.get(kind, "wrong")
            found[steps] = Fault(
                kind=name, path=join(path, *steps), steps=steps, value=one["input"], complaint=complaint
            )
    return list(found.values())


def _follow(annotation: Any, location: tuple[str | int, ...]) -> tuple[tuple[str | int, ...], Any]:
    """The steps of the location that are keys of the schema, and the type of the last one.

    A remaining step is an unknown key, or pydantic's name for a member of a union."""
    steps: list[str | int] = []
    for step in location:
        section = section_of(annotation)
        inner = hints(section).get(str(step)) if section is not None else _item(annotation, step)
        if inner is None:
            break
        annotation = inner
        steps.append(step)
    return tuple(steps), annotation


def _item(annotation: Any, step: str | int) -> Any:
    """The type of a list's or a mapping's item; None if the annotation is of neither."""
    for kind in members(annotation):
        origin, args = typing.get_origin(kind) or kind, typing.get_args(kind)
        if origin in (list, tuple) and isinstance(step, int):
            return args[step] if origin is tuple and args[-1] is not Ellipsis else args[0]
        if origin is dict and isinstance(step, str):
            return args[1]
    return None


def _suggestion(schema: Any, steps: tuple[str | int, ...], name: str, path: str) -> str:
    siblings = list(hints(section_of(_follow(schema, steps)[1])))
    if close := difflib.get_close_matches(name, siblings):
        return f"did you mean {join(path, *steps, close[0])}?"
    known = [key.path for key in keys(schema, path)]
    elsewhere = [key for key in known if key.rpartition(".")[2] == name]
    elsewhere += difflib.get_close_matches(join(path, *steps, name), known, 1, 0.8)
    if elsewhere:
        return f"did you mean {' or '.join(dict.fromkeys(elsewhere))}?"
    return f"known here are {', '.join(siblings)}"
