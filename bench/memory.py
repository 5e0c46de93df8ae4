"""Is the memory that a dry run estimates what real ranks take, and what does a dry run of the largest model take?

    python -m bench.memory [--json FILE]

Real ranks train tiny models, dense and with experts, latent attention, sinks, adapters and bitwise numerics: a batch of
two microbatches, or of four with pipeline stages, and an optimizer step, twice. One rank of each group that a dry run
tells apart is measured: each stage of a pipeline, and ranks with smaller shards. torch's profiler reports the memory of
its tensors; the peak is that of the second batch. Experts get the load that a dry run assumes, by replayed choices:
those of a stage's first rank have a tenth more tokens than the mean, the same in each layer. Beside the peak are
the dry run's estimate for the same rank, their ratio, and the growth of the process, which includes the libraries' own
buffers and the C allocator's. A frozen reference computes log-probs instead. The ring and the copy for a checkpoint of
a trainer, and the weights, fetched weights and key-value cache of a generator are held all the time: the bytes of their
memory are counted.

A dry run of Qwen3-235B-A22B is timed, and its memory measured. The exit code is 1 if an estimate is off by more than
10 %, or the dry run takes more than a minute or 4 GB.
"""

import json
import multiprocessing
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.report import Machine, options, write
from goaly.models.architecture import Architecture
from goaly.models.families import architecture, read_config
from goaly.models.settings import LoraSettings, ModelSettings
from goaly.models.tiny_model import TinyModel, write_tiny_model
from goaly.plan.rank_memory import DTYPE_BYTES, memory_by_role, traced_pass
from goaly.plan.run_config import RunConfig
from goaly.train.settings import TrainerSettings
from goaly.weights.settings import WeightSettings
from tests.random_model import write_random_deepseek, write_random_gpt_oss

