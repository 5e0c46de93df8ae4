"""How many steps does distillation take to the teacher's pass@1, and how many does GRPO from the same start?

    python -m bench.distill [--student FOLDER] [--teacher FOLDER] [--seeds N] [--json FILE]

First the warm starts: `python -m apps.sft.main` with `configs/sft/tiny.yaml` and `configs/sft/teacher.yaml`. Both runs
(`configs/distill/tiny.yaml`, `configs/grpo/tiny.yaml`) have their own schedules and evaluate the same held-out prompts
every few steps; the teacher is evaluated on them as version 0 of a run of one step. A run arrives at its first
evaluation with a pass@1 of at most 0.02 below the teacher's. The exit code is 1 unless distillation arrives with every
seed, and with fewer steps than GRPO.
"""

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.report import options, write

RUNS = Path("runs/bench-distill")
BELOW = 0.02
"""A policy is as good as its teacher if its pass@1 is at most this much lower."""
EVERY = 5
"""Steps between two evaluations."""
PROMPTS = 512
CONFIGS = {"distill": "configs/distill/tiny.yaml", "grpo": "configs/grpo/tiny.yaml"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The evaluations of one run."""

    name: str
    seed: int
    seconds: float
    pass_at_1: dict[int, float]
    """By policy version."""

    def arrived(self, teacher: float) -> int | None:
        """The first evaluated version that is as good as the teacher; None if there is none."""
        return next((version for version, rate in self.pass_at_1.items() if rate >= teacher - BELOW), None)


def run(name: str, seed: int, *overrides: str) -> Curve:
    """Run this config to its end, and read its evaluations."""
    folder = RUNS / f"{name}-{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    app, config = ("grpo", "grpo") if name == "teacher" else (name, name)
    command = [sys.executable, "-m", f"apps.{app}.main", "--config", CONFIGS[config], f"run_dir={folder}"]
    seeds = [f"prompts.seed={seed}", f"generator.seed={seed}", f"evaluation.prompts={PROMPTS}"]
    subprocess.run([*command, *seeds, *overrides], check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((folder / "summary.json").read_text())
    rates = {one["policy_version"]: one["pass@1"] for one in summary["evaluations"]}
    return Curve(name=name, seed=seed, seconds=summary["seconds"], pass_at_1=dict(sorted(rates.items())))


def main() -> int:
    """Run the benchmark; the exit code."""
    parser = options(__doc__, "json", student="runs/sft-tiny", teacher="runs/sft-teacher", seeds=3)
    asked = parser.parse_args()
    curves, good = [], True
    for seed in range(asked.seeds):
        of_teacher = run("teacher", seed, f"model.path={asked.teacher}", "steps=1", "trainer.schedule.total_steps=1")
        teacher = of_teacher.pass_at_1[0]
        student = f"model.path={asked.student}", f"evaluation.every={EVERY}"
        distilled = run("distill", seed, *student, f"reference.path={asked.teacher}")
        reinforced = run("grpo", seed, *student)
        curves += [of_teacher, distilled, reinforced]
        found, other = distilled.arrived(teacher), reinforced.arrived(teacher)
        good &= found is not None and (other is None or found < other)
        best = max(distilled.pass_at_1.values()), max(reinforced.pass_at_1.values())
        print(
            f"seed {seed}: teacher {teacher:.3f}; distillation arrives at step {found} (best {best[0]:.3f}), "
            f"GRPO at step {other} (best {best[1]:.3f})",
            flush=True,
        )
    write(asked.json, {"below": BELOW, "every": EVERY, "curves": [asdict(one) for one in curves]})
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
