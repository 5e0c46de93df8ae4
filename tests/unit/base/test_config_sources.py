"""Where values come from: files and their bases, overrides, references to other keys, and a switch."""

from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from goaly.base.config import load
from goaly.base.config.settings import Section, Settings
from goaly.base.errors import ConfigError


class Shape(Settings):
    width: int = 4


class Model(Settings):
    size: int = 100
    layers: int = 10
    shape: Shape = field(default_factory=Shape)

    def _problems(self, at: Section) -> Iterator[str]:
        if self.layers > 50:
            yield f"{at.layers}: must be at most 50"


class Train(Settings):
    model: Model = field(default_factory=Model)
    rate: float = 0.5
    threads: int = 1

    def _problems(self, at: Section) -> Iterator[str]:
        if self.rate <= 0:
            yield f"{at.rate}: must be above 0"


class Run(Settings):
    switch: ClassVar[str] = "train_small"

    name: str
    note: str | None = None
    steps: int = 8
    train_small: bool = False
    train: Train = field(default_factory=Train)
    judge: Model | None = None
    shares: dict[str, float] = field(default_factory=lambda: {"easy": 1.0})
    lengths: list[int] = field(default_factory=list)
    extra: Any = None

    @classmethod
    def switched(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Small values, which depend on others."""
        if values["steps"] > 99:
            raise ConfigError([f"steps={values['steps']}: must be small where {cls.switch} is true"])
        return {"train.model": {"layers": values["steps"]}, "train.threads": -1, "shares": {"small": 1.0}}


def read(*argv: str) -> Run:
    return load(Run, argv, prog="prog", description="").config


def problems(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        read(*argv)
    return error.value.problems


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The path of a config."""
    return tmp_path / "config.yaml"


def test_a_switch_replaces_what_files_and_defaults_say_and_is_off_afterwards(file: Path) -> None:
    file.write_text(
        "name: x\ntrain_small: true\nshares: {hard: 2}\ntrain: {threads: 9, model: {size: 7}, rate: 0.25}\n"
    )
    config = read(f"--config={file}", "steps=3")
    assert not config.train_small
    assert config.train == Train(model=Model(layers=3), threads=-1, rate=0.25)
    assert config.shares == {"small": 1.0}


def test_overrides_win_over_what_a_switch_says(file: Path) -> None:
    file.write_text("name: x\ntrain_small: true\n")
    config = read(f"--config={file}", "train.threads=5", "train.model.layers=6", "steps=4")
    assert config.train == Train(model=Model(size=100, layers=6), threads=5)
    assert read(f"--config={file}", "train_small=false").train == Train()
    assert read("name=x", "train_small=true", "steps=2").train.model.layers == 2
    assert read("name=x", "steps=2").train == Train()


def test_problems_of_what_a_switch_says_name_the_switch(file: Path) -> None:
    file.write_text("name: x\ntrain_small: true\ntrain:\n  rate: -1\n  model:\n    layers: 1\n")
    assert problems(f"--config={file}", "steps=60") == [
        "train.model.layers=60: must be at most 50 (train_small)",
        f"train.rate=-1.0: must be above 0 ({file}:4)",
    ]


def test_a_switch_that_cannot_be_followed_is_a_problem_beside_the_others(file: Path) -> None:
    file.write_text("name: x\ntrain_small: true\n")
    assert problems(f"--config={file}", "steps=100", "nonsense", "train.rate=0") == [
        "steps=100: must be small where train_small is true",
        "nonsense: an override is written key=value, such as trainer.threads=1 (override)",
        "train.rate=0.0: must be above 0 (override)",
    ]


def test_problems_of_files_and_references_are_told_also_where_a_switch_is_on(file: Path) -> None:
    file.write_text("base: no.yaml\nname: ${nowhere}\ntrain_small: true\n")
    base = f"--config={file.parent / 'no.yaml'}: cannot be read: No such file or directory"
    nowhere = f"name=${{nowhere}}: Interpolation key 'nowhere' not found ({file}:2)"
    assert problems(f"--config={file}") == [base, nowhere]
    small = "steps=100: must be small where train_small is true"
    assert problems(f"--config={file}", "steps=100") == [base, small, nowhere]


def test_a_switch_that_is_neither_on_nor_off_is_a_problem() -> None:
    assert problems("name=x", "train_small=maybe") == ["train_small=maybe: must be true or false (override)"]


def test_a_section_left_empty_in_a_file_keeps_what_its_base_says(file: Path) -> None:
    (file.parent / "base.yaml").write_text("train: {threads: 2, model: {size: 3}}\njudge: {size: 4}\n")
    file.write_text("base: base.yaml\nname: x\ntrain:\n")
    assert read(f"--config={file}").train == Train(model=Model(size=3), threads=2)
    file.write_text("base: base.yaml\nname: x\ntrain:\n  model:\n  rate: 1.5\njudge:\n")
    config = read(f"--config={file}")
    assert (config.train, config.judge) == (Train(model=Model(size=3), threads=2, rate=1.5), None)
    (file.parent / "base.yaml").write_text("train: {model: {shape: {width: 5}}}\n")
    file.write_text("base: base.yaml\nname: x\ntrain:\n  model:\n    shape:\n")
    assert read(f"--config={file}").train.model.shape.width == 5


def test_a_section_that_an_override_empties_has_its_defaults() -> None:
    assert read("name=x", "train.threads=3", "train=null").train == Train()
    assert read("name=x", "train.model=null", "train.threads=3").train == Train(threads=3)


def test_a_section_in_an_override_joins_that_of_the_file(file: Path) -> None:
    file.write_text("name: x\ntrain: {threads: 2, model: {size: 3}}\n")
    assert read(f"--config={file}", "train={model: {layers: 4}}").train == Train(
        threads=2, model=Model(size=3, layers=4)
    )


def test_a_key_that_cannot_be_set_is_told_with_its_value() -> None:
    assert problems("name=x", "lengths.5=1", "lengths.x=1") == [
        "lengths.5=1: cannot be set: list index out of range (override)",
        "lengths.x=1: cannot be set: invalid literal for int() with base 10: 'x' (override)",
    ]


def test_of_files_that_lead_back_the_last_one_is_named(file: Path) -> None:
    for name, base in (("a", "b"), ("b", "c"), ("c", "a")):
        (file.parent / f"{name}.yaml").write_text(f"base: {base}.yaml\nname: x\n")
    found = problems(f"--config={file.parent / 'a.yaml'}")
    assert found == [f"base={file.parent / 'a.yaml'}: is based on itself ({file.parent / 'c.yaml'})"]


def test_a_reference_to_nothing_is_told_with_its_key_and_spoils_no_other(file: Path) -> None:
    file.write_text("name: ${nowhere}\ntrain: {model: {size: '${train.model.no}', layers: 77}, rate: -1}\nsteps: x\n")
    assert problems(f"--config={file}") == [
        f"train.model.size=${{train.model.no}}: Interpolation key 'train.model.no' not found ({file}:2)",
        f"name=${{nowhere}}: Interpolation key 'nowhere' not found ({file}:1)",
        f"steps=x: must be an integer ({file}:3)",
        f"train.model.layers=77: must be at most 50 ({file}:2)",
        f"train.rate=-1.0: must be above 0 ({file}:2)",
    ]


def test_a_value_of_three_question_marks_counts_as_not_written(file: Path) -> None:
    file.write_text("name: ???\nsteps: ???\nlengthz: []\n")
    assert problems(f"--config={file}") == [
        "name: missing, must be text",
        f"lengthz=[]: unknown key; did you mean lengths? ({file}:3)",
    ]


def test_a_value_that_refers_to_itself_is_told_so(file: Path) -> None:
    file.write_text(
        "name: x\nextra:\n  one: {two: '${extra.other}'}\n  other: {there: '${extra.one}', more: '${no}'}\n"
    )
    assert problems(f"--config={file}") == [
        f"extra.one.two.there: refers to itself ({file}:3)",
        f"extra.one.two.more=${{no}}: Interpolation key 'no' not found ({file}:3)",
        f"extra.other.there.two: refers to itself ({file}:4)",
        f"extra.other.more=${{no}}: Interpolation key 'no' not found ({file}:4)",
    ]
    file.write_text("extra: {inner: '${extra}'}\n")
    assert problems(f"--config={file}")[0].startswith("extra.inner=${extra}: ")


def test_the_name_of_the_switch_is_no_key() -> None:
    known = "known here are name, note, steps, train_small, train, judge, shares, lengths, extra"
    assert problems("name=x", "switch=y") == [f"switch=y: unknown key; {known} (override)"]
    assert problems("name=x", "foo=1") == [f"foo=1: unknown key; {known} (override)"]
