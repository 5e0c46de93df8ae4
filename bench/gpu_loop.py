"""The check of `bench.gpu` that is a whole run: GRPO with trainer and generator on one GPU."""

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.gpu_trainer import DTYPE
from goaly.models.tiny_model import write_tiny_model
from goaly.prompts.prompt import Prompt

STEPS = 10
MOST_KL = 0.05
"""Between sampler and trainer, which are at most two small steps apart."""
AFTER_START = 3
"""Steps of which the times do not count."""


def share_of_digits(prompt: Prompt, response: str) -> float:
    """A reward that random weights earn in part, so that each step has a gradient."""
    return sum(map(str.isdigit, response)) / max(len(response), 1)


def arguments(model: Path, folder: Path) -> list[str]:
    """The run's command line after the program."""
    shared = ["hosts.generator.share_with=trainer"] if torch.cuda.is_available() else []
    return [
        "--config=configs/grpo/tiny.yaml",
        f"model.path={model}",
        f"model.dtype={DTYPE}",
        f"run_dir={folder}",
        f"steps={STEPS}",
        "sampling.max_tokens=64",
        "evaluation.prompts=8",
        "reward.verifier=bench.gpu_loop:share_of_digits",
        "hosts.bind={}",
        *shared,
    ]


def tiny_loop() -> dict[str, Any]:
    """Run it from random weights; the numbers of its steps."""
    with tempfile.TemporaryDirectory() as made:
        model, folder = write_tiny_model(Path(made) / "model"), Path(made) / "run"
        ran = subprocess.run([sys.executable, "-m", "apps.grpo.main", *arguments(model, folder)], check=False)
        if ran.returncode != 0:
            raise AssertionError(f"the run ended with {ran.returncode}")
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return judged([json.loads(line) for line in lines])


def judged(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The numbers of a run with these metrics; raises unless each step trained and the sampler had the weights."""
    if len(steps) != STEPS:
        raise AssertionError(f"the run recorded {len(steps)} steps, must be {STEPS}")
    last, untrained = steps[-1], [number for number, step in enumerate(steps, 1) if not step["grad_norm"] > 0]
    if untrained:
        raise AssertionError(f"steps {untrained} had no gradient")
    if last["generator/version"] < STEPS - 1:
        raise AssertionError(f"the generator ended with version {last['generator/version']:g} of {STEPS}")
    divergence = max(step["sampler_kl"] for step in steps)
    if not (math.isfinite(divergence) and divergence <= MOST_KL):
        raise AssertionError(f"the KL divergence of sampler and trainer is {divergence:.3g}, must be at most {MOST_KL}")
    timed = steps[AFTER_START:]
    return {
        "step_seconds": median(step["step/seconds"] for step in timed),
        "tokens_per_second": median(step["step/tokens_per_second"] for step in timed),
        "sampler_kl": divergence,
        "run_seconds": last["run/seconds"],
        "reward_first": steps[0]["reward/mean"],
        "reward_last": last["reward/mean"],
    }
