"""Settings classes: their base, and the types of their fields.

    class ArithmeticSettings(Settings):
        min_digits: PositiveInt = 2
        \"\"\"Fewest digits of a number.\"\"\"
        max_digits: int = 12
        \"\"\"Most digits of a number.\"\"\"

        def _problems(self, at: Section) -> Iterator[str]:
            if self.max_digits < self.min_digits:
                yield f"{at.max_digits}: must be at least {at.min_digits}"

pydantic checks every instance, from Python as from a file: types, words and bounds of all fields, and no unknown keys.
It is imported when the first instance is built from other values than the defaults, so the processes that only receive
settings save its 0.2 s. Its `use_attribute_docstrings` would cost each process another 0.2 s: `help.py` reads the
docstrings instead.
"""

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt

from goaly.base.config.schema import STRICT, adapter, field_default
from goaly.base.config.wording import show
from goaly.base.errors import ConfigError

PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
AtLeastOne = Annotated[float, Ge(1)]
Share = Annotated[float, Ge(0), Le(1)]
ShareBelowOne = Annotated[float, Ge(0), Lt(1)]


class Section:
    """Names the keys of a section: `{at.threads}` is `trainer.threads=1`, `{at}threads` is only `trainer.threads`."""

    def __init__(self, settings: Any, prefix: str):
        """`prefix` is the section's path with its dot, such as `trainer.`."""
        self._settings = settings
        self._prefix = prefix

    def __str__(self) -> str:
        return self._prefix

    def __getattr__(self, name: str) -> Any:
        """A key with its value; for a section in this one, its own `Section`."""
        value = getattr(self._settings, name)
        if isinstance(value, Settings):
            return Section(value, f"{self}{name}.")
        return f"{self}{name}={value if value and isinstance(value, str) else show(value)}"

    def idle(self, reason: str, *names: str) -> Iterator[str]:
        """One line for each of these keys (none: of all keys) that is set but has no effect, for this reason."""
        for field in dataclasses.fields(self._settings):
            value = getattr(self._settings, field.name)
            if (field.name in names or not names) and field_default(field) != (True, value):
                yield f"{self}{field.name}={show(value)}: has no effect, {reason}"


@typing.dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,))
class Settings:
    """A frozen dataclass; building an instance of wrong values raises ConfigError with every problem."""

    def problems(self, prefix: str) -> list[str]:
        """One line for each setting that cannot work. `prefix` is the section's path with its dot, such as `loss.`."""
        return list(self._problems(Section(self, prefix)))

    def _problems(self, at: Section) -> Iterator[str]:
        yield from ()

    def __init_subclass__(cls) -> None:
        cls.__pydantic_config__ = STRICT  # type: ignore[attr-defined]
        made: Any = dataclass(frozen=True, kw_only=True)(cls)
        unchecked = made.__init__
        required = [field for field in dataclasses.fields(made) if field.default is field.default_factory is MISSING]

        def __init__(self: Any, **given: Any) -> None:
            if not given and not required:
                return unchecked(self)
            from pydantic_core import ArgsKwargs, ValidationError

            from goaly.base.config.check import faults

            try:
                adapter(made).validator.validate_python(ArgsKwargs((), given), self_instance=self)
            except ValidationError as error:
                raise ConfigError([fault.line for fault in faults(error, made, made.__name__)]) from None

        made.__init__ = __init__
