"""Costs of durability, and the time until a run goes on after a death.

    python -m bench.durable [--steps N] [--rounds N] [--dim N] [--layers N] [--json FILE] [--markdown FILE]

From runs of `configs/grpo/tiny.yaml` on its warm start:

    log_share          the log's cost as a share of a step: CPU time of its thread and the wait for the disk, over the
                       step's time
    recovery_seconds   from `kill -9` of the trainer to the run's next new step, while the other processes go on;
                       `notice` until the run has noticed, `start` until a new process has loaded the newest checkpoint,
                       `train` for the steps since then and the new one
    resume_seconds     from `--resume`, after `kill -9` of the controller, to the next new step
    replay_over_train  steps a second of `python -m goaly.replay` over those of the trainer in the run

And from a trainer alone, with a model of `--layers` and `--dim`:

    stall_over_copy    the trainer's wait for a checkpoint over a plain copy of the same state into memory that is
                       there already; checkpoint and copy take turns
"""

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.report import Machine, exit_on_terminate, markdown_table, options, page, write
from tests.loop.launched import spawned

WARM_STEPS = 5
CHECKPOINT_EVERY = 10
DEADLINE_SECONDS = 600.0


class Launched:
    """A run of the GRPO script, or another one, in a process of its own."""

    def __init__(self, run_dir: Path, *arguments: str, module: str = "apps.grpo.main"):
        self.run_dir = run_dir
        self.began = time.time()
        command = [sys.executable, "-m", module, *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def steps(self) -> list[dict[str, Any]]:
        """The recorded steps."""
        file = self.run_dir / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait(self, holds: Callable[[], Any]) -> Any:
        """The first true answer of `holds`."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (answer := holds()):
            if self.process.poll() not in (None, 0) or time.monotonic() > deadline:
                raise RuntimeError(f"the run ended with {self.process.poll()}, or takes too long")
            time.sleep(0.01)
        return answer

    def end(self) -> None:
        """Kill the run."""
        self.process.kill()
        self.process.wait()


def of_runs(folder: Path, steps: int) -> dict[str, Any]:
    """The costs and the times of one run that is killed twice."""
    run_dir = folder / "run"
    settings = ["--config", "configs/grpo/tiny.yaml", f"run_dir={run_dir}", f"steps={steps}", "telemetry.progress=off"]
    settings += [f"checkpoint.every={CHECKPOINT_EVERY}", "evaluation.prompts=1"]
    run = Launched(run_dir, *settings)
    try:
        third = steps // 3
        run.wait(lambda: len(run.steps()) >= third + CHECKPOINT_EVERY // 2)
        (trainer,) = spawned(run_dir, "trainer")
        known, killed = len(run.steps()), time.time()
        os.kill(trainer, signal.SIGKILL)
        log = run_dir / "logs" / "controller.log"
        noticed = run.wait(lambda: _logged(log, "it is being replaced"))
        up = run.wait(lambda: _logged(log, "batches again"))
        recovered = run.wait(lambda: [step["time"] for step in run.steps()[known:] if step["time"] > up])[0]
        run.wait(lambda: len(run.steps()) >= 2 * third + CHECKPOINT_EVERY // 2)
        known = len(run.steps())
        run.end()
        run = Launched(run_dir, "--resume", str(run_dir))
        resumed = run.wait(lambda: [step["time"] for step in run.steps()[known:]])[0]
        resume_seconds = resumed - run.began
        run.process.wait(DEADLINE_SECONDS)
    finally:
        run.end()
    steady = run.steps()[WARM_STEPS:third]
    whole = sum(step["step/seconds"] for step in steady)
    log_seconds = sum(step["log/wait_seconds"] + step["log/cpu_seconds"] for step in steady)
    train_seconds = statistics.median(step["train_seconds"] for step in steady)
    replayed = subprocess.run(
        [sys.executable, "-m", "goaly.replay", str(run_dir), "--check"], capture_output=True, text=True, check=True
    )
    replay_seconds = float(re.search(r"([\d.]+) s a step", replayed.stdout)[1])  # type: ignore[index]
    return {
        "log_share": log_seconds / whole,
        "step_seconds": whole / len(steady),
        "recovery_seconds": recovered - killed,
        "recovery": {"notice": noticed - killed, "start": up - noticed, "train": recovered - up},
        "resume_seconds": resume_seconds,
        "replay_over_train": train_seconds / replay_seconds,
        "digests_checked": int(re.search(r"(\d+) digests are as recorded", replayed.stdout)[1]),  # type: ignore[index]
    }


def _logged(log: Path, text: str) -> float | None:
    """The time, once the log has this text."""
    return time.time() if log.exists() and text in log.read_text() else None


def of_checkpoints(folder: Path, dim: int, layers: int, rounds: int) -> dict[str, Any]:
    """The trainer's wait for a checkpoint, against a plain copy of its state."""
    import torch

    from goaly.models.settings import ModelSettings
    from goaly.models.tiny_model import TinyModel, write_tiny_model
    from goaly.train.saved_state import StagedState
    from goaly.train.settings import TrainerSettings
    from goaly.train.train_engine import TrainEngine
    from goaly.weights.dtensor_layout import local

    torch.set_num_threads(1)
    write_tiny_model(
        folder / "model", TinyModel(dim=dim, layers=layers, heads=dim // 32, kv_heads=dim // 64, hidden_dim=4 * dim)
    )
    engine = TrainEngine(ModelSettings(path=str(folder / "model")), TrainerSettings())
    held = [local(tensor) for tensor in engine.state_dict().values()]
    copies = [torch.empty_like(tensor) for tensor in held]
    state = StagedState(engine)
    waits, plain = [], []
    for _ in range(rounds + 1):
        begun = time.monotonic()
        state.stage()
        waits.append(time.monotonic() - begun)
        begun = time.monotonic()
        for copy, tensor in zip(copies, held, strict=True):
            copy.copy_(tensor)
        plain.append(time.monotonic() - begun)
    wait, copy_seconds = statistics.median(waits[1:]), statistics.median(plain[1:])  # the first touches new memory
    return {
        "state_mb": sum(tensor.numel() * tensor.element_size() for tensor in held) / 1e6,
        "stall_seconds": wait,
        "copy_seconds": copy_seconds,
        "stall_over_copy": wait / copy_seconds,
    }


def main() -> None:
    """Measure, print, and write the numbers where asked."""
    arguments = options(__doc__, "json", "markdown", steps=90, rounds=10, dim=512, layers=8).parse_args()
    exit_on_terminate()
    machine = Machine.now()
    folder = Path(tempfile.mkdtemp(prefix="bench-durable-"))
    try:
        found = {
            **of_checkpoints(folder, arguments.dim, arguments.layers, arguments.rounds),
            **of_runs(folder, arguments.steps),
        }
    finally:
        shutil.rmtree(folder)
    values = [(name, f"{value:.4g}") for name, value in found.items() if not isinstance(value, dict)]
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in found["recovery"].items())
    measured = str(machine), markdown_table(("measure", "value"), values), f"Recovery: {parts}."
    print("\n\n".join(measured))
    write(arguments.json, {"machine": machine.record(), **found})
    about = (__doc__ or "").split("\n\n", 2)[2].strip()
    write(arguments.markdown, page("durable", "What durability costs", about, *measured))


if __name__ == "__main__":
    main()