MOST_OFF = 0.1
ROW_LENGTH, ROWS = 1024, 2
MIB = 1 << 20
BITWISE, REFERENCE, ADAPTERS = "bitwise", "reference", "adapters"
Model = TinyModel | Callable[[Path], Path]
"""The size of a Qwen3, or what writes another model into a folder."""
WIDER = {"hidden_size": 128, "num_hidden_layers": 6}
DENSE = TinyModel(dim=128, layers=6, hidden_dim=384, max_context=ROW_LENGTH)
EXPERTS = TinyModel(dim=128, layers=6, hidden_dim=128, experts=8, max_context=ROW_LENGTH)
MODELS: dict[str, Model] = {
    "dense": DENSE,
    "tied": replace(DENSE, tied=True),
    "experts": EXPERTS,
    "shared-experts": replace(EXPERTS, shared_experts=1),
    "latent-attention": partial(write_random_deepseek, **WIDER),
    "sinks": partial(write_random_gpt_oss, **WIDER),
}
CASES = """
dense
dense bfloat16 activation_checkpointing=full
dense fsdp=2
dense fsdp=2 bfloat16 activation_checkpointing=selective
dense fsdp=3
dense tp=2
tied tp=2
dense cp=2
dense pp=2
dense pp=2 fsdp=2 bfloat16
dense pp=4
experts
experts pp=2 fsdp=2 ep=2
experts fsdp=2 ep=2
experts fsdp=2 ep=2 bfloat16
experts fsdp=2 ep=2 bfloat16 activation_checkpointing=full
experts fsdp=2 ep=2 activation_checkpointing=full
experts tp=2 ep=2
shared-experts
latent-attention
latent-attention fsdp=2 ep=2
sinks
sinks cp=2
dense adapters
experts fsdp=2 ep=2 adapters
dense bitwise
dense reference
dense reference fsdp=2 bfloat16
experts reference fsdp=2 ep=2 bfloat16
"""
"""A line for each: the model, and settings of the trainer; float32 if it names no type. A `reference` is frozen."""
GENERATORS: dict[str, tuple[TinyModel, int]] = {"generator": (DENSE, 1), "generator, experts, TP 2": (EXPERTS, 2)}
"""Models in bfloat16, and the ranks of a replica."""
LARGEST = Path("configs/grpo/qwen3_235b_a22b.yaml")
CLUSTER = "hosts.imagine={hosts: 16, gpus: 8, gpu_gib: 139}"
MOST_SECONDS, MOST_GB = 60, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The memory of one rank, in MiB."""

    name: str
    estimated: float
    measured: float
    grown: float | None = None
    """Of the process, beside what it had before the engine was built; None: not a pass."""

    @property
    def ratio(self) -> float:
        """The estimate over what was measured."""
        return self.estimated / self.measured


def measure_pass(folder: Path, name: str) -> list[Case]:
    """Estimate, then train, or compute the log-probs of a frozen model."""
    from goaly.run.rendezvous import in_ranks

    size, *words = name.split()
    trains, dtype = REFERENCE not in words, "bfloat16" if "bfloat16" in words else "float32"
    model = replace(_model(folder, MODELS[size], dtype), numerics=BITWISE if BITWISE in words else "fast")
    degrees = {key: int(value) if value.isdigit() else value for key, value in _pairs(words)}
    lora = LoraSettings(rank=8) if ADAPTERS in words else None
    settings = TrainerSettings(microbatch_rows=ROWS, logprob_chunk=512, lora=lora, **degrees)
    shape = architecture(read_config(model.path))
    estimated = traced_pass(shape, model, settings, (ROW_LENGTH,) * ROWS, on_gpu=False, trains=trains)
    in_ranks(_pass, settings.ranks, (model, settings, trains, [ranks[0] for ranks in estimated], folder))
    cases = []
    for ranks, one in estimated.items():
        found = json.loads(_measured(folder, ranks[0]).read_text())
        of_rank = name if len(estimated) == 1 else f"{name}: rank {ranks[0]}"
        cases.append(Case(name=of_rank, estimated=one.total / MIB, measured=found["measured"], grown=found["grown"]))
        if trains:
            ring = WeightSettings().slots * DTYPE_BYTES[dtype] * one.stage_elements / settings.stage_ranks
            cases.append(Case(name=f"{of_rank}: ring", estimated=ring / MIB, measured=found["ring"]))
            copy = 3 * one.trained / MIB
            cases.append(Case(name=f"{of_rank}: checkpoint", estimated=copy, measured=found["checkpoint"]))
    return cases


def measure_generator(folder: Path, name: str) -> list[Case]:
    """Estimate what a generator holds, then build one."""
    from goaly.base.config import load
    from goaly.run.rendezvous import in_ranks

    size, tp = GENERATORS[name]
    model = _model(folder, size, "bfloat16")
    settings = [f"model.path={model.path}", "model.dtype=bfloat16", f"generator.tp={tp}", "generator.kv_cache_gib=0.1"]
    config = load(RunConfig, ["--config=configs/grpo/tiny.yaml", *settings], prog="", description="").config
    (memory,) = memory_by_role(config, on_gpu=False)["generator"]
    estimated = memory.on_device
    out = folder / "held.json"
    in_ranks(_hold, tp, (config.generator, model, out))
    held = json.loads(out.read_text())
    return [Case(name=f"{name}: {part}", estimated=estimated[part] / MIB, measured=held[part]) for part in estimated]


def measure_dry_run(folder: Path) -> dict[str, float]:
    """The seconds of a dry run of `LARGEST`, and the GB of its two processes together, which count shared memory
    twice."""
    out = folder / "dry-run.json"
    began = time.monotonic()
    process = multiprocessing.get_context("spawn").Process(target=_dry_run, args=(folder, out))
    process.start()
    process.join()
    return {"seconds": time.monotonic() - began, **json.loads(out.read_text())}


def _dry_run(folder: Path, out: Path) -> None:
    from goaly.base.config import load
    from goaly.plan.dry_run import describe
    from goaly.plan.fake_ranks import most_process_bytes

    chat = [{"role": "user", "content": "What is 1 + 1?"}]
    dapo = {"data_source": "", "prompt": chat, "reward_model": {"ground_truth": "2"}, "extra_info": {"index": "1"}}
    aime = {"ID": "1", "Problem": "1 + 1?", "Answer": 2, "question": "1 + 1?", "answer": "2"}
    for name, record in (("dapo", dapo), ("aime", aime)):
        (folder / name).with_suffix(".jsonl").write_text(json.dumps(record) + "\n")
    sets = [f"evaluation.sets.{name}.files=[{folder}/aime.jsonl]" for name in ("aime24", "aime25")]
    overrides = [CLUSTER, f"prompts.files=[{folder}/dapo.jsonl]", *sets]
    describe(load(RunConfig, [f"--config={LARGEST}", *overrides], prog="", description="").config)
    out.write_text(json.dumps({"gb": (_resident() + most_process_bytes()) / 1e9}))


def _pairs(words: Iterable[str]) -> list[tuple[str, str]]:
    return [(key, value) for key, equals, value in (word.partition("=") for word in words) if equals]


def _model(folder: Path, model: Model, dtype: Any) -> ModelSettings:
    path = folder / blake2b(repr(model).encode(), digest_size=4).hexdigest()
    if not path.exists():
        write_tiny_model(path, model) if isinstance(model, TinyModel) else model(path)
    return ModelSettings(path=str(path), dtype=dtype)


def _hold(rank: int, settings: Any, model: ModelSettings, out: Path) -> None:
    """Build a generator's engine and the place of fetched weights; the first rank writes what they hold."""
    import torch.distributed as dist

    from goaly.generate.vllm_engine import VllmEngine
    from goaly.weights.fetched_weights import FetchedWeights

    engine = VllmEngine(settings, model)
    held = engine.named_tensors()
    destination = FetchedWeights(held, engine.live_tensors(), engine.naming(), spare="auto")
    destination.allocate(held)
    if rank == 0:
        runner = engine._vllm.model_executor.driver_worker.worker.model_runner
        model_tensors = [*runner.model.parameters(), *runner.model.buffers()]
        found = {"weights": model_tensors, "prefetch": destination.targets(), "KV": runner.kv_caches}
        out.write_text(json.dumps({part: _bytes(tensors) / MIB for part, tensors in found.items()}))
    if settings.tp > 1:
        dist.barrier()


