"""What a dry run prints and refuses, and what a run refuses before it starts anything."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from goaly.base.config import Loaded, load
from goaly.base.errors import ConfigError
from goaly.models.families import architecture, read_config
from goaly.models.settings import LoraSettings
from goaly.plan import dry_run
from goaly.plan.cluster import Gpu, Host
from goaly.plan.dry_run import check_this_machine, describe, held_on_gpu
from goaly.plan.host_settings import ImaginedCluster
from goaly.plan.rank_memory import memory_by_role
from goaly.plan.run_config import RunConfig
from goaly.reward import verifier_trial as trial
from goaly.run.launch import launch

GRPO = Path(__file__).parents[3] / "configs" / "grpo" / "tiny.yaml"


def run_config(model: Path, *overrides: str, bind: dict[str, list[int]] | None = None) -> RunConfig:
    arguments = [f"--config={GRPO}", f"model.path={model}", *overrides]
    config = load(RunConfig, arguments, prog="test", description="").config
    return replace(config, hosts=replace(config.hosts, bind=bind or {}))


def rows(config: RunConfig) -> dict[str, tuple[str, ...]]:
    """By process: host, GPU, cores."""
    table = describe(config).rpartition("\n\n")[2].splitlines()
    return {cells[0]: tuple(cells[1:4]) for cells in (re.split(r"  +", line) for line in table[1:])}


def test_a_dry_run_shows_host_gpu_and_cores_of_every_rank_on_an_imagined_cluster(tiny_model_folder: Path):
    config = run_config(
        tiny_model_folder,
        "hosts.imagine={hosts: 4, gpus: 8, cores: 64, numa: 2}",
        "hosts.trainer={hosts: 2, gpus: 8}",
        "trainer.fsdp=16",
        "generator.replicas=8",
        "generator.tp=2",
        "rollout.workers=4",
        "backlog.groups_per_step=16",
    )
    found = rows(config)
    assert len(found) == 16 + 16 + 1 + 4
    assert found["trainer.0"] == ("host-0", "0", "0-31")
    assert found["trainer.7"] == ("host-0", "7", "32-63")
    assert found["trainer.8"] == ("host-1", "0", "0-31")
    assert found["generator-0.0"] == ("host-2", "0", "0-31")
    assert found["generator-7.1"] == ("host-3", "7", "32-63")
    assert found["hub"] == ("host-0", "-", "any")
    assert found["rollout-3"] == ("host-3", "-", "any")


def test_a_dry_run_says_which_ranks_of_which_stage_each_row_of_memory_stands_for(tiny_model_folder: Path):
    config = run_config(
        tiny_model_folder,
        "hosts.imagine={hosts: 2, gpus: 8}",
        "trainer={pp: 2, fsdp: 5}",
        "generator={replicas: 2, tp: 2}",
    )
    table = describe(config).split("\n\n")[-2]
    named = [re.split(r"  +", line)[0] for line in table.splitlines()]
    assert named[0] == "ranks"
    trainer = [name for name in named if name.startswith("trainer")]
    assert trainer == [
        "trainer 0-3, stage 1 of 2",
        "trainer 4, stage 1 of 2",
        "trainer 5-8, stage 2 of 2",
        "trainer 9, stage 2 of 2",
    ]
    assert named[-2:] == ["generator 0-1 of each replica", "hub 0"]


def test_a_dry_run_shows_cores_that_are_not_in_a_row(tiny_model_folder: Path):
    config = run_config(tiny_model_folder, "hosts.imagine={cores: 8}", bind={"trainer": [0, 1, 2, 5, 7]})
    assert rows(config)["trainer"] == ("host-0", "-", "0-2,5,7")


def test_a_dry_run_refuses_what_does_not_fit_the_cluster(tiny_model_folder: Path):
    config = run_config(tiny_model_folder, "hosts.imagine={gpus: 2, cores: 4}", "trainer.fsdp=2", bind={"trainer": [9]})
    with pytest.raises(ConfigError) as error:
        describe(config)
    assert [problem.partition(":")[0] for problem in error.value.problems] == [
        "generator.replicas * generator.tp=1",
        "hosts.bind.trainer=[9]",
    ]
    tiny_gpus = run_config(tiny_model_folder, "hosts.imagine={gpus: 2, gpu_gib: 0.05}")
    with pytest.raises(ConfigError, match=r"a rank needs 0\.3 GiB and 0\.0 free .*, GPU 1 of host-0 has 0\.1 GiB"):
        describe(tiny_gpus)


def test_adapters_need_no_gradients_and_moments_of_whole_weights(tiny_model_folder: Path):
    whole, adapters = (
        memory_by_role(run_config(tiny_model_folder, "loss.kl_coef=0.1", *more), on_gpu=False)
        for more in ((), ("trainer.lora={rank: 8}", "reference.refresh_every=2"))
    )
    shape = architecture(read_config(tiny_model_folder))
    elements, weights = LoraSettings(rank=8).elements(shape), 4 * shape.elements
    states = ("parameters", "gradients", "optimizer")
    (every,), (some,) = whole["trainer"], adapters["trainer"]
    assert [every.on_device[part] for part in states] == [weights, weights, 2 * weights]
    assert [some.on_device[part] for part in states] == [weights + 4 * elements, 4 * elements, 8 * elements]
    assert some.on_device["activations"] < every.on_device["activations"] * 2
    assert some.on_host == {"ring": 3 * 4 * elements, "checkpoint": 12 * elements}
    (generator,), (all_weights,), (reference,) = adapters["generator"], whole["generator"], adapters["reference"]
    assert generator.on_device["weights"] - all_weights.on_device["weights"] == 4 * elements
    assert generator.on_device["prefetch"] == reference.on_device["prefetch"] == 4 * elements


def test_an_offloaded_reference_takes_room_for_its_passes_only_on_the_gpu_that_it_shares(tiny_model_folder: Path):
    config = run_config(tiny_model_folder, "loss.kl_coef=0.1", "hosts.reference.share_with=trainer")
    config = replace(config, reference=replace(config.reference, refresh_every=1))
    offloaded = held_on_gpu(replace(config, reference=replace(config.reference, offload=True)))
    both = offloaded["trainer"] + offloaded["reference"]
    hosts = replace(config.hosts, imagine=ImaginedCluster(gpus=2, gpu_gib=both * 1.06))
    config = replace(config, hosts=hosts, generator=replace(config.generator, kv_cache_gib=both / 2))
    with pytest.raises(ConfigError, match=r"hosts\.reference\.share_with=trainer: together they need"):
        describe(config)
    config = replace(config, reference=replace(config.reference, offload=True))
    assert rows(config)["reference"][:2] == rows(config)["trainer"][:2] == ("host-0", "0")
    assert re.search(r"reference 0 .*; host: checkpoint \S+ GiB, parameters \S+ GiB, prefetch", describe(config))


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_run_and_a_dry_run_refuse_the_same_verifiers(dry_run: bool, tiny_model_folder: Path, tmp_path: Path):
    config = run_config(
        tiny_model_folder,
        f"run_dir={tmp_path / 'run'}",
        "reward.verifier=goaly.base.registry:missing",
        "evaluation.sets={a: {prompts: 2, verifier: 'no.such:thing'}, b: {prompts: 2}}",
        "hosts.job=no.such.module:job",
        *(["hosts.imagine={gpus: 1}"] if dry_run else []),  # which has no place for the generator
    )
    with pytest.raises(ConfigError) as error:
        launch(Loaded(config=config, dry_run=dry_run, path=None), _never, _never)
    *others, own, of_set = error.value.problems
    right = f"{trial.RIGHT}: can't be used"
    assert own.startswith(
        f"reward.verifier=goaly.base.registry:missing: {right}: ValueError: module goaly.base.registry has"
    )
    assert of_set.startswith(f"evaluation.sets.a.verifier=no.such:thing: {right}: ModuleNotFoundError: No module named")
    assert len(others) == dry_run
    assert not (tmp_path / "run").exists()


def test_a_dry_run_starts_no_job_and_asks_for_a_cluster_instead(tiny_model_folder: Path):
    config = run_config(tiny_model_folder, "hosts.job=no.such.module:job")
    with pytest.raises(ConfigError, match=r"hosts.imagine=null: must be a cluster such as \{hosts: 4, gpus: 8\}"):
        describe(config)
    config = run_config(tiny_model_folder, "hosts.job=no.such.module:job", "hosts.imagine={hosts: 2}")
    assert rows(config)["hub"] == ("host-0", "-", "any")


def with_gpus(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(Gpu(name=str(number)) for number in range(count))
    monkeypatch.setattr(dry_run, "this_machine", lambda: Host(name="box", gpus=gpus, nodes={0: (0, 1)}))


@pytest.mark.parametrize(
    ("overrides", "bind", "said"),
    [
        (["hosts.imagine={gpus: 8}"], {}, "hosts.imagine: is for --dry-run"),
        (["trainer.fsdp=2"], {}, "generator.replicas * generator.tp=1: needs 1 GPUs, free are none"),
        ([], {"trainer": [4]}, "hosts.bind.trainer=[4]: box has no core 4 for this run"),
    ],
)
def test_a_run_that_can_not_start_here_is_refused_before_it_has_a_folder(
    overrides: list[str],
    bind: dict[str, list[int]],
    said: str,
    tiny_model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    with_gpus(2, monkeypatch)
    config = run_config(tiny_model_folder, f"run_dir={tmp_path / 'run'}", *overrides, bind=bind)
    with pytest.raises(ConfigError) as error:
        launch(Loaded(config=config, dry_run=False, path=None), _never, _never)
    (problem,) = error.value.problems
    assert problem.startswith(said)
    assert not (tmp_path / "run").exists()


def test_what_fits_the_machine_may_start(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch):
    with_gpus(3, monkeypatch)
    check_this_machine(run_config(tiny_model_folder, "trainer.fsdp=2"))
    with_gpus(1, monkeypatch)
    with pytest.raises(ConfigError, match="needs 1 GPUs, free are none"):
        check_this_machine(run_config(tiny_model_folder))
    check_this_machine(run_config(tiny_model_folder, "hosts.generator.share_with=trainer"))
    check_this_machine(run_config(tiny_model_folder, "trainer.fsdp=2", "hosts.job=my.module:job"))


async def _never(*_: object) -> None:
    raise AssertionError("nothing may start")
