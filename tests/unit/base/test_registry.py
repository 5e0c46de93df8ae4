"""Functions by name or path: what can't be found or taken is told, with what is known."""

import pytest

from goaly.base.config.settings import NonNegativeFloat
from goaly.base.registry import Registry

KNOWN = "known are plain, and your own as package.module:function"


def own(argument: object, *, needed: NonNegativeFloat, flag: bool = False, word: str | None = None) -> tuple:
    """A user's function."""
    return argument, needed, flag, word


def unannotated(argument, *, choice) -> tuple:
    """A user's function without types."""
    return argument, choice


def hidden(argument: "Nowhere", *, flag: bool = False) -> bool:  # type: ignore[name-defined]  # noqa: F821
    """Annotated with what only a type checker sees."""
    return flag


def greedy(one: int, two: int) -> None:
    """Takes too much."""


@pytest.fixture
def registry() -> Registry:
    made: Registry = Registry("thing")
    made.register("plain")(lambda argument: argument)
    return made


def test_a_name_and_a_path_find_their_functions(registry: Registry):
    assert registry.bound("plain", {})(3) == 3
    assert registry.bound(f"{__name__}:own", {"needed": 1, "word": "x"})(3) == (3, 1, False, "x")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("plane", f"there is no such thing; {KNOWN}"),
        ("nowhere:at_all", f"cannot be imported (ModuleNotFoundError: No module named 'nowhere'); {KNOWN}"),
        (f"{__name__}:absent", f"cannot be imported (ValueError: module {__name__} has no function 'absent'); {KNOWN}"),
        (
            f"{__name__}:greedy",
            "must take one argument, and its options after `*`; it takes (one: int, two: int)",
        ),
    ],
)
def test_what_can_not_be_found_lists_what_is_known(registry: Registry, name: str, problem: str):
    found = [line.replace(" -> None", "") for line in registry.problems("x.", name, {})]
    assert found == [f"x.name={name}: {problem}"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "options.needed: missing, the thing {own} needs it"),
        ({"needed": -1}, "options.needed=-1: must be at least 0"),
        ({"needed": True}, "options.needed=true: must be a number"),
        ({"needed": 1, "flag": 1}, "options.flag=1: must be true or false"),
        ({"needed": 1, "word": 7}, "options.word=7: must be text or null"),
        (
            {"needed": 1, "other": 2},
            "options.other=2: the thing {own} does not take it, its options are needed, flag, word",
        ),
    ],
)
def test_options_are_checked_against_the_signature(registry: Registry, options: dict, problem: str):
    name = f"{__name__}:own"
    assert registry.problems("x.", name, options) == [f"x.{problem.format(own=name)}"]
    with pytest.raises(ValueError, match="options"):
        registry.bound(name, options)


def test_an_option_without_an_annotation_takes_any_value(registry: Registry):
    name = f"{__name__}:unannotated"
    assert registry.bound(name, {"choice": [1, {"a": None}]})(3) == (3, [1, {"a": None}])


def test_a_choice_that_can_not_be_bound_says_which(registry: Registry):
    with pytest.raises(ValueError, match=r"^name=plane: there is no such thing"):
        registry.bound("plane", {})


def test_annotations_that_can_not_be_read_are_told_only_where_they_are_needed(registry: Registry):
    name = f"{__name__}:hidden"
    assert registry.problems("x.", name, {}) == []
    assert registry.problems("x.", name, {"flag": True}) == [
        f"x.name={name}: its annotations cannot be read (NameError: name 'Nowhere' is not defined)"
    ]


def test_an_option_that_others_take_says_which(registry: Registry):
    registry.register("own")(own)
    assert registry.problems("", "plain", {"flag": True}) == [
        "options.flag=true: the thing plain does not take it, it has no options; own take it"
    ]
