"""The place of fetched weights follows from what fits a generator's GPU, and a refusal says what would fit."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from goaly.base.config import load
from goaly.base.errors import ConfigError
from goaly.plan.cluster import imagined
from goaly.plan.dry_run import describe, placed, spare_on
from goaly.plan.host_settings import ImaginedCluster
from goaly.plan.run_config import RunConfig
from goaly.weights.settings import HEADROOM

GRPO = Path(__file__).parents[3] / "configs" / "grpo" / "tiny.yaml"
QWEN3_8B = (
    "model={path: models/Qwen3-8B, architecture: qwen3-8b, dtype: bfloat16}",
    "trainer={fsdp: 4, activation_checkpointing: full}",
    "generator.kv_cache_gib=90",
)
WEIGHTS_GIB = 15.26  # of Qwen3-8B in bfloat16


def of_8b(*overrides: str) -> RunConfig:
    arguments = [f"--config={GRPO}", *QWEN3_8B, *overrides]
    config = load(RunConfig, arguments, prog="test", description="").config
    return replace(config, hosts=replace(config.hosts, bind={}))


def cluster(gpu_gib: float) -> Any:
    return imagined(ImaginedCluster(gpus=8, gpu_gib=gpu_gib))


@pytest.mark.parametrize(
    ("gpu_gib", "overrides", "chosen"),
    [
        (139, [], "device"),  # 90 of cache and twice the weights leave 18
        (128, [], "device"),  # 7.5 are left, 6.4 must be
        (126, [], "host"),  # 5.5 are left, 6.3 must be
        (126, ["weights.spare=device"], "device"),
        (139, ["weights.spare=host"], "host"),
    ],
)
def test_fetched_weights_are_on_the_gpu_if_they_fit_there_beside_the_others(
    gpu_gib: float, overrides: list[str], chosen: str
) -> None:
    found = spare_on(of_8b(*overrides), cluster(gpu_gib))
    assert found is not None
    assert found.chosen == chosen
    assert found.device_left == pytest.approx(gpu_gib - 90 - 2 * WEIGHTS_GIB, abs=0.1)
    assert found.host_left == pytest.approx(gpu_gib - 90 - WEIGHTS_GIB, abs=0.1)


def test_a_generator_that_shares_its_gpu_with_the_trainer_chooses_by_what_is_free() -> None:
    shared = of_8b("hosts.generator={share_with: trainer}", "generator.kv_cache_gib=20")
    known, unknown = spare_on(shared, cluster(200), traced=True), spare_on(shared, cluster(200))
    assert known is not None is not unknown
    assert (known.chosen, unknown.chosen) == ("device", "auto")
    assert known.device_left < unknown.device_left - 5  # by what a pass takes
    assert spare_on(shared, imagined(ImaginedCluster(gpus=8))) is None
    alone = spare_on(shared, cluster(200))
    assert alone is not None
    fits_with_host = (200 - alone.host_left) / (1 - HEADROOM) + 1
    placed(shared, cluster(fits_with_host))  # a start does not refuse what the generator will choose itself
    with pytest.raises(ConfigError, match="generator"):
        placed(shared, cluster(fits_with_host - 2))


def test_a_dry_run_says_what_it_chose_and_why() -> None:
    told = describe(of_8b("hosts.imagine={gpus: 8, gpu_gib: 126}"))
    assert (
        "weights.spare=auto: host. GiB left on a generator's GPU: 5.4 with the fetched weights on it, 20.7 with them "
        "in the host's memory; at least 6.3 must be left\n" in told
    )
    assert re.search(r"generator 0 of each replica .*; host: prefetch \S+ GiB\n", told)


@pytest.mark.parametrize(
    ("gpu_gib", "overrides", "advice"),
    [
        (115, ["weights.spare=device"], "weights.spare=host would fit"),
        (100, [], "generator.kv_cache_gib=79.7 would fit"),
        (100, ["weights.spare=device"], "generator.kv_cache_gib=79.7 would fit with weights.spare=host"),
        (10, [], "raise generator.tp, which divides its 15.3 GiB of weights"),
    ],
)
def test_a_refusal_says_what_would_fit(gpu_gib: float, overrides: list[str], advice: str) -> None:
    with pytest.raises(ConfigError) as error:
        placed(of_8b(*overrides), cluster(gpu_gib))
    (problem,) = [line for line in error.value.problems if line.startswith("generator")]
    assert problem.endswith(f"has {gpu_gib:.1f} GiB; {advice}")
