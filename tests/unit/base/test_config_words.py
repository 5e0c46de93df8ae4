"""Types, values and keys of settings in the words and values that users and files see."""

from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Le, Lt, MultipleOf

from goaly.base.config import load
from goaly.base.config.check import all_problems, check
from goaly.base.config.schema import default_values, join, keys, members, plain, section_of
from goaly.base.config.settings import AtLeastOne, PositiveInt, Section, Settings, Share
from goaly.base.config.wording import bounds_words, show, type_words
from goaly.base.errors import ConfigError


class Model(Settings):
    layers: int = 2
    name: str = "tiny"


class Deep(Settings):
    """A section with sections."""

    sizes: list[int] = field(default_factory=list)
    model: Model = field(default_factory=lambda: Model(layers=5))
    seed: int = 0

    def _problems(self, at: Section) -> Iterator[str]:
        if self.seed < 0:
            yield f"{at.seed}: must not be negative"
        if self.model.layers == 13:
            yield f"{at.model.layers}: brings bad luck"


class Root(Settings):
    steps: PositiveInt
    pair: tuple[int, float] = (1, 2.0)
    alone: tuple[int] = (1,)
    models: tuple[Model, ...] = ()
    weights: dict[str, Model] = field(default_factory=dict)
    deep: Deep = field(default_factory=Deep)
    critic: Model | None = field(default_factory=Model)
    loops: PositiveInt | Literal["auto"] = 1

    def _problems(self, at: Section) -> Iterator[str]:
        if self.pair[0] < 0:
            yield f"{at.pair}: must not fall in many steps"


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "an integer"),
        (float | None, "a number or null"),
        (bool, "true or false"),
        (Path, "a path"),
        (Any, "any value"),
        (Literal["a"], "a"),
        (Literal["a", "b"] | bool, "one of a, b or true or false"),
        (list, "a list"),
        (list[Any], "a list"),
        (tuple[str, ...], "a list, each text"),
        (tuple[int, str], "a list of 2: an integer, text"),
        (dict, "a mapping"),
        (dict[str, Any], "a mapping"),
        (dict[str, list[int]], "a mapping, each value a list, each an integer"),
        (Model, "a section (layers, name)"),
        (PositiveInt | None, "an integer or null"),
    ],
)
def test_a_type_is_told_in_words(annotation: Any, words: str) -> None:
    assert type_words(annotation) == words


@pytest.mark.parametrize(
    ("annotation", "with_bounds", "bounds"),
    [
        (PositiveInt | None, "an integer (at least 1) or null", "at least 1, or null"),
        (Share, "a number (between 0 and 1)", "between 0 and 1"),
        (Annotated[float, Gt(0), Le(2)], "a number (above 0 and at most 2)", "above 0 and at most 2"),
        (Annotated[float, Ge(0), Lt(2)], "a number (at least 0 and below 2)", "at least 0 and below 2"),
        (Annotated[int, MultipleOf(8)], "an integer (a multiple of 8)", "a multiple of 8"),
        (Annotated[str, "non-empty"], "text (a non-empty text)", "a non-empty text"),
        (Literal["auto"] | AtLeastOne, "auto or a number (at least 1)", "auto, or at least 1"),
    ],
)
def test_bounds_are_told_beside_a_type_or_alone(annotation: Any, with_bounds: str, bounds: str) -> None:
    assert type_words(annotation, with_bounds=True) == with_bounds
    assert bounds_words(annotation) == bounds


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (1e-6, "1e-06"),
        ("", '""'),
        ("a b", "a b"),
        ((1, [None, "x"]), "[1, [null, x]]"),
        ({"a": {}, "b": [True]}, "{a: {}, b: [true]}"),
        ("x" * 80, "x" * 80),
        ("x" * 81, "x" * 77 + "..."),
    ],
)
def test_a_value_is_shown_as_one_would_write_it(value: Any, text: str) -> None:
    assert show(value) == text


def test_keys_are_listed_with_their_sections_before_what_is_in_them() -> None:
    found = {key.path: key for key in keys(Root)}
    assert list(found) == [
        *("steps", "pair", "alone", "models", "weights", "deep", "deep.sizes", "deep.model", "deep.model.layers"),
        *("deep.model.name", "deep.seed", "critic", "critic.layers", "critic.name", "loops"),
    ]
    assert [path for path, key in found.items() if key.required] == ["steps"]
    layers = found["deep.model.layers"]
    assert (layers.name, layers.default, layers.owner, layers.section) == ("layers", 5, Model, None)
    assert found["critic.layers"].default == 2
    assert (found["critic"].section, found["deep"].section, found["models"].section) == (Model, Deep, None)


