"""Words that settings know: the same ones whether YAML or Python builds them."""

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from apps.eval.config import EvalConfig
from apps.sft.config import SftConfig
from goaly.base.config.schema import hints
from goaly.base.config.settings import Settings
from goaly.losses.settings import LossSettings, Rejection
from goaly.plan.run_config import RunConfig
from goaly.reward.settings import AdvantageSettings
from goaly.run.policy_server_config import PolicyServerConfig


def inside(annotation: Any) -> Iterator[Any]:
    """The annotation and every type in it."""
    yield annotation
    if typing.get_origin(annotation) is not Literal:
        for part in typing.get_args(annotation):
            yield from inside(part)


def classes(schema: type, seen: set[type]) -> set[type]:
    """The settings class and all that its fields can hold."""
    if schema not in seen:
        seen.add(schema)
        for annotation in hints(schema).values():
            for part in inside(annotation):
                if isinstance(part, type) and dataclasses.is_dataclass(part):
                    classes(part, seen)
    return seen


def words(annotation: Any) -> list[Any]:
    """The words that the annotation lists, at any depth."""
    return [word for part in inside(annotation) if typing.get_origin(part) is Literal for word in typing.get_args(part)]


def sound(field: dataclasses.Field[Any], annotation: Any) -> dict[str, Any]:
    """What a field that has no default is given, so that its class can be built."""
    required = field.default is field.default_factory is dataclasses.MISSING
    return {field.name: next(iter(words(annotation)), "text")} if required else {}


REACHED: set[type] = set().union(
    *(classes(schema, set()) for schema in (RunConfig, EvalConfig, SftConfig, PolicyServerConfig))
)
WITH_WORDS = sorted(
    ((schema, name) for schema in REACHED for name, annotation in hints(schema).items() if words(annotation)),
    key=lambda found: (found[0].__name__, found[1]),
)


@pytest.mark.parametrize(("schema", "name"), WITH_WORDS, ids=[f"{one.__name__}.{name}" for one, name in WITH_WORDS])
def test_no_class_of_settings_takes_a_word_that_its_field_does_not_list(schema: type, name: str):
    given: dict[str, Any] = {}
    for field in dataclasses.fields(schema):
        given |= sound(field, hints(schema)[field.name])
    assert schema(**given)
    with pytest.raises(ValueError, match=f"{schema.__name__}.{name}=no_such_word: must be "):
        schema(**given | {name: "no_such_word"})


def test_the_walk_over_settings_finds_those_in_lists_in_mappings_and_in_the_apps_own_configs():
    found = {f"{schema.__name__}.{name}" for schema, name in WITH_WORDS}
    assert found >= {"Rejection.level", "EvaluationSet.prompts", "EvalConfig.dtype", "SupervisedSettings.too_long"}
    assert found >= {"GeneratorSettings.on_update", "WeightSettings.transport", "ScheduleSettings.decay"}


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (
            lambda: LossSettings(aggregation="seq_mean"),
            "LossSettings.aggregation=seq_mean: must be one of token_mean, sequence_mean, sequence_sum or null",
        ),
        (lambda: LossSettings(proximal="old"), "LossSettings.proximal=old: must be one of sampler, trainer, interpol"),
        (lambda: LossSettings(denominator=None), "LossSettings.denominator=null: must be one of before, after"),
        (lambda: dataclasses.replace(LossSettings(), kl_estimator="k4"), "LossSettings.kl_estimator=k4: must be one"),
        (lambda: Rejection(measure="ratio", level="seq", high=2.0), "Rejection.level=seq: must be one of token, seq"),
        (lambda: AdvantageSettings(kl_estimator="kl"), "AdvantageSettings.kl_estimator=kl: must be one of k1, k2, k3"),
    ],
)
def test_a_word_that_settings_do_not_know_is_refused_when_python_builds_them_too(build, said: str):
    with pytest.raises(ValueError, match=f"^{said}"):
        build()


def test_all_unknown_words_of_one_section_are_told_at_once():
    with pytest.raises(ValueError, match=r"proximal=old: must .*\nLossSettings\.importance=all: must"):
        LossSettings(proximal="old", importance="all")  # type: ignore[arg-type]


def test_a_truth_value_is_no_number_among_words():
    class Level(Settings):
        height: Literal["low", -1] | float | None = None

    assert [Level(height=height).height for height in ("low", -1, 0.5, 3, None)] == ["low", -1, 0.5, 3, None]
    for wrong in (True, "1"):
        with pytest.raises(
            ValueError, match=f"Level.height={str(wrong).lower()}: must be one of low, -1 or a number or"
        ):
            Level(height=wrong)
