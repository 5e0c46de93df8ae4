"""The config in the folder of a run, as another program reads it: also while the run goes on, or of another machine.

Only the sections that the reader names are checked, so what it does not need may be missing here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from goaly.base.config import RUN_CONFIG
from goaly.base.errors import ConfigError


def run_values(folder: Path, needed: str) -> dict[str, Any]:
    """The content of the config in this run's folder; ConfigError if it cannot be read or lacks the section `needed`,
    which every run of this kind has."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    file = folder / RUN_CONFIG
    try:
        values = OmegaConf.to_container(OmegaConf.load(file))
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError([f"{file}: {error}"]) from error
    if not isinstance(values, dict) or not isinstance(values.get(needed), dict):
        raise ConfigError([f"{file}: must be the config of an RL run"])
    return {str(name): section for name, section in values.items()}


def run_sections(values: Mapping[str, Any], schemas: Mapping[str, type]) -> dict[str, Any]:
    """The sections of these schemas, with the defaults where they are left out; ConfigError with all problems."""
    from goaly.base.config.check import check

    checked = {name: check(schema, values.get(name) or {}, name) for name, schema in schemas.items()}
    if problems := [line for section, lines in checked.values() if section is None for line in lines]:
        raise ConfigError(problems)
    return {name: section for name, (section, _) in checked.items()}
