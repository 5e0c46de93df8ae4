"""A run that trains adapters, with a reference that follows the policy; its generator and then the run are killed."""

import json
from collections import defaultdict
from pathlib import Path

import pytest
from conftest import launching
from launched import REWARDED, START_SECONDS, assert_whole, replayed
from random_model import write_random_model
from safetensors.torch import load_file

from goaly.models.families import architecture, read_config
from goaly.models.settings import LoraSettings

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

STEPS = 7
LORA = (
    f"steps={STEPS}",
    "checkpoint.every=1",
    "model.dtype=bfloat16",
    "moe.routing=replay",
    "loss.kl_coef=0.01",
    "reference.refresh_every=3",
    "trainer.fsdp=2",
    "trainer.ep=2",
    "trainer.lora.rank=8",
    "trainer.optimizer.lr=1e-2",
    "evaluation.prompts=2",
    "backlog.max_staleness=0",
    REWARDED,
)


def test_a_run_publishes_and_resumes_adapters_and_a_replaced_generator_gets_them(tmp_path: Path) -> None:  # models-3
    model = write_random_model(tmp_path / "model", experts=8)
    with launching(tmp_path, model) as launch:
        killed = launch(*LORA)
        killed.wait_for_steps(1)
        killed.kill("generator-0")
        killed.wait_for_steps(5)  # more than the groups that had been sampled before
        killed.process.kill()
        run = launch(resume=killed)
        assert run.wait(START_SECONDS) == 0, run.text()
        assert_whole(run, STEPS)
        checked = replayed(run, "--check")
    assert checked.returncode == 0, checked.stderr
    assert f"{STEPS} digests are as recorded" in checked.stdout
    steps = run.lines("metrics.jsonl")
    assert all(0 < step["grad_norm"] < 10 for step in steps)
    assert steps[-1]["generator/verified_updates"] > 0
    assert [step["kl_reference"] for step in steps[::3]] == [0, 0, 0]  # it was just refreshed
    assert all(0 <= step["sampler_kl"] < 1e-3 for step in steps)  # of the replaced generator, too
    elements = LoraSettings(rank=8).elements(architecture(read_config(model)))
    staged = defaultdict(int)
    for event in json.loads((run.folder / "trace.json").read_text())["traceEvents"]:
        if event["name"] == "stage" and "bytes" in event["args"]:
            staged[event["args"]["version"], event["args"]["rank"]] = event["args"]["bytes"]
    versions = {version for version, _ in staged}
    assert STEPS in versions
    of_digest = 8
    assert {sum(staged[version, rank] for rank in range(2)) for version in versions} == {2 * elements + of_digest}
    adapters = load_file(run.folder / "policy" / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in adapters.values()) == elements
    assert any(tensor.any() for name, tensor in adapters.items() if "lora_B" in name)
