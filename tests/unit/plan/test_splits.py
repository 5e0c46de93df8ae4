"""The split of a cluster, over profiles whose best split is known."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from goaly.base.config import load
from goaly.models.tiny_model import TinyModel, write_tiny_model
from goaly.plan.cluster import Cluster, imagined
from goaly.plan.host_settings import ImaginedCluster
from goaly.plan.run_config import RunConfig
from goaly.plan.split import main, recommended, report
from goaly.plan.splits import Shape, ahead, balance, fastest, longer, neighbours, seconds_of, simulated, splits
from goaly.simulator.profile import (
    DecodeRate,
    Distribution,
    EngineTimes,
    EpisodesProfile,
    Profile,
    StatedEpisodes,
    TrainingTimes,
    UpdateTimes,
    write_profile,
)
from goaly.simulator.scaled_profile import scaled

pytestmark = pytest.mark.timeout(120)

CONFIG = """
steps: 100
model: {path: MODEL}
prompts: {task: arithmetic}
reward: {verifier: "goaly.prompts.tasks.arithmetic:verify"}
backlog: {groups_per_step: 8, group_size: 8, row_length: 1024}
sampling: {max_tokens: 512}
generator: {max_context: 1024, kv_cache_gib: 0.5}
hosts: {imagine: {hosts: 2, gpus: 4}}
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("split")
    model = write_tiny_model(folder / "model", TinyModel(max_context=2048))
    (folder / "run.yaml").write_text(CONFIG.replace("MODEL", str(model)))
    return folder / "run.yaml"


def config_of(file: Path, *overrides: str) -> RunConfig:
    return load(RunConfig, ["--config", str(file), *overrides], prog="test", description="").config


def profile(*, train: float = 1e-4, decode: float = 2000.0, answer: float = 300.0, waits: float = 0.0) -> Profile:
    """Seconds of a rank for a token, and tokens a second of a replica at 64 requests at once."""
    stated = StatedEpisodes(
        prompt_tokens=Distribution(mean=20.0),
        answer_tokens=Distribution(mean=answer, sigma=0.5, most=512.0),
        verifier_seconds=Distribution(mean=waits),
    )
    return Profile(
        training=(TrainingTimes(fixed_seconds=0.05, seconds_per_token=train),),
        engines=(
            EngineTimes(
                decode=(
                    DecodeRate(running=1, tokens_per_second=decode / 20),
                    DecodeRate(running=64, tokens_per_second=decode),
                )
            ),
        ),
        episodes=EpisodesProfile(stated=stated),
        updates=UpdateTimes(stage_seconds=0.01, pull_seconds=0.01, apply_seconds=0.01),
    )


def cluster(hosts: int = 2, gpus: int = 4) -> Cluster:
    return imagined(ImaginedCluster(hosts=hosts, gpus=gpus))


def test_every_split_fits_the_hosts_and_none_leaves_out_a_possible_number_of_replicas(file: Path):
    found = splits(config_of(file), cluster())
    sizes = [(one.trainer.ranks, one.generator.replicas) for one in found]
    assert [replicas for _, replicas in sizes] == sorted({replicas for _, replicas in sizes})
    assert all(ranks + replicas <= 8 for ranks, replicas in sizes)
    assert (4, 4) in sizes
    assert all(ranks <= 4 or ranks % 2 == 0 for ranks, _ in sizes)  # equally many on each host


def test_the_axes_of_a_trainer_and_of_a_replica_stay_whole(file: Path):
    found = splits(config_of(file, "generator.tp=2", "trainer.tp=2"), cluster())
    assert all(one.generator.tp == one.trainer.tp == 2 for one in found)
    assert all(one.trainer.ranks % 2 == 0 for one in found)


@pytest.mark.parametrize(("train", "decode", "generates"), [(4e-4, 8000.0, range(1, 3)), (2e-5, 500.0, range(6, 8))])
def test_the_slower_side_gets_the_machines(file: Path, train: float, decode: float, generates: range):
    known = profile(train=train, decode=decode)
    options = [ahead(one, known) for one in splits(config_of(file), cluster())]
    assert fastest(options, known)[0].generator.replicas in generates


