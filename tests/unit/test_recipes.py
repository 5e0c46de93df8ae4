"""Every config in the repository loads, and every recipe is what its name says."""

from pathlib import Path

import pytest

from apps.eval.config import EvalConfig
from apps.sft.config import SftConfig
from goaly.config import load, to_yaml
from goaly.losses.objective import policy_loss
from goaly.losses.policy import LOSSES
from goaly.reward.advantages import ESTIMATORS
from goaly.run.config import RunConfig

CONFIGS = Path(__file__).parents[2] / "configs"
RUNS = sorted([*(CONFIGS / "grpo").glob("*.yaml"), *(CONFIGS / "recipes").glob("*.yaml")])


def run_config(file: Path, model: Path, *overrides: str) -> RunConfig:
    arguments = [f"--config={file}", f"model.path={model}", *overrides]
    return load(RunConfig, arguments, prog="test", description="").config


@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.stem)
def test_a_run_config_loads_and_makes_an_objective(file: Path, tiny_model_folder: Path, tmp_path: Path):
    config = run_config(file, tiny_model_folder)
    policy_loss(config.loss)
    ESTIMATORS.bound(config.advantages.name, config.advantages.options)
    written = tmp_path / "config.yaml"
    written.write_text(to_yaml(config))
    assert run_config(written, tiny_model_folder) == config


def test_every_loss_and_every_estimator_has_a_recipe(tiny_model_folder: Path):
    configs = [run_config(file, tiny_model_folder) for file in RUNS]
    assert set(LOSSES.names) <= {config.loss.name for config in configs}
    assert set(ESTIMATORS.names) <= {config.advantages.name for config in configs}
    assert {config.loss.proximal for config in configs} == {"sampler", "trainer", "interpolated"}


def test_the_embedded_default_is_plain_grpo(tiny_model_folder: Path):
    config = run_config(CONFIGS / "grpo" / "tiny.yaml", tiny_model_folder)
    assert (config.loss.name, config.loss.options, config.loss.aggregation) == ("grpo", {}, None)
    assert (config.advantages.name, config.advantages.options) == ("group", {})
    assert not config.uses_reference


def test_a_mistaken_option_is_told_with_its_key_and_source(tiny_model_folder: Path):
    from goaly.errors import ConfigError

    with pytest.raises(ConfigError) as error:
        run_config(CONFIGS / "recipes" / "dapo.yaml", tiny_model_folder, "loss.name=sapo", "advantages.name=groop")
    assert error.value.problems == [
        "advantages.name=groop: there is no such advantage; known are group, group_mean, rloo, reinforce_pp, "
        "reinforce_pp_baseline, process, and your own as package.module:function (override)",
        "loss.options.clip_low=0.2: the loss sapo does not take it, its options are positive, negative; ppo, grpo, "
        f"dr_grpo, dapo, cispo, gspo would ({CONFIGS / 'recipes' / 'dapo.yaml'})",
        "loss.options.clip_high=0.28: the loss sapo does not take it, its options are positive, negative; ppo, grpo, "
        f"dr_grpo, dapo, cispo, gspo would ({CONFIGS / 'recipes' / 'dapo.yaml'})",
    ]


@pytest.mark.parametrize(("schema", "name"), [(SftConfig, "sft"), (EvalConfig, "eval")])
def test_the_other_apps_configs_load(schema: type, name: str, tiny_model_folder: Path):
    overrides = [f"path={tiny_model_folder}"] if name == "eval" else []
    for file in (CONFIGS / name).glob("*.yaml"):
        load(schema, [f"--config={file}", *overrides], prog="test", description="")
