"""Runs everything that only a GPU can show, on one GPU.

    python -m bench.gpu [--check NAME ...] [--json FILE] [--anywhere]

Each check runs goaly's own parts in a process of its own, with a time limit: one that fails, hangs, runs out of memory
or breaks its CUDA context ends alone. Its result has a status, its seconds, its numbers, and if it failed the last
lines of its error.

    trainer step          a GRPO step of the trainer's engine, and its loss beside that of a CPU
    loss path             log-probs and gradients in chunks against the plain log-softmax of all logits
    CUDA graphs           vLLM with torchtitan's definition, recorded and not: the same answers, and the speed
    async scheduling      the same with a step launched ahead: the speed, and that each token has its true version
    updates               versions from a trainer to vLLM: vLLM's log-probs are the trainer's
    pinned staging        a GPU's weights through a pinned ring into pinned spares (`weights.spare=host`)
    bitwise numerics      a trainer computes the log-probs that vLLM sampled, bit by bit
    tiny loop             a GRPO run whose trainer and generator share the GPU

Without `--check` the results are written to `docs/results/gpu.json`. The exit code is 1 if a check failed, and 2
without a GPU, where nothing is run or written. With `--anywhere` the checks that a CPU can run are run there; their
numbers say nothing about a GPU, so they are written only to the file of `--json`.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

RESULTS = Path("docs/results/gpu.json")
NO_GPU = "not run: no GPU"
PASSED, FAILED = "passed", "failed"
IN_CHILD = "import sys; from bench.gpu import run_one; run_one(*sys.argv[1:])"
ERROR_LINES = 12
"""The last lines of an error that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The work of one process."""

    target: str
    """`module:function`, which returns numbers by name. It raises if the check fails."""
    seconds: float = 300.0
    """Its time limit."""
    anywhere: bool = False
    """Whether a CPU can run it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that its process needs before it imports anything."""


CHECKS: dict[str, Check] = {
    "trainer step": Check(target="bench.gpu_trainer:trainer_step", anywhere=True),
    "loss path": Check(target="bench.gpu_trainer:loss_path", anywhere=True),
    "CUDA graphs": Check(target="bench.gpu_generator:cuda_graphs", seconds=600.0),
    "async scheduling": Check(target="bench.gpu_generator:async_scheduling", seconds=600.0),
    "updates": Check(target="bench.gpu_weights:updates", anywhere=True, seconds=600.0),
    "pinned staging": Check(target="bench.gpu_weights:pinned_staging"),
    "bitwise numerics": Check(target="bench.gpu_generator:bitwise_numerics", seconds=600.0),
    "tiny loop": Check(target="bench.gpu_loop:tiny_loop", anywhere=True, seconds=600.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a check ended."""

    name: str
    status: str
    """"passed", "failed", or "not run: " and the reason."""
    seconds: float = 0.0
    numbers: dict[str, Any] = field(default_factory=dict)
    error: list[str] = field(default_factory=list)
    """The last lines of the error of a failed check."""


def run(name: str, check: Check) -> Result:
    """Run a check in a process of its own, and kill that with all its children when it takes too long."""
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        out, log = Path(folder) / "out.json", Path(folder) / "log"
        began = time.monotonic()
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-c", IN_CHILD, check.target, str(out)],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=os.environ | check.environment,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(check.seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with suppress(ProcessLookupError):  # a check may leave processes behind, a failed one in particular
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        seconds = round(time.monotonic() - began, 2)
        if code == 0 and out.exists():
            return Result(name=name, status=PASSED, seconds=seconds, numbers=json.loads(out.read_text()))
        how = f"it took longer than {check.seconds:g} s" if code is None else f"its process ended with {code}"
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return Result(name=name, status=FAILED, seconds=seconds, error=[*lines[-ERROR_LINES:], how])


def run_one(target: str, out: str) -> NoReturn:
    """Run a check in this process, write what it found, and end the process."""
    module, _, function = target.partition(":")
    code = 0
    try:
        numbers = getattr(import_module(module), function)()
        Path(out).write_text(json.dumps(numbers))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what libraries would say at the end is not the check's error


def run_all(checks: Mapping[str, Check], *, on_gpu: bool) -> list[Result]:
    """Run these checks in turn; without a GPU those that need none."""
    results = []
    for name, check in checks.items():
        if on_gpu or check.anywhere:
            results.append(run(name, check))
        else:
            results.append(Result(name=name, status=NO_GPU))
        sys.stderr.write(f"{name}: {results[-1].status}, {results[-1].seconds:.0f} s\n")
    return results


def gpu() -> dict[str, Any] | None:
    """The GPU and the software that uses it; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "gib": round(properties.total_memory / (1 << 30), 1),
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
    }


def report(results: Sequence[Result], device: str) -> None:
    """Print each check with its numbers, or its error."""
    print(device)
    for one in results:
        print(f"{one.name:20s} {one.status}, {one.seconds:.0f} s", *one.error, sep="\n    ")
        for name, value in one.numbers.items():
            print(f"    {name} {f'{value:,.4g}' if isinstance(value, float) else value}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print and write; the exit code."""
    from bench.report import Machine, options, write

    parser = options(__doc__, "json")
    parser.add_argument("--check", nargs="+", choices=CHECKS, metavar="NAME", help="only these; all by default")
    parser.add_argument("--anywhere", action="store_true", help="without a GPU run the checks that a CPU can run")
    given = parser.parse_args(argv)
    found = gpu()
    if found is None and not given.anywhere:
        sys.stderr.write("bench.gpu: there is no GPU here; --anywhere runs the checks that a CPU can run\n")
        return 2
    machine = Machine.now()
    chosen = {name: check for name, check in CHECKS.items() if given.check is None or name in given.check}
    results = run_all(chosen, on_gpu=found is not None)
    report(results, "no GPU" if found is None else f"{found['name']}, {found['gib']} GiB")
    whole = found is not None and given.check is None
    content = {"gpu": found, "machine": machine.record(), "checks": [asdict(one) for one in results]}
    write(given.json or (RESULTS if whole else None), content)
    return int(any(one.status == FAILED for one in results))


if __name__ == "__main__":
    sys.exit(main())
