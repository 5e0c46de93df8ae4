"""Is the memory that a dry run estimates for a trainer what a real trainer takes?

    python -m bench.memory [--json FILE]

Real ranks train tiny models, dense and with experts: a batch of two microbatches and an optimizer step, twice. What
the first rank's tensors take is read from torch's allocator, by its profiler; the peak is that of the second batch.
Experts get the load that a dry run assumes, by replayed choices: those of the first rank have a tenth more tokens than
the mean, the same in each layer. Beside the peak are the dry run's estimate for the same rank, their ratio, and by how
much the process grew, which includes the libraries' own buffers and what the C allocator keeps. The exit code is 1 if
an estimate is off by more than 10 %.
"""

import argparse
import json
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.machine import Machine
from goaly.models.settings import ModelSettings
from goaly.models.spec import Architecture, architecture, read_config
from goaly.models.tiny import TinyModel, write_tiny_model
from goaly.plan.memory import traced_pass
from goaly.plan.trace import PassMemory
from goaly.train.settings import TrainerSettings

MOST_OFF = 0.1
ROW_LENGTH, ROWS = 1024, 2
MIB = 1 << 20
DENSE = TinyModel(dim=128, layers=6, hidden_dim=384, max_context=ROW_LENGTH)
EXPERTS = TinyModel(dim=128, layers=6, hidden_dim=128, experts=8, max_context=ROW_LENGTH)
CASES: dict[str, tuple[TinyModel, str, dict[str, Any]]] = {
    "dense": (DENSE, "float32", {}),
    "dense, bfloat16, all recomputed": (DENSE, "bfloat16", {"activation_checkpointing": "full"}),
    "dense, FSDP 2": (DENSE, "float32", {"fsdp": 2}),
    "dense, FSDP 2, bfloat16, products kept": (
        DENSE,
        "bfloat16",
        {"fsdp": 2, "activation_checkpointing": "selective"},
    ),
    "dense, TP 2": (DENSE, "float32", {"tp": 2}),
    "dense, CP 2": (DENSE, "float32", {"cp": 2}),
    "experts": (EXPERTS, "float32", {}),
    "experts, FSDP 2, EP 2": (EXPERTS, "float32", {"fsdp": 2, "ep": 2}),
    "experts, FSDP 2, EP 2, all recomputed": (
        EXPERTS,
        "float32",
        {"fsdp": 2, "ep": 2, "activation_checkpointing": "full"},
    ),
}
"""Models, number formats and trainer settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One trainer, in MiB."""

    name: str
    estimated: float
    measured: float
    grown: float
    """Of the process, beside what it had before the engine was built."""

    @property
    def ratio(self) -> float:
        """The estimate over what was measured."""
        return self.estimated / self.measured


def total(found: PassMemory) -> int:
    """All that a dry run counts for a trainer's rank, in bytes."""
    return found.parameters + 3 * found.trained + found.activations + found.logprobs


def measure(folder: Path, name: str) -> Case:
    """Estimate, then train."""
    from goaly.parity import in_ranks

    size, dtype, degrees = CASES[name]
    path = folder / f"{size.experts}-experts"
    if not path.exists():
        write_tiny_model(path, size)
    model = ModelSettings(path=str(path), dtype=dtype)
    settings = TrainerSettings(microbatch_rows=ROWS, logprob_chunk=512, **degrees)
    shape = architecture(read_config(model.path))
    estimated = total(traced_pass(shape, model, settings, (ROW_LENGTH,) * ROWS, on_gpu=False))
    out = folder / "measured.json"
    in_ranks(_train, settings.ranks, (model, settings, out))
    return Case(name=name, estimated=estimated / MIB, **json.loads(out.read_text()))


