"""Functions that settings choose by name or by path, with options that their signatures state.

A built-in function is found by its registered name, a user's own by `package.module:function`. Its options are the
parameters after `*`; values are checked against their annotations, bounds such as that of `Share` included:

    def clipped(tokens, *, clip_low: Share = 0.2): ...

An option that the chosen function does not take is an error that names the functions that take it. A function that is
not found, or does not take these options, is an error before anything runs.
"""

import functools
import importlib
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from goaly.base.config.wording import show


def function_at(path: str) -> Callable[..., Any]:
    """The function that `package.module:function` names; a ValueError if its module has no such function."""
    module, _, name = path.partition(":")
    function = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise ValueError(f"module {module} has no function {name!r}")
    return function


F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[F]):
    """The functions of one kind."""

    def __init__(self, kind: str):
        """`kind` is the name of such a function in messages, such as `loss`."""
        self._kind = kind
        self._functions: dict[str, F] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order of registration."""
        return tuple(self._functions)

    def register(self, name: str) -> Callable[[F], F]:
        """Decorate a function so that `name` finds it."""

        def registered(function: F) -> F:
            assert name not in self._functions, f"two are named {name}"
            self._functions[name] = function
            return function

        return registered

    def find(self, name: str) -> F:
        """The function of this name or path; a ValueError lists the names."""
        if name in self._functions:
            return self._functions[name]
        known = f"known are {', '.join(self._functions)}, and your own as package.module:function"
        if ":" not in name:
            raise ValueError(f"there is no such {self._kind}; {known}")
        try:
            return typing.cast(F, function_at(name))
        except Exception as error:  # whatever a user's module raises when it is imported
            raise ValueError(f"cannot be imported ({type(error).__name__}: {error}); {known}") from error

    def bound(self, name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
        """The function with its options bound; a ValueError lists all problems."""
        if problems := self.problems("", name, options):
            raise ValueError("; ".join(problems))
        return functools.partial(self.find(name), **options)

    def problems(self, prefix: str, name: str, options: Mapping[str, Any]) -> list[str]:
        """One line for each problem of this choice; keys are `<prefix>name` and `<prefix>options.<option>`."""
        try:
            function = self.find(name)
            taken = _options(function)
        except ValueError as error:
            return [f"{prefix}name={name}: {error}"]
        found = [
            f"{prefix}options.{option}: missing, the {self._kind} {name} needs it"
            for option, parameter in taken.items()
            if parameter.default is parameter.empty and option not in options
        ]
        try:
            annotations = typing.get_type_hints(function, include_extras=True) if options else {}
        except Exception as error:  # an annotation may be any expression
            return [f"{prefix}name={name}: its annotations cannot be read ({type(error).__name__}: {error})"]
        for option, value in options.items():
            key = f"{prefix}options.{option}={show(value)}"
            if option not in taken:
                found.append(f"{key}: {self._untaken(name, option, taken)}")
            elif complaint := _complaint(annotations.get(option, Any), value):
                found.append(f"{key}: {complaint}")
        return found

    def _untaken(self, name: str, option: str, taken: Mapping[str, Any]) -> str:
        takers = [other for other, function in self._functions.items() if option in _options(function)]
        has = f"its options are {', '.join(taken)}" if taken else "it has no options"
        others = f"; {', '.join(takers)} take it" if takers else ""
        return f"the {self._kind} {name} does not take it, {has}{others}"


def _options(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    needed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty]
    if len(needed) != 1:
        raise ValueError(f"must take one argument, and its options after `*`; it takes {inspect.signature(function)}")
    return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}


def _complaint(annotation: Any, value: Any) -> str | None:
    """A description of the right values; None if this value is right."""
    from pydantic import ValidationError

    from goaly.base.config.check import faults
    from goaly.base.config.schema import adapter

    try:
        adapter(annotation).validate_python(value)
    except ValidationError as error:
        return faults(error, annotation)[0].complaint
    return None
