"""The values of a config: as plain values of a YAML file, and those that have no effect."""

import dataclasses
import re
from pathlib import Path
from typing import Any

from goaly.configuration.schema import field_default, hints, section_of
from goaly.configuration.wording import show


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


def idle(settings: Any, prefix: str, reason: str, *names: str) -> list[str]:
    """One line for each of these keys (none: of all keys) that is set but has no effect, for this reason."""
    return [
        f"{prefix}{field.name}={show(value)}: has no effect, {reason}"
        for field in dataclasses.fields(settings)
        if (field.name in names or not names) and field_default(field) != (True, value := getattr(settings, field.name))
    ]
