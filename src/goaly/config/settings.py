"""Settings classes: the decorator that makes them, and the types of their fields.

    @settings
    class RolloutSettings:
        workers: PositiveInt = 1
        \"\"\"Processes that run episodes.\"\"\"

pydantic checks every instance, from Python as from a file: types, words and bounds of all fields, and no unknown keys.
It is imported when the first instance is built from other values than the defaults, so the processes that only receive
settings save its 0.2 s. Its `use_attribute_docstrings` would cost each process another 0.2 s: `help.py` reads the
docstrings instead.
"""

import dataclasses
import typing
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Gt, Le, Lt

from goaly.config.schema import STRICT, adapter
from goaly.errors import ConfigError

T = TypeVar("T")

PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
AtLeastOne = Annotated[float, Ge(1)]
Share = Annotated[float, Ge(0), Le(1)]
ShareBelowOne = Annotated[float, Ge(0), Lt(1)]


@typing.dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,))
def settings(cls: type[T]) -> type[T]:
    """Make the class a frozen dataclass; building an instance of wrong values raises ConfigError with every problem."""
    cls.__pydantic_config__ = STRICT  # type: ignore[attr-defined]
    made = dataclass(frozen=True, kw_only=True)(cls)
    unchecked = made.__init__
    # pyrefly: ignore[bad-argument-type]
    required = [field for field in dataclasses.fields(made) if field.default is field.default_factory is MISSING]

    def __init__(self: Any, **given: Any) -> None:
        if not given and not required:
            return unchecked(self)
        from pydantic_core import ArgsKwargs, ValidationError

        from goaly.config.check import faults

        try:
            adapter(made).validator.validate_python(ArgsKwargs((), given), self_instance=self)
        except ValidationError as error:
            raise ConfigError([fault.line for fault in faults(error, made, made.__name__)]) from None

    made.__init__ = __init__  # type: ignore[method-assign]
    return made
