"""Config dataclasses into plain values: for the run folder's YAML, for defaults beneath a user's file, for display."""

import re
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from goaly.configuration import schema as schemas


def plain(value: Any) -> Any:
    """A config as the plain values of a YAML file that reads back as the same config."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value) if field.init}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str):
        # OmegaConf reads `${` as a reference unless an odd number of backslashes stands before it.
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    return value


def default_values(schema: type) -> dict[str, Any]:
    """The schema's defaults as plain values, without the keys that have none."""
    values: dict[str, Any] = {}
    for field in schemas.init_fields(schema):
        has_default, default = schemas.field_default(field)
        section = schemas.section_of(schemas.hints(schema)[field.name])
        if has_default:
            values[field.name] = plain(default)
        elif section is not None:
            values[field.name] = default_values(section)
    return values