def test_no_neighbour_of_the_recommended_split_is_faster(file: Path):
    known = profile()
    best, options = recommended(config_of(file), known, cluster())
    shape = Shape.of(known, best)
    beside = neighbours(options, best)
    assert beside
    assert all(seconds_of(one, known, shape) > 0.97 * seconds_of(best, known, shape) for one in beside)


def test_the_staleness_bound_is_the_smallest_that_is_as_fast(file: Path):
    """Eight requests at once are as many as an engine can use, so more staleness would only add age."""
    rates = (DecodeRate(running=1, tokens_per_second=600.0), DecodeRate(running=8, tokens_per_second=2000.0))
    known = replace(profile(), engines=(EngineTimes(decode=rates),))
    best, _ = recommended(config_of(file), known, cluster())
    generous = ahead(best, known)
    assert best.backlog.max_staleness < generous.backlog.max_staleness
    shape = Shape.of(known, best)
    assert seconds_of(best, known, shape) <= 1.05 * seconds_of(generous, known, shape)


def test_the_balance_is_a_lower_bound_that_the_simulation_comes_near(file: Path):
    known = profile()
    for one in (ahead(one, known) for one in splits(config_of(file), cluster())):
        shape = Shape.of(known, one)
        least = balance(one, known, shape)
        assert 0.9 * least <= seconds_of(one, known, shape) <= 1.6 * least + 0.1


def test_answers_twice_as_long_need_more_replicas(file: Path):
    known = profile(train=1e-4, decode=2000.0)
    options = [ahead(one, known) for one in splits(config_of(file), cluster())]
    changed = scaled(known, answers=2.0)
    shape, twice = (Shape.of(one, options[0]) for one in (known, changed))
    assert twice.answer_tokens == pytest.approx(2 * shape.answer_tokens, rel=0.05)
    (before, seconds), (after, more) = fastest(options, known), fastest([longer(one, 2.0) for one in options], changed)
    assert more > 1.5 * seconds
    assert after.generator.replicas >= before.generator.replicas


def test_the_report_has_a_config_that_loads_and_says_what_was_recommended(file: Path):
    config, known = config_of(file), profile()
    text, yaml = report(config, known, cluster(), file.name)
    extended = file.with_name("split.yaml")
    extended.write_text(yaml)
    best, _ = recommended(config, known, cluster())
    loaded = config_of(extended)
    for section in ("trainer", "generator", "backlog"):
        assert getattr(loaded, section) == getattr(best, section)
    for words in ("recommended", "neighbours", "what would change it", "answers twice as long", "seconds a step"):
        assert words in text
    assert "of 2 nodes generate" in text
    assert OmegaConf.create(yaml)["base"] == file.name
    assert simulated(best).steps < config.steps


def test_the_command_reads_a_profile_and_writes_the_settings(file: Path, capsys):
    write_profile(file.with_name("profile.json"), profile())
    chosen = file.with_name("chosen.yaml")
    arguments = ["--config", str(file), "--profile", str(file.with_name("profile.json")), "--yaml", str(chosen)]
    assert main([*arguments, "hosts.imagine={hosts: 1, gpus: 2}"]) == 0
    assert "1 of 2 ranks generate" in capsys.readouterr().out
    assert config_of(chosen).generator.replicas == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "hosts.imagine: the measurement runs on this machine; give a profile by --profile"),
        (["--profile", "absent.json"], "absent.json: must be the JSON of a profile"),
        (["generator.replica=2"], "generator.replica"),
        (["--profile", "PROFILE", "hosts.imagine={hosts: 1, gpus: 1}"], "hosts: 1 places are too few for 1 ranks"),
        (["--profile", "PROFILE", "generator.tp=2"], "profile engines: has no measurement of tp=2"),
        (["--profile", "PROFILE", "--from", "runs/one"], "--from: has no effect beside --profile"),
        (["--profile", "WRONG"], "episodes"),
    ],
)
def test_bad_input_is_one_clear_error(file: Path, arguments: list[str], words: str, capsys):
    good, wrong = file.with_name("good.json"), file.with_name("wrong.json")
    write_profile(good, profile())
    wrong.write_text(json.dumps(json.loads(good.read_text()) | {"episodes": {}}))
    names = {"PROFILE": str(good), "WRONG": str(wrong)}
    with pytest.raises(SystemExit):
        main(["--config", str(file), *(names.get(one, one) for one in arguments)])
    assert words in capsys.readouterr().err
