"""The recipes for large models: they load, fit the nodes that they name, and become tiny by one switch."""

import importlib
import json
import re
import shlex
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from test_run_config import CONFIGS

from goaly.base.config import exit_code, load, to_yaml
from goaly.base.errors import ConfigError
from goaly.coding.task_files import task_of
from goaly.losses.objective import PolicyObjective
from goaly.models.catalog import MODELS, shape_of
from goaly.models.families import architecture, read_config
from goaly.models.settings import ModelSettings
from goaly.models.tiny_model import TinyModel, write_tiny_model
from goaly.plan import tiny_run
from goaly.plan.dry_run import check_this_machine, describe
from goaly.plan.run_config import RunConfig
from goaly.prompts.mixture import prompt_mixture
from goaly.rollout.evaluation import ProblemSets

pytestmark = pytest.mark.slow

RECIPES = sorted((CONFIGS / "grpo").glob("qwen3_*.yaml"))
NAMED = {file.stem: file for file in RECIPES}
COMMANDS = {
    command: file
    for file in sorted(CONFIGS.rglob("*.yaml"))
    for command in re.findall(r"^# +(python -m .*?)(?: {2,}#.*)?$", file.read_text(), re.MULTILINE)
}
"""The commands in the comments of all recipes."""


def write_published(folder: Path) -> Path:
    """Files with the published names and columns in this folder."""
    folder.mkdir()
    dapo = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": f"What is {n % 6} + 1? End with Answer: $Answer", "role": "user"}],
            "reward_model": {"ground_truth": str(n % 6 + 1), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"id-{n % 6}"},
        }
        for n in range(24)
    ]
    aime24 = [{"ID": f"2024-I-{n}", "Problem": f"{n}+1?", "Solution": "", "Answer": n + 1} for n in range(3)]
    aime25 = [{"question": f"{n}+2?", "answer": str(n + 2)} for n in range(2)]
    for name, records in (("dapo-math-17k", dapo), ("aime_2024_problems", aime24)):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), folder / f"{name}.parquet")
    for name, records in (("aime2025-I", aime25), ("aime2025-II", [{"question": "x?", "answer": "336^\\circ"}])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that name files in the published formats."""
    folder = write_published(tmp_path_factory.mktemp("published") / "data")
    aime25 = [str(folder / f"aime2025-{part}.jsonl") for part in ("I", "II")]
    return [
        f"prompts.files=[{folder / 'dapo-math-17k.parquet'}]",
        f"evaluation.sets.aime24.files=[{folder / 'aime_2024_problems.parquet'}]",
        f"evaluation.sets.aime25.files=[{', '.join(aime25)}]",
    ]


@pytest.fixture(autouse=True)
def tiny_folder_elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_run, "FOLDER", tmp_path_factory.getbasetemp() / "tiny-models")


def config_of(file: Path, data: list[str], *overrides: str) -> RunConfig:
    return load(RunConfig, [f"--config={file}", *data, *overrides], prog="test", description="").config


def nodes(file: Path) -> str:
    """The cluster that the recipe's comment names."""
    found = re.search(r"--dry-run '(hosts\.imagine=[^']*)'", file.read_text())
    assert found is not None
    return found[1]


def test_there_is_a_recipe_for_each_size():
    assert set(NAMED) == {"qwen3_8b", "qwen3_32b", "qwen3_30b_a3b", "qwen3_235b_a22b"}


def test_a_recipe_reads_the_published_files_by_their_own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_published(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    config = config_of(NAMED["qwen3_30b_a3b"], [])
    aime24, aime25 = ProblemSets(config.evaluation, config.prompts).chosen()
    assert {prompt.id: prompt.answer for prompt in aime24.prompts} == {f"2024-I-{n}": f"{n + 1}" for n in range(3)}
    assert sorted(str(prompt.answer) for prompt in aime25.prompts) == ["2", "3", "336^\\circ"]
    assert all("\\boxed{}" in prompt.messages[0].content for prompt in (*aime24.prompts, *aime25.prompts))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_large_recipe_loads_is_the_working_setting_and_gives_prompts(file: Path, data: list[str], tmp_path: Path):
    config = config_of(file, data)
    PolicyObjective(config.loss)
    assert config.backlog.max_staleness == 8
    assert config.advantages.overlong is not None
    assert config.advantages.overlong.penalty == 0.5  # rewards are 0 and 1, DAPO's -1 and 1
    assert config.loss.name == ("gspo" if MODELS[str(config.model.architecture)].experts else "dapo")
    mixture = prompt_mixture(config.prompts)
    assert {mixture.next().answer for _ in range(6)} == {str(n + 1) for n in range(6)}
    assert list(config.evaluation.named) == ["aime24", "aime25"]
    assert config.max_context == 22528  # of what is trained
    for one in config.evaluation.named.values():
        assert one.sampled(config.sampling).max_tokens == 38912  # of Qwen3's report
    written = tmp_path / "config.yaml"
    written.write_text(to_yaml(config))
    assert load(RunConfig, [f"--config={written}"], prog="", description="").config == config


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_in_a_recipe_runs_as_it_stands_and_its_dry_run_needs_no_data(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for folder in (CONFIGS, CONFIGS.parent / "apps"):
        (tmp_path / folder.name).symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    _, _, name, *arguments = shlex.split(command)
    assert f"configs/{COMMANDS[command].relative_to(CONFIGS)}" in arguments
    plans = "--dry-run" in arguments
    if not plans:
        write_published(tmp_path / "data")
        arguments.append("--dry-run")
    main = importlib.import_module(name).main
    assert exit_code(main, RunConfig, arguments, prog=name, description="") == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    for file in re.findall(r"data/[\w.-]+", COMMANDS[command].read_text()):
        assert (f"{file} does not exist here, so its records are not checked" in printed) == plans
    assert ("has no config.json" in printed) == plans


def test_files_that_are_not_here_are_refused_unless_the_hosts_are_imagined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    absent = ["dapo-math-17k.parquet", "aime_2024_problems.parquet", "aime2025-I.jsonl", "aime2025-II.jsonl"]
    with pytest.raises(ConfigError) as error:
        config_of(NAMED["qwen3_8b"], [])
    assert [problem.rpartition(": ")[2] for problem in error.value.problems] == [
        f"data/{file} does not exist" for file in absent
    ]
    write_published(tmp_path / "data")
    (tmp_path / "data" / absent[0]).write_text("no parquet")
    with pytest.raises(ConfigError, match=r"prompts\.files: "):
        config_of(NAMED["qwen3_8b"], [], "hosts.imagine={}")


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_large_recipe_fits_the_nodes_that_it_names_and_not_half_their_memory(file: Path, data: list[str]):
    cluster = nodes(file)
    assert "139" in cluster  # GiB of an H200
    with pytest.raises(ConfigError, match=r"a rank needs \S+ GiB"):
        describe(config_of(file, data, cluster.replace("gpu_gib: 139", "gpu_gib: 60")))
    with pytest.raises(ConfigError, match=r"hosts\.imagine\.host_gib=150: must be at least \d+"):
        describe(config_of(file, data, re.sub(r"host_gib: \d+", "host_gib: 150", cluster)))


def test_a_cache_that_leaves_the_libraries_nothing_is_refused_with_one_that_fits(data: list[str]):
    """123 GiB of cache and 15.3 of weights would leave 0.7 of 139."""
    file = NAMED["qwen3_8b"]
    with pytest.raises(ConfigError) as error:
        describe(config_of(file, data, nodes(file), "generator.kv_cache_gib=123"))
    (problem,) = error.value.problems
    found = re.search(r"needs 138\.3 GiB and 7\.0 free .*; (generator\.kv_cache_gib=\S+) would fit", problem)
    assert found is not None
    describe(config_of(file, data, nodes(file), found[1]))


def test_a_node_that_generates_with_the_largest_model_needs_memory_for_spares(data: list[str]):
    file = NAMED["qwen3_235b_a22b"]
    cluster = nodes(file).replace("host_gib: 1900", "host_gib: 880")
    with pytest.raises(ConfigError) as error:
        describe(config_of(file, data, cluster))
    (problem,) = error.value.problems  # the nodes that train fit
    assert "(generator prefetch 876.4, generator landing 16.0, rest 0.0)" in problem


def test_a_model_that_is_known_by_name_needs_a_folder_only_to_run(data: list[str]):
    with pytest.raises(ConfigError, match=r"model\.path=models/Qwen3-8B: has no config\.json"):
        check_this_machine(config_of(NAMED["qwen3_8b"], data))
    with pytest.raises(ConfigError, match=r"path=models/Qwen3-8B: has no config\.json"):
        config_of(NAMED["qwen3_8b"], data, "model.architecture=null")


def test_a_folder_of_another_model_than_the_named_one_is_refused(tmp_path: Path, data: list[str]):
    other = write_tiny_model(tmp_path / "other", TinyModel(layers=1))
    with pytest.raises(ConfigError, match=r"model.path=.*: has layers=1, dim=96, .*, must be qwen3-8b"):
        config_of(NAMED["qwen3_8b"], data, f"model.path={other}")
    assert shape_of(ModelSettings(path=str(other))).layers == 1


PATTERNS = {  # trainer: fsdp, tp, ep; generator: replicas, tp, ep
    "qwen3_8b": ((2, 1, 1), (2, 1, 1)),
    "qwen3_32b": ((2, 1, 1), (1, 2, 1)),
    "qwen3_30b_a3b": ((2, 1, 2), (1, 2, 2)),
    "qwen3_235b_a22b": ((2, 1, 2), (1, 2, 2)),
}


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_tiny_recipe_keeps_family_experts_loss_and_the_pattern_of_parallelism(file: Path, data: list[str]):
    large, config = config_of(file, data), config_of(file, data, "model.tiny=true")
    shape = architecture(read_config(config.model.path))
    wanted = MODELS[str(large.model.architecture)]
    same = ("family", "experts", "experts_per_token", "normalizes_routing", "tied", "qk_norm")
    assert [getattr(shape, key) for key in same] == [getattr(wanted, key) for key in same]
    trainer, generator = config.trainer, config.generator
    assert ((trainer.fsdp, trainer.tp, trainer.ep), (generator.replicas, generator.tp, generator.ep)) == PATTERNS[
        file.stem
    ]
    assert shape.elements < 2_000_000
    assert not config.model.tiny
    for key in (
        "loss",
        "prompts",
        "advantages.name",
        "advantages.overlong.penalty",
        "model.dtype",
        "trainer.optimizer",
        "reward.verifier",
    ):
        assert of(config, key) == of(large, key)
    assert config.backlog.max_staleness == 8
    assert trainer.minibatches == large.trainer.minibatches
    check_this_machine(config)


def test_both_recipes_with_experts_become_the_same_tiny_run(data: list[str]):
    """So a whole run of one, in `tests/loop/test_tiny_recipe.py`, is one of the other."""
    smaller, larger = (
        to_yaml(config_of(NAMED[name], data, "model.tiny=true", "run_dir=run", "generator.start_minutes=1"))
        for name in ("qwen3_30b_a3b", "qwen3_235b_a22b")
    )
    assert smaller == larger


def of(config: object, key: str) -> object:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def test_pipeline_stages_become_two_of_a_tiny_model() -> None:
    replaced = tiny_run.tiny_values({"model": {"architecture": "qwen3-8b"}, "trainer": {"pp": 4, "fsdp": 1}})
    assert (replaced["trainer.pp"], replaced["trainer.fsdp"]) == (2, 1)


def test_overrides_count_after_the_switch_and_the_resolved_config_is_tiny_by_itself(data: list[str], tmp_path: Path):
    config = config_of(NAMED["qwen3_30b_a3b"], data, "model.tiny=true", "steps=7", "trainer.fsdp=4")
    assert (config.steps, config.trainer.fsdp) == (7, 4)
    written = tmp_path / "config.yaml"
    written.write_text(to_yaml(config))
    assert load(RunConfig, [f"--config={written}"], prog="", description="").config == config


def test_a_mistake_in_what_the_switch_replaces_is_blamed_on_the_switch_or_the_override(data: list[str]):
    with pytest.raises(ConfigError) as error:
        config_of(NAMED["qwen3_30b_a3b"], data, "model.tiny=true", "sampling.max_tokens=2048")
    assert error.value.problems == [
        "sampling.max_tokens=2048: must leave room for a prompt in 2048 tokens, the least of generator.max_context and "
        "backlog.row_length (override)"
    ]
    with pytest.raises(
        ConfigError, match=r"model\.tiny=true: is for models of the Qwen3 family, this one is of llama3"
    ):
        config_of(NAMED["qwen3_8b"], data, "model.tiny=true", "model.architecture=llama3-70b")
    assert (
        ModelSettings(path="x", architecture="qwen3-8b", tiny=True)
        .problems("model.")[0]
        .startswith("model.tiny=true: has no effect on settings in Python")
    )


@pytest.mark.parametrize("name", ["qwen3_8b_swegym", "qwen3_30b_a3b_swegym"])
def test_a_recipe_of_swe_gym_has_room_for_its_attempts_and_reads_published_rows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "data").mkdir()
    for file, repo in (("swe-gym", "getmoto/moto"), ("swe-bench-verified", "psf/requests")):
        row = {
            "instance_id": f"{repo.replace('/', '__')}-1",
            "repo": repo,
            "base_commit": "0" * 40,
            "problem_statement": "It fails.",
            "hints_text": "",
            "created_at": "2024-01-01",
            "version": "1.0",
            "patch": "--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-1\n+2\n",
            "test_patch": "--- a/test_a.py\n+++ b/test_a.py\n@@ -1 +1 @@\n-1\n+2\n",
            "FAIL_TO_PASS": ["test_a.py::test_a"] if file == "swe-gym" else '["test_a.py::test_a"]',
            "PASS_TO_PASS": [] if file == "swe-gym" else "[]",
        }
        (tmp_path / "data" / f"{file}.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.chdir(tmp_path)
    config = config_of(CONFIGS / "coding" / f"{name}.yaml", [])
    assert config.rollout.workers * config.rollout.concurrency >= 500
    assert config.sandbox.pool.most >= config.rollout.concurrency
    assert config.max_context == config.generator.max_context == (131072 if "30b" in name else 40960)
    prompt = prompt_mixture(config.prompts).next()
    assert prompt.messages[0].content == "It fails."
    assert config.coding is not None
    assert task_of(prompt, config.coding.tasks).image == "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-1"
    (verified,) = ProblemSets(config.evaluation, config.prompts).chosen()
    (asked,) = verified.prompts
    assert task_of(asked, config.coding.tasks).image == "xingyaoww/sweb.eval.x86_64.psf_s_requests-1"
