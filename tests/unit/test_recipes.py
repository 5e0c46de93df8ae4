"""Every config in the repository loads, and every recipe is what its name says."""

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from test_run_config import CONFIGS, run_config

import apps.agent.tasks
import apps.grpo.main
import apps.ppo.main
from apps.eval.config import EvalConfig
from apps.sft.config import SftConfig
from goaly.base.config import load, to_yaml
from goaly.losses.objective import PolicyObjective
from goaly.losses.policy_losses import LOSSES
from goaly.models.families import architecture, read_config
from goaly.models.tiny_model import TinyModel, write_tiny_model
from goaly.plan.dry_run import describe
from goaly.plan.placement import processes
from goaly.plan.rank_memory import memory_by_role
from goaly.plan.run_config import RunConfig
from goaly.reward.advantages import ESTIMATORS
from goaly.run.policy_server_config import PolicyServerConfig

FOLDERS = ("grpo", "ppo", "recipes")
RUNS = sorted(
    file
    for folder in FOLDERS
    for file in (CONFIGS / folder).glob("*.yaml")
    if not file.stem.startswith("qwen3_")  # those are in test_large_recipes.py
)


@pytest.fixture(scope="module")
def model_for(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """The folder of a model such as this config is for."""
    experts, shared = (
        write_tiny_model(
            tmp_path_factory.mktemp("experts"), TinyModel(layers=1, experts=8, hidden_dim=16, shared_experts=count)
        )
        for count in range(2)
    )
    return lambda file: {"tiny_moe": experts, "tiny_moe_shared": shared}.get(file.stem, tiny_model_folder)


@pytest.mark.parametrize("file", RUNS, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_run_config_loads_and_makes_an_objective(file: Path, model_for: Callable[[Path], Path], tmp_path: Path):
    config = run_config(file, model_for(file))
    PolicyObjective(config.loss)
    ESTIMATORS.bound(config.advantages.name, config.advantages.options)
    written = tmp_path / "config.yaml"
    written.write_text(to_yaml(config))
    assert run_config(written, model_for(file)) == config


def test_every_loss_and_every_estimator_has_a_recipe(model_for: Callable[[Path], Path]):
    configs = [run_config(file, model_for(file)) for file in RUNS]
    assert set(LOSSES.names) <= {config.loss.name for config in configs}
    assert set(ESTIMATORS.names) <= {config.advantages.name for config in configs}
    assert {config.loss.proximal for config in configs} == {"sampler", "trainer", "interpolated"}


def test_the_embedded_default_is_plain_grpo(tiny_model_folder: Path):
    config = run_config(CONFIGS / "grpo" / "tiny.yaml", tiny_model_folder)
    assert (config.loss.name, config.loss.options, config.loss.aggregation) == ("grpo", {}, None)
    assert (config.advantages.name, config.advantages.options) == ("group", {})
    assert not config.uses_reference


def test_a_critic_and_advantages_over_its_values_come_together_or_not_at_all(tiny_model_folder: Path):
    from goaly.base.errors import ConfigError

    def problems(*overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as error:
            run_config(CONFIGS / "ppo" / "tiny.yaml", tiny_model_folder, *overrides)
        return [problem.rpartition(" (")[0] for problem in error.value.problems]

    assert problems("critic=null") == [
        "critic=null: must be a section, because advantages.name=gae uses a critic's values; `critic: {}` has the "
        "defaults"
    ]
    assert problems("advantages.name=group", "backlog.group_size=2") == [
        "advantages.name=group: must be gae, or another that uses a critic's values, because critic is set"
    ]
    assert problems("critic.tp=3", "critic.value_clip=0.2") == [
        "critic.value_clip=0.2: has no effect on a batch's first step, and critic.epochs * trainer.minibatches is 1",
        "critic.tp=3: must divide the model's 4 attention heads",
        "critic.tp=3: must divide the model's 2 key-value heads",
    ]


def test_a_reference_is_refreshed_only_where_there_is_one_and_from_the_policy_alone(tiny_model_folder: Path):
    from goaly.base.errors import ConfigError

    file = CONFIGS / "grpo" / "tiny.yaml"
    with_reference = ("loss.kl_coef=0.1", "reference.refresh_every=3")
    (frozen,), (refreshed,) = (
        memory_by_role(run_config(file, tiny_model_folder, *overrides), on_gpu=False)["reference"]
        for overrides in (with_reference[:1], with_reference)
    )
    parameters = architecture(read_config(tiny_model_folder)).elements * 4
    coming = {"prefetch": parameters}  # the weights of the policy that come next
    assert refreshed.on_device == frozen.on_device | coming
    assert (frozen.on_host, refreshed.on_host) == ({}, {"checkpoint": parameters})
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


def test_the_plan_counts_a_reference_and_the_travelling_weights_in_the_models_compute_type(tiny_model_folder: Path):
    def parts(role: str, *overrides: str) -> dict[str, float]:
        config = run_config(
            CONFIGS / "grpo" / "tiny.yaml",
            tiny_model_folder,
            "loss.kl_coef=0.1",
            "reference.refresh_every=3",
            *overrides,
        )
        (found,) = memory_by_role(config, on_gpu=True)[role]
        return {**found.on_host, **found.on_device}

    narrow, cast = "model.dtype=bfloat16", "weights.transfer_dtype=float32"
    for role, held in (("reference", "parameters"), ("generator", "prefetch")):
        assert parts(role, narrow)[held] == parts(role)[held] / 2
        assert parts(role, narrow, cast)["prefetch"] == parts(role, narrow)["prefetch"]  # as the model has them
    assert parts("trainer", narrow)["ring"] == parts("trainer")["ring"] / 2
    assert parts("trainer", narrow, cast)["ring"] == parts("trainer")["ring"]


@pytest.mark.parametrize(
    ("overrides", "earlier"),
    [
        (("backlog.max_staleness=3", "backlog.groups_per_step=4", "backlog.window=9"), 3 + 2),
        (("backlog.max_staleness=3", "backlog.order=completion"), 3),  # where nothing bounds the age
        (("backlog.max_staleness=0",), 0),
        (("backlog.max_staleness=3", "model.numerics=fast"), 0),
    ],
)
def test_the_plan_counts_the_policies_with_which_a_bitwise_trainer_compares_older_samples(
    tiny_model_folder: Path, overrides: tuple[str, ...], earlier: int
):
    exact = "model.numerics=bitwise", "generator.on_update=recompute", "weights.slots=3"
    config = run_config(CONFIGS / "grpo" / "tiny.yaml", tiny_model_folder, *exact, *overrides)
    assert config.earlier_policies == earlier
    (found,) = memory_by_role(config, on_gpu=True)["trainer"]
    one = found.on_host["ring"] / 3
    assert found.on_host.get("earlier", 0) == (one * (earlier + 1) if earlier else 0)


def test_a_batch_has_no_more_parts_than_groups(tiny_model_folder: Path):
    from goaly.base.errors import ConfigError

    file = CONFIGS / "grpo" / "tiny.yaml"
    assert run_config(file, tiny_model_folder, "trainer.minibatches=8").trainer.minibatches == 8
    with pytest.raises(ConfigError) as error:
        run_config(file, tiny_model_folder, "trainer.minibatches=9")
    (problem,) = error.value.problems
    assert problem.startswith("trainer.minibatches=9: must be at most backlog.groups_per_step=8, because groups")
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
    from goaly.base.errors import ConfigError

    loaded = load(
        RunConfig, [f"--config={CONFIGS / config}", f"model.path={tiny_model_folder}"], prog="test", description=""
    )
    with pytest.raises(ConfigError, match=said):
        app.main(loaded)


def test_the_plan_of_a_run_with_a_critic_says_where_it_goes(tiny_model_folder: Path):
    config = run_config(CONFIGS / "ppo" / "tiny.yaml", tiny_model_folder, "critic.fsdp=2")
    (place,) = [place for place in processes(config) if place.name == "critic"]
    assert (place.role, place.count, place.threads) == ("critic", 2, 1)
    memory = memory_by_role(config, on_gpu=False)
    (critic, other), (trainer,) = memory["critic"], memory["trainer"]
    assert (critic.ranks, other.ranks) == ((0,), (1,))  # the value head has one row
    assert 0 < critic.device_gib < trainer.device_gib
    table = describe(config)
    assert re.search(r"\ncritic.1 +\S+ +- +0 +1 ", table)
    assert re.search(r"\ntrainer +\S+ +- +0 +1 ", table)


def test_a_mistaken_option_is_told_with_its_key_and_source(tiny_model_folder: Path):
    from goaly.base.errors import ConfigError

    with pytest.raises(ConfigError) as error:
        run_config(CONFIGS / "recipes" / "dapo.yaml", tiny_model_folder, "loss.name=sapo", "advantages.name=groop")
    assert error.value.problems == [
        "advantages.name=groop: there is no such advantage; known are group, group_mean, rloo, maxrl, reinforce_pp, "
        "reinforce_pp_baseline, process, gae, and your own as package.module:function (override)",
        "loss.options.clip_low=0.2: the loss sapo does not take it, its options are positive, negative; ppo, grpo, "
        f"dr_grpo, dapo, cispo, gspo, gspo_token take it ({CONFIGS / 'recipes' / 'dapo.yaml'}:18)",
        "loss.options.clip_high=0.28: the loss sapo does not take it, its options are positive, negative; ppo, grpo, "
        f"dr_grpo, dapo, cispo, gspo, gspo_token take it ({CONFIGS / 'recipes' / 'dapo.yaml'}:18)",
    ]


@pytest.mark.parametrize(
    ("schema", "name", "model"),
    [
        (SftConfig, "sft", None),
        (EvalConfig, "eval", "path"),
        (PolicyServerConfig, "serve", "path"),
        (RunConfig, "agent", "model.path"),
    ],
)
def test_the_other_apps_configs_load(
    schema: type,
    name: str,
    model: str | None,
    tiny_model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    apps.agent.tasks.main(tmp_path / "runs/tasks")
    (tmp_path / "runs/coding-tiny").mkdir()
    for chats in ("copying", "demonstrations"):
        (tmp_path / f"runs/coding-tiny/{chats}.jsonl").write_text("")
    (tmp_path / "runs/sft-coding-copying").symlink_to(tiny_model_folder)
    monkeypatch.chdir(tmp_path)
    overrides = [] if model is None else [f"{model}={tiny_model_folder}"]
    files = [file for file in (CONFIGS / name).glob("*.yaml") if "architecture:" not in file.read_text()]
    for file in files:  # the others are planned by `test_large_recipes.py`
        first = load(schema, [f"--config={file}", *overrides], prog="test", description="").config
        written = tmp_path / file.name
        written.write_text(to_yaml(first))
        assert load(schema, [f"--config={written}"], prog="test", description="").config == first
    assert files