def _bytes(tensors: Iterable[Any]) -> int:
    """The bytes of the tensors' memory, each once."""
    storages = {storage.data_ptr(): storage.nbytes() for one in tensors for storage in [one.untyped_storage()]}
    return sum(storages.values())


def _measured(folder: Path, rank: int) -> Path:
    return folder / f"measured-{rank}.json"


def _pass(
    rank: int, model: ModelSettings, settings: TrainerSettings, trains: bool, measured: list[int], folder: Path
) -> None:
    """Train two batches in this rank, or compute their log-probs; `measured` ranks write what their tensors took in the
    second."""
    import torch
    import torch.distributed as dist

    from goaly.losses.objective import PolicyObjective
    from goaly.losses.settings import LossSettings
    from goaly.train.rank_thread import join_process_group
    from goaly.train.train_engine import TrainEngine
    from goaly.weights.buckets import cut
    from goaly.weights.dtensor_layout import layout_of, local
    from goaly.weights.layout import in_dtype
    from goaly.weights.shared_memory import Ring

    join_process_group(1, settings.ranks)
    torch.manual_seed(0)
    rows = _rows((4 if settings.pp > 1 else 2) * ROWS, architecture(read_config(model.path)))
    trained, objective = int(rows["trained"].sum()) * settings.fsdp, PolicyObjective(LossSettings())
    before = _resident()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        engine = TrainEngine(model, settings, trains=trains)
        for second in (False, True):
            with torch.profiler.record_function("second" if second else "first"):
                if trains:
                    engine.forward_backward(rows.split(ROWS), objective, trained)
                    engine.optimizer_step()
                else:
                    engine.logprobs(rows)
    if rank in measured:
        found = {"measured": peak_of(profile) / MIB, "grown": (_resident() - before) / MIB}
        weights = WeightSettings().of_model(model.dtype)
        layout = in_dtype(layout_of(engine.named_tensors()), getattr(torch, str(weights.transfer_dtype)))
        handle = Ring.create(*cut(layout, weights.bucket_bytes), weights.slots).handle
        state = _bytes(map(local, engine.state_dict().values()))
        found |= {"ring": handle.bytes / MIB, "checkpoint": state / MIB}
        _measured(folder, rank).write_text(json.dumps(found))
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
    return choices_RL2[:, :, None].repeat(1, 1, shape.layers - shape.dense_layers, 1)


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
    arguments = options(__doc__, "json").parse_args()
    machine = Machine.now()
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as folder:
        here = Path(folder)
        dry_run = measure_dry_run(here)
        found = [case for name in GENERATORS for case in measure_generator(here, name)]
        found += [case for name in CASES.strip().splitlines() for case in measure_pass(here, name)]
    table = Table("rank", "estimate", "measured", "ratio", "process grew", title="MiB of a rank")
    for case in found:
        grown = "" if case.grown is None else f"{case.grown:.0f}"
        table.add_row(case.name, f"{case.estimated:.2f}", f"{case.measured:.2f}", f"{case.ratio:.3f}", grown)
    Console().print(table)
    print(f"dry run of {LARGEST.stem}: {dry_run['seconds']:.1f} s, {dry_run['gb']:.2f} GB")
    print(machine)
    record = {case.name: asdict(case) | {"ratio": case.ratio} for case in found}
    written = {"machine": machine.record(), f"dry run of {LARGEST.stem}": dry_run, **record}
    write(arguments.json, written)
    off = any(abs(case.ratio - 1) > MOST_OFF for case in found)
    return int(off or dry_run["seconds"] > MOST_SECONDS or dry_run["gb"] > MOST_GB)


if __name__ == "__main__":
    sys.exit(main())
