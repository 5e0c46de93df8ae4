"""Every config in the repository loads, and every recipe is what its name says."""

import re
from pathlib import Path
from types import ModuleType

import pytest

import apps.grpo.main
import apps.ppo.main
from apps.eval.config import EvalConfig
from apps.sft.config import SftConfig
from goaly.config import load, to_yaml
from goaly.losses.objective import policy_loss
from goaly.losses.policy import LOSSES
from goaly.models.tiny import TinyModel, write_tiny_model
from goaly.reward.advantages import ESTIMATORS
from goaly.run.config import RunConfig
from goaly.run.plan import describe, needs
from goaly.run.processes import processes

CONFIGS = Path(__file__).parents[2] / "configs"
RUNS = sorted(file for folder in ("grpo", "ppo", "recipes") for file in (CONFIGS / folder).glob("*.yaml"))


def run_config(file: Path, model: Path, *overrides: str) -> RunConfig:
    arguments = [f"--config={file}", f"model.path={model}", *overrides]
    return load(RunConfig, arguments, prog="test", description="").config


@pytest.mark.parametrize("file", RUNS, ids=lambda file: f"{file.parent.name}/{file.stem}")
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


def test_a_critic_and_advantages_over_its_values_come_together_or_not_at_all(tiny_model_folder: Path):
    from goaly.errors import ConfigError

    def problems(*overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as error:
            run_config(CONFIGS / "ppo" / "tiny.yaml", tiny_model_folder, *overrides)
        return [problem.rpartition(" (")[0] for problem in error.value.problems]

    assert problems("critic=null") == [
        "critic=null: must be a section, because advantages.name=gae is over a critic's values; `critic: {}` has the "
        "defaults"
    ]
    assert problems("advantages.name=group", "backlog.group_size=2") == [
        "advantages.name=group: must be one over a critic's values, such as gae, because there is a section critic, or "
        "nothing uses them"
    ]
    assert problems("critic.tp=3", "critic.value_clip=0.2") == [
        "critic.value_clip=0.2: has no effect on a batch's first step, and critic.epochs * trainer.minibatches is 1",
        "critic.tp=3: must divide the model's 4 attention heads",
        "critic.tp=3: must divide the model's 2 key-value heads",
    ]


def test_a_reference_is_refreshed_only_where_there_is_one_and_from_the_policy_alone(tiny_model_folder: Path):
    from goaly.errors import ConfigError

    file = CONFIGS / "grpo" / "tiny.yaml"
    with_reference = ("loss.kl_coef=0.1", "reference.refresh_every=3")
    frozen, refreshed = (
        needs(run_config(file, tiny_model_folder, *overrides))["reference"][0]
        for overrides in (with_reference[:1], with_reference)
    )
    assert refreshed == 2 * frozen
    for overrides, said in [
        (["reference.refresh_every=3"], r"refresh_every=3: has no effect, loss.kl_coef and advantages.kl_coef are 0"),
        (
            [*with_reference, f"reference.path={tiny_model_folder}"],
            r"path=.*: must be null where reference.refresh_every",
        ),
        (["loss.kl_coef=0.1", "reference.refresh_every=0"], r"refresh_every=0: must be at least 1, or null"),
    ]:
        with pytest.raises(ConfigError, match=said):
            run_config(file, tiny_model_folder, *overrides)


def test_a_critic_or_a_reference_of_ones_own_is_looked_at_as_the_model_is(tiny_model_folder: Path, tmp_path: Path):
    from goaly.errors import ConfigError

    other = write_tiny_model(tmp_path / "other", TinyModel(layers=1, heads=6, kv_heads=3))
    kl, own = "loss.kl_coef=0.1", f"path={other}"
    nowhere = "/nowhere: has no config.json, must be a Hugging Face folder"
    for overrides, said in [
        ([kl, "reference.path=/nowhere"], [f"reference.path={nowhere}"]),
        (["critic.path=/nowhere"], [f"critic.path={nowhere}"]),
        (
            [kl, "reference.tp=3"],
            [f"reference.tp=3: must divide the model's {count} heads" for count in ("4 attention", "2 key-value")],
        ),
        (
            [kl, f"reference.{own}", "reference.tp=4", f"critic.{own}", "critic.tp=2"],
            [
                "critic.tp=2: must divide the critic's 3 key-value heads",
                "reference.tp=4: must divide the reference's 6 attention heads",
                "reference.tp=4: must divide the reference's 3 key-value heads",
            ],
        ),
    ]:
        with pytest.raises(ConfigError) as error:
            run_config(CONFIGS / "ppo" / "tiny.yaml", tiny_model_folder, *overrides)
        assert [problem.rpartition(" (")[0] for problem in error.value.problems] == said
    assert run_config(CONFIGS / "ppo" / "tiny.yaml", tiny_model_folder, kl, f"reference.{own}", "reference.tp=3")


@pytest.mark.parametrize("name", ESTIMATORS.names)
def test_a_sample_alone_is_refused_where_it_is_compared_with_its_group(name: str, tiny_model_folder: Path):
    from goaly.errors import ConfigError

    folder, *others = ("ppo",) if name == "gae" else ("grpo", f"advantages.name={name}")
    overrides = [*others, "backlog.group_size=1"]
    if name in ("gae", "reinforce_pp", "process"):  # process compares the steps of an answer, too
        run_config(CONFIGS / folder / "tiny.yaml", tiny_model_folder, *overrides)
        return
    with pytest.raises(ConfigError) as error:
        run_config(CONFIGS / folder / "tiny.yaml", tiny_model_folder, *overrides)
    assert error.value.problems == [
        f"backlog.group_size=1: must be at least 2, because advantages.name={name} compares a sample with the others "
        "of its group (override)"
    ]


CONSTANT = "trainer.schedule.decay is constant"
ONE_STEP = "with loss.proximal=trainer and trainer.minibatches=1 the ratio is 1"


@pytest.mark.parametrize(
    ("set_idle", "why", "more"),
    [
        ("backlog.window=3", "backlog.order is completion", ["backlog.order=completion"]),
        ("backlog.max_length_weight=9.0", "backlog.length_correction is none", []),
        ("backlog.max_no_signal_share=0.5", "backlog.dynamic_sampling is off", []),
        ("reference.threads=2", "loss.kl_coef and advantages.kl_coef are 0", []),
        (
            "trainer.schedule.min_lr_factor=0.1",
            "trainer.schedule.decay is constant",
            ["trainer.schedule.total_steps=null"],
        ),
        ("trainer.schedule.total_steps=9", "trainer.schedule.decay is constant", ["trainer.schedule.min_lr_factor=0"]),
        ("loss.max_age=9", "backlog lets no token become more than 9 versions old", []),
        ("advantages.overlong.limit=266", "a sequence has at most 256 tokens", ["advantages.overlong.buffer=10"]),
        ("loss.options.clip_low=0.1", ONE_STEP, ["loss.proximal=trainer"]),
        ("loss.options.positive=2.0", ONE_STEP, ["loss.proximal=trainer", "loss.name=sapo"]),
    ],
)
def test_what_another_setting_leaves_without_effect_is_told(set_idle, why, more, tiny_model_folder: Path):
    from goaly.errors import ConfigError

    file = CONFIGS / "grpo" / "tiny.yaml"
    if set_idle.startswith("trainer.schedule"):
        more = [*more, "trainer.schedule.decay=constant"]
    with pytest.raises(ConfigError) as error:
        run_config(file, tiny_model_folder, *more, set_idle)
    assert error.value.problems == [f"{set_idle}: has no effect, {why} (override)"]


def test_a_clip_has_an_effect_from_a_batchs_second_step_on_and_a_loss_of_ones_own_may_always(tiny_model_folder: Path):
    file, clip = CONFIGS / "grpo" / "tiny.yaml", "loss.options.clip_low=0.1"
    assert run_config(file, tiny_model_folder, "loss.proximal=trainer", "trainer.minibatches=2", clip)
    own = ["loss.name=tests.unit.losses.test_objective:share_clipped", "loss.options.most=2.0"]
    assert run_config(file, tiny_model_folder, "loss.proximal=trainer", *own)
    assert run_config(file, tiny_model_folder, "loss.max_age=8")


def test_a_batch_has_no_more_parts_than_groups(tiny_model_folder: Path):
    from goaly.errors import ConfigError

    file = CONFIGS / "grpo" / "tiny.yaml"
    assert run_config(file, tiny_model_folder, "trainer.minibatches=8").trainer.minibatches == 8
    with pytest.raises(ConfigError) as error:
        run_config(file, tiny_model_folder, "trainer.minibatches=9")
    (problem,) = error.value.problems
    assert problem.startswith("trainer.minibatches=9: must be at most backlog.groups_per_step=8, for groups stay whole")
    with pytest.raises(ConfigError, match=r"trainer\.minibatches=0: must be at least 1"):
        run_config(file, tiny_model_folder, "trainer.minibatches=0")


@pytest.mark.parametrize(
    ("app", "config", "said"),
    [
        (apps.grpo.main, "ppo/tiny.yaml", "critic: is for a script that trains one, such as apps.ppo.main"),
        (apps.ppo.main, "grpo/tiny.yaml", "critic=null: must be a section, because this script trains a critic"),
    ],
)
def test_a_script_refuses_a_config_that_is_not_for_it(app: ModuleType, config: str, said: str, tiny_model_folder: Path):
    from goaly.errors import ConfigError

    loaded = load(
        RunConfig, [f"--config={CONFIGS / config}", f"model.path={tiny_model_folder}"], prog="test", description=""
    )
    with pytest.raises(ConfigError, match=said):
        app.main(loaded)


def test_the_plan_of_a_run_with_a_critic_says_where_it_goes(tiny_model_folder: Path):
    config = run_config(CONFIGS / "ppo" / "tiny.yaml", tiny_model_folder, "critic.fsdp=2")
    (place,) = [place for place in processes(config) if place.name == "critic"]
    assert (place.role, place.count, place.threads) == ("critic", 2, 1)
    assert 0 < needs(config)["critic"][0] < needs(config)["trainer"][0]
    assert re.search(r"\ncritic +2 +1 +0 ", describe(config))


def test_a_mistaken_option_is_told_with_its_key_and_source(tiny_model_folder: Path):
    from goaly.errors import ConfigError

    with pytest.raises(ConfigError) as error:
        run_config(CONFIGS / "recipes" / "dapo.yaml", tiny_model_folder, "loss.name=sapo", "advantages.name=groop")
    assert error.value.problems == [
        "advantages.name=groop: there is no such advantage; known are group, group_mean, rloo, reinforce_pp, "
        "reinforce_pp_baseline, process, gae, and your own as package.module:function (override)",
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