def test_keys_below_a_path_begin_with_it_and_have_the_defaults_that_are_given() -> None:
    found = {key.path: key.default for key in keys(Model, "job.model", Model(layers=7))}
    assert found == {"job.model.layers": 7, "job.model.name": "tiny"}

    class Needs(Settings):
        inner: Model
        count: int

    assert {key.path: (key.default, key.required) for key in keys(Needs)} == {
        "inner": (None, False),
        "inner.layers": (2, False),
        "inner.name": ("tiny", False),
        "count": (None, True),
    }
    assert default_values(Needs) == {"inner": {"layers": 2, "name": "tiny"}}


def test_members_and_sections_of_an_annotation() -> None:
    assert members(Annotated[int, Ge(1)] | None) == (int, type(None))
    assert members(Model) == (Model,)
    assert section_of(Model | None) is Model
    assert section_of(list[Model]) is None
    assert join("", "a", 0, "b") == "a.0.b"


def test_plain_values_are_those_of_yaml() -> None:
    value = {"path": Path("a/b"), "many": (1, [Model()]), "text": "a${b}\\${c}", "on": True, "none": None}
    assert plain(value) == {
        "path": "a/b",
        "many": [1, [{"layers": 2, "name": "tiny"}]],
        "text": "a\\${b}\\\\\\${c}",
        "on": True,
        "none": None,
    }


def test_a_section_names_its_keys_with_their_values_and_those_in_it() -> None:
    root = Root(steps=3, deep=Deep(seed=4))
    at = Section(root, "job.")
    assert (f"{at}", f"{at.steps}", f"{at}steps") == ("job.", "job.steps=3", "job.steps")
    assert (f"{at.deep}", f"{at.deep.seed}", f"{at.deep.model.name}") == (
        "job.deep.",
        "job.deep.seed=4",
        "job.deep.model.name=tiny",
    )
    assert f"{Section(Model(name=''), '').name}" == 'name=""'
    assert f"{Section(Model(name='x' * 99), '').name}" == f"name={'x' * 99}"  # text as it was written
    assert f"{at.critic}" == "job.critic."


def test_keys_that_have_no_effect_are_told_if_they_are_set() -> None:
    changed, default = Model(layers=9, name="x"), Model()
    at = Section(changed, "model.")
    both = ["model.layers=9: has no effect, it is off", "model.name=x: has no effect, it is off"]
    assert list(at.idle("it is off")) == both
    assert list(at.idle("it is off", "name")) == both[1:]
    assert list(at.idle("it is off", "layers", "name")) == both
    assert list(Section(default, "model.").idle("it is off")) == []
    assert list(Section(Root(steps=3), "").idle("it is off", "steps")) == ["steps=3: has no effect, it is off"]


def test_the_problems_of_all_sections_are_told_those_within_before_those_around() -> None:
    root = Root(steps=3, pair=(-1, 0.0), deep=Deep(seed=-1, model=Model(layers=13)))
    within = ["deep.seed=-1: must not be negative", "deep.model.layers=13: brings bad luck"]
    around = ["pair=[-1, 0.0]: must not fall in many steps"]
    assert list(all_problems(root)) == [*within, *around]
    assert root.problems("") == around
    assert list(all_problems([{"a": root.deep}], "jobs")) == [
        "jobs.0.a.seed=-1: must not be negative",
        "jobs.0.a.model.layers=13: brings bad luck",
    ]


def problems(values: dict[str, Any], path: str = "") -> list[str]:
    config, found = check(Root, values, path)
    assert (config is None) == any("must be" in line or "unknown" in line or "missing" in line for line in found)
    return found


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        ({"steps": 0, "pair": [-1, 0.5]}, ["steps=0: must be at least 1"]),
        ({"steps": 1, "pair": [1, "x"]}, ["pair.1=x: must be a number"]),
        ({"steps": 1, "alone": ["x"]}, ["alone.0=x: must be an integer"]),
        ({"steps": 1, "models": [{}, {"layers": "x"}]}, ["models.1.layers=x: must be an integer"]),
        (
            {"steps": 1, "models": [3, {"layers": "x"}]},
            [
                "models.0=3: is a section, set its keys: models.0.layers, models.0.name",
                "models.1.layers=x: must be an integer",
            ],
        ),
        ({"steps": 1, "weights": {"a": {"layers": "x"}}}, ["weights.a.layers=x: must be an integer"]),
        (
            {"steps": 1, "deep": {"sizes": [1, "x"], "seed": -1}},
            ["deep.sizes.1=x: must be an integer", "deep.seed=-1: must not be negative"],
        ),
        ({"steps": 1, "loops": 0}, ["loops=0: must be at least 1, or auto"]),
        ({"steps": 1, "loops": "never"}, ["loops=never: must be an integer or auto"]),
        (
            {"steps": 1, "deep": {"model": {"zzzzz": 1}}},
            ["deep.model.zzzzz=1: unknown key; known here are layers, name"],
        ),
        ({"steps": 1, "seed": 1}, ["seed=1: unknown key; did you mean deep.seed?"]),
        (
            {"steps": 1, "layers": 1},
            ["layers=1: unknown key; did you mean deep.model.layers or critic.layers?"],
        ),
    ],
)
def test_what_is_wrong_is_told_and_nothing_else(values: dict[str, Any], lines: list[str]) -> None:
    assert problems(values) == lines