def _train(rank: int, model: ModelSettings, settings: TrainerSettings, out: Path) -> None:
    """Train two batches in this rank; the first writes what its tensors took in the second."""
    import torch
    import torch.distributed as dist

    from goaly.losses.objective import PolicyObjective
    from goaly.losses.settings import LossSettings
    from goaly.train.engine import TrainEngine
    from goaly.train.rank import join_process_group

    join_process_group(1, settings.ranks)
    torch.manual_seed(0)
    rows = _rows(2 * ROWS, architecture(read_config(model.path)))
    trained, objective = int(rows["trained"].sum()) * settings.fsdp, PolicyObjective(LossSettings())
    before = _resident()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        engine = TrainEngine(model, settings)
        for second in (False, True):
            with torch.profiler.record_function("second" if second else "first"):
                engine.forward_backward(rows.split(ROWS), objective, trained)
                engine.optimizer_step()
    if rank == 0:
        out.write_text(json.dumps({"measured": peak_of(profile) / MIB, "grown": (_resident() - before) / MIB}))
    if settings.ranks > 1:
        dist.barrier()


def _rows(count: int, shape: Architecture) -> Any:
    """Rows of one document each, all of which but the first half is trained."""
    import torch

    from goaly.trajectory import EXPERT_CHOICES, TensorDict

    positions = torch.arange(ROW_LENGTH).repeat(count, 1)
    trained = positions >= ROW_LENGTH // 2
    columns = {
        "tokens": torch.randint(0, 32, positions.shape),
        "positions": positions,
        "trained": trained,
        "sampler_logprobs": -3.4 * trained,
        "sampler_versions": torch.where(trained, 0, -1).int(),
        "rewards": torch.zeros(positions.shape),
        "advantages": torch.randn(positions.shape) * trained,
    }
    if shape.experts:
        columns[EXPERT_CHOICES] = _choices(positions, shape)
    return TensorDict(columns, batch_size=positions.shape)


def _choices(places_RL: Any, shape: Architecture) -> Any:
    """Two experts for each token and layer `[R, L, N, 2]`: one of each half, but for each tenth token two of the first.

    So the first of two ranks has `UNEVEN` times the mean."""
    import torch

    half = shape.experts // 2
    first_RL, second_RL = places_RL % half, half + places_RL // half % half
    second_RL = torch.where(places_RL % 10 == 0, (first_RL + 1) % half, second_RL)
    choices_RL2 = torch.stack([first_RL, second_RL], -1).to(torch.uint8)
    return choices_RL2[:, :, None].repeat(1, 1, shape.layers, 1)


def peak_of(profile: Any) -> int:
    """The most bytes that the allocator had given out at a time since the second batch began."""
    from torch._C._profiler import _EventType

    changes, since, events = [], 0, list(profile.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events += event.children
        if event.tag == _EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        elif event.name == "second":
            since = event.start_time_ns
    changes.sort(key=lambda change: change[0])
    return peak_since(changes, since)


def peak_since(changes: Iterable[tuple[int, int, int]], since: int) -> int:
    """The most bytes held at a time from `since` on, by each change's time, address and bytes (negative if freed).

    The profiler sees no other threads. If a thread of gloo is the last to hold a tensor, its free is not among the
    changes; the block counts until the allocator gives out a part of it again."""
    begins: list[int] = []
    sizes: dict[int, int] = {}
    held = peak = 0
    for at, address, size in changes:
        first = bisect_left(begins, address)
        if first and begins[first - 1] + sizes[begins[first - 1]] > address:
            first -= 1
        last = bisect_left(begins, address + max(size, 1))
        held -= sum(sizes.pop(begin) for begin in begins[first:last])
        begins[first:last] = [address] if size > 0 else []
        if size > 0:
            sizes[address] = size
            held += size
        if at >= since:
            peak = max(peak, held)
    return peak


def _resident() -> int:
    """The most memory that this process had so far, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def main() -> int:
    """Measure all cases, print, and write the numbers where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    machine = Machine.now()
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as folder:
        found = [measure(Path(folder), name) for name in CASES]
    table = Table("trainer", "estimate", "measured", "ratio", "process grew", title="MiB of the first rank")
    for case in found:
        table.add_row(
            case.name, f"{case.estimated:.2f}", f"{case.measured:.2f}", f"{case.ratio:.3f}", f"{case.grown:.0f}"
        )
    Console().print(table)
    print(machine)
    if arguments.json:
        record = {case.name: asdict(case) | {"ratio": case.ratio} for case in found}
        arguments.json.write_text(json.dumps({"machine": machine.record(), **record}, indent=1) + "\n")
    return int(any(abs(case.ratio - 1) > MOST_OFF for case in found))


if __name__ == "__main__":
    sys.exit(main())
