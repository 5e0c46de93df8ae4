"""Distillation's configs load, and a model that cannot teach another one is refused before anything starts."""

from pathlib import Path

import pytest
from test_run_config import CONFIGS, run_config

from apps.sft.config import SftConfig
from goaly.base.config import load
from goaly.base.errors import ConfigError
from goaly.losses.objective import PolicyObjective
from goaly.models.tiny_model import CHARACTERS, TinyModel, write_tiny_model
from goaly.plan.placement import processes

TINY, OF_ITSELF = CONFIGS / "distill" / "tiny.yaml", CONFIGS / "distill" / "self.yaml"


def problems(file: Path, model: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        run_config(file, model, *overrides)
    return [problem.rpartition(" (")[0] for problem in error.value.problems]


def test_the_configs_load_and_their_runs_have_a_teacher(tiny_model_folder: Path):
    for config in (
        run_config(TINY, tiny_model_folder, f"reference.path={tiny_model_folder}"),
        run_config(OF_ITSELF, tiny_model_folder),
    ):
        PolicyObjective(config.loss)
        assert config.uses_reference
        assert not config.uses_kl
        assert "reference" in [each.role for each in processes(config)]
    assert config.loss.taught == "context"
    assert config.rollout.hint is not None
    for name in ("teacher", "hints"):
        load(SftConfig, [f"--config={CONFIGS / 'sft' / name}.yaml"], prog="test", description="")


def test_a_teacher_with_another_vocabulary_is_refused_in_one_sentence(tiny_model_folder: Path, tmp_path: Path):
    other = write_tiny_model(tmp_path / "other", TinyModel(layers=1, characters=CHARACTERS[::-1]))
    (problem,) = problems(TINY, tiny_model_folder, f"reference.path={other}")
    must = (
        f"reference.path={other}: must have the vocabulary of model.path={tiny_model_folder} to be its teacher: token"
    )
    assert problem.startswith(must)
    run_config(CONFIGS / "grpo" / "tiny.yaml", tiny_model_folder, "loss.kl_coef=0.1", f"reference.path={other}")


def test_a_divergence_over_more_tokens_than_there_are_is_refused(tiny_model_folder: Path):
    (problem,) = problems(OF_ITSELF, tiny_model_folder, "loss.distill.top_k=99")
    assert problem.startswith("loss.distill.top_k=99: must be at most ")


def test_parts_of_distillation_without_the_rest_are_refused(tiny_model_folder: Path):
    found = problems(CONFIGS / "grpo" / "tiny.yaml", tiny_model_folder, "rollout.hint={text: '{answer}'}")
    assert any(one.startswith("rollout.hint") and "has no effect, loss.distill is null" in one for one in found)
    (problem,) = problems(OF_ITSELF, tiny_model_folder, "backlog.dynamic_sampling=true")
    assert problem.startswith("backlog.dynamic_sampling=true: must be false where loss.reward_weight=0.0")
    one = run_config(OF_ITSELF, tiny_model_folder, "backlog.group_size=1")  # no reward is trained, so none is compared
    assert one.backlog.group_size == 1