@pytest.mark.parametrize("value", [3, ["x"], {"a": "x"}])
def test_a_value_of_none_of_several_types_is_a_problem_not_a_crash(value: Any) -> None:
    class Union(Settings):
        either: list[int] | dict[str, int] | None = None

    config, found = check(Union, {"either": value})
    assert config is None
    assert found
    assert all(line.startswith("either") and line.endswith("must be an integer") for line in found)


def test_a_section_that_is_checked_alone_names_its_keys_from_the_root() -> None:
    assert problems({"deep": {"seed": -1, "model": 3}, "stepz": 1}, "job") == [
        "job.steps: missing, must be an integer",
        "job.deep.model=3: is a section, set its keys: job.deep.model.layers, job.deep.model.name",
        "job.stepz=1: unknown key; did you mean job.steps?",
        "job.deep.seed=-1: must not be negative",
    ]
    assert problems({"steps": 1, "layers": 1}, "job") == [
        "job.layers=1: unknown key; did you mean job.deep.model.layers or job.critic.layers?"
    ]


def test_a_word_of_a_problem_that_is_also_a_wrong_key_hides_no_problem() -> None:
    class Words(Settings):
        steps: PositiveInt = 1
        twice: int = 2

        def _problems(self, at: Section) -> Iterator[str]:
            yield f"{at.twice}: must be even in all steps"
            yield f"{at.twice}: must be twice {at.steps}"

    assert check(Words, {"steps": 0})[1] == ["steps=0: must be at least 1", "twice=2: must be even in all steps"]
    assert check(Words, {"steps": 0}, "job")[1] == [
        "job.steps=0: must be at least 1",
        "job.twice=2: must be even in all steps",
    ]


def test_checking_values_leaves_them_as_they_are() -> None:
    values = {"steps": 1, "deep": {"sizes": ["x"], "zzz": 1}}
    assert len(problems(values)) == 2
    assert values == {"steps": 1, "deep": {"sizes": ["x"], "zzz": 1}}


def test_for_a_key_unlike_any_beside_it_the_key_of_the_most_similar_path_is_meant() -> None:
    class Rates(Settings):
        lr: float = 1.0
        lrs: float = 1.0

    class Inner(Settings):
        opt: Rates = field(default_factory=Rates)

    class Outer(Settings):
        a: Inner = field(default_factory=Inner)

    values = {"a": {"opt": {"rl": 1.0}}}
    assert check(Outer, values)[1] == ["a.opt.rl=1.0: unknown key; did you mean a.opt.lr?"]
    assert check(Outer, values, "job")[1] == ["job.a.opt.rl=1.0: unknown key; did you mean job.a.opt.lr?"]


def test_a_required_key_may_stand_after_one_with_a_default() -> None:
    class Later(Settings):
        first: int = 1
        second: int

    assert Later(second=3).second == 3
    with pytest.raises(ConfigError) as error:
        Later()  # type: ignore[missing-argument]
    assert error.value.problems == ["Later.second: missing, must be an integer"]
    assert Later(second=3) != Later(second=4)

    class Only(Settings):
        name: str

    with pytest.raises(ConfigError) as error:
        Only()  # type: ignore[missing-argument]
    assert error.value.problems == ["Only.name: missing, must be text"]
    assert Model() == Model(layers=2)


def test_a_problem_with_a_default_says_that_it_is_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(Root, ["steps=1", "deep.model.layers=13", "deep.seed=-1"], prog="", description="")
    assert error.value.problems == [
        "deep.seed=-1: must not be negative (override)",
        "deep.model.layers=13: brings bad luck (override)",
    ]

    class Unlucky(Settings):
        seed: int = 13
        other: int = 0

        def _problems(self, at: Section) -> Iterator[str]:
            yield f"{at.seed}: brings bad luck"

    with pytest.raises(ConfigError) as error:
        load(Unlucky, ["other=1"], prog="", description="")
    assert error.value.problems == ["seed=13: brings bad luck (default)"]


def test_a_section_that_a_file_turns_off_is_off(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("steps: 1\ncritic: null\ndeep: null\n")
    config = load(Root, [f"--config={file}"], prog="", description="").config
    assert (config.critic, config.deep) == (None, Deep())
