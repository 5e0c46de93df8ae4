"""The weight path's checks of `bench.gpu`: updates of a generator's engine, and GPU tensors through each transport.

Each returns numbers by name, or raises. The trainer is a process of its own, as in a run.
"""

import asyncio
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from monarch.actor import Actor, concurrent_endpoint, this_host, this_proc

from bench.gpu_trainer import MOST_OFF
from goaly.generate.settings import GeneratorSettings
from goaly.models.settings import ModelSettings
from goaly.train.settings import TrainerSettings
from goaly.trajectory import PackedRows, TensorDict
from goaly.weights.publisher import Publisher
from goaly.weights.settings import WeightSettings
from goaly.weights.store import WeightStore
from goaly.weights.subscriber import Subscriber

UPDATES = 4
LEARNING_RATE = 1e-2
"""So high that a step changes log-probs by more than rounding does."""


class TrainerProcess(Actor):
    """The trainer's engine, and a publisher of its weights."""

    @concurrent_endpoint
    async def start(self, model: ModelSettings, store: WeightStore) -> None:
        """Build it, and publish to the store."""
        from goaly.train.settings import OptimizerSettings
        from goaly.train.train_engine import TrainEngine

        self._engine = TrainEngine(model, TrainerSettings(optimizer=OptimizerSettings(lr=LEARNING_RATE)))
        tensors = self._engine.named_tensors()
        settings = WeightSettings().of_model(model.dtype)
        self._publisher = Publisher(store, tensors, settings, rank=0, world=1)

    @concurrent_endpoint
    async def train_and_publish(self, batch: PackedRows, version: int) -> float:
        """Take a step, and publish it as that version; the seconds of the latter."""
        from goaly.losses.objective import Likelihood

        self._engine.train_step(batch, Likelihood())
        began = time.perf_counter()
        await self._publisher.publish(version)
        return time.perf_counter() - began

    @concurrent_endpoint
    async def logprobs(self, rows: TensorDict) -> torch.Tensor:
        """The log-probs of the rows' trained tokens."""
        return self._engine.logprobs(rows)

    @concurrent_endpoint
    async def close(self) -> None:
        """Leave the store."""
        await self._publisher.close()


def updates() -> dict[str, Any]:
    """Train, publish, prefetch and apply versions: vLLM's log-probs become the trainer's."""
    with tempfile.TemporaryDirectory() as made:
        return asyncio.run(_updates(Path(made)))


async def _updates(folder: Path) -> dict[str, Any]:
    from bench.gpu_trainer import random_model
    from bench.train import packed_batch
    from goaly.generate.vllm_engine import VllmEngine
    from goaly.parity import compared, mixed_requests, rows_of, sampled

    model = random_model(folder)
    store = this_proc().spawn("updated", WeightStore, WeightSettings())
    process = this_host().spawn_procs(per_host={"procs": 1})
    trainer = process.spawn("trainer", TrainerProcess)
    await trainer.start.call_one(model, store)
    whole = packed_batch()
    batch = PackedRows(
        rows=whole.rows[:2], batch_trained_tokens=int(whole.rows[:2]["trained"].sum()), batch_sequences=1
    )
    engine = VllmEngine(GeneratorSettings(max_running=32, max_context=256, kv_cache_gib=0.25), model)
    live = engine.live_tensors()
    weights = WeightSettings().of_model(model.dtype)
    subscriber = Subscriber(store, engine.named_tensors(), "reader", weights, live=live)
    await subscriber.join()
    size = sum(one.nbytes for one in live.values()) / 1e9
    taken: dict[str, list[float]] = {"publish": [], "prefetch": [], "apply": []}
    asked = partial(mixed_requests, 16, vocabulary=30, longest=200)
    sampled_before = rows_of(sampled(engine, asked(seed=0)), 256)
    for version in range(1, UPDATES + 1):
        taken["publish"].append(await trainer.train_and_publish.call_one(batch, version))
        await subscriber.newest(version - 1)
        began = time.perf_counter()
        assert await subscriber.prefetch(version)
        fetched = time.perf_counter()
        engine.apply(subscriber.apply)
        _wait_for_gpu()
        taken["prefetch"].append(fetched - began)
        taken["apply"].append(time.perf_counter() - fetched)
    rows = rows_of(sampled(engine, asked(seed=1)), 256)
    found = compared(rows, await trainer.logprobs.call_one(rows))
    moved = compared(sampled_before, await trainer.logprobs.call_one(sampled_before)).largest
    if found.largest > MOST_OFF[model.dtype] or moved < 2 * MOST_OFF[model.dtype]:
        raise AssertionError(
            f"after {UPDATES} updates vLLM's log-probs are up to {found.largest:.3g} from the trainer's; "
            f"those from before are {moved:.3g} from them"
        )
    await subscriber.close()
    engine.close()
    await trainer.close.call_one()
    await process.stop()
    return {
        "logprob_error": found.largest,
        **{f"{part}_ms": 1e3 * median(seconds) for part, seconds in taken.items()},
        "prefetch_gb_per_second": size / median(taken["prefetch"]),
    }


def pinned_staging() -> dict[str, Any]:
    """Publish a GPU's tensors, fetch them into pinned host memory and apply them from there."""
    return asyncio.run(_staged(2.0))


async def _staged(gb: float) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.init()
    settings = WeightSettings(spare="host")
    sources = _numbered(gb, device)
    live = {name: torch.nn.Parameter(torch.zeros_like(one), requires_grad=False) for name, one in sources.items()}
    store = this_proc().spawn("store", WeightStore, settings)
    publisher = Publisher(store, sources, settings, rank=0, world=1)
    subscriber = Subscriber(store, live, "reader", settings)
    await subscriber.join()
    taken: dict[str, list[float]] = {"publish": [], "prefetch": [], "apply": []}
    for version in range(UPDATES):
        for one in sources.values():
            one.add_(1)
        began = time.perf_counter()
        await publisher.publish(version)
        published = time.perf_counter()
        await subscriber.newest(version - 1)
        assert await subscriber.prefetch(version)
        fetched = time.perf_counter()
        subscriber.apply()
        _wait_for_gpu()
        ends = published, fetched, time.perf_counter()
        for part, start, end in zip(taken, (began, *ends), ends, strict=False):
            taken[part].append(end - start)
    wrong = [name for name, one in sources.items() if not torch.equal(one, live[name])]
    assert not wrong, f"tensors that differ: {wrong}"
    slots = publisher._slots
    assert slots is not None
    spares = subscriber._fetched._spares.values()
    pinned = {
        "ring_pinned": on_gpu and all(view.is_pinned() for view in slots.views(0)),
        "spares_pinned": on_gpu and all(one.is_pinned() for one in spares),
    }
    if on_gpu and not all(pinned.values()):
        raise AssertionError(f"memory that the GPU copies from or to is not pinned: {pinned}")
    await subscriber.close()
    await publisher.close()
    size = sum(one.nbytes for one in sources.values()) / 1e9
    speeds = {f"{part}_gb_per_second": size / median(seconds) for part, seconds in taken.items()}
    return pinned | speeds


def _numbered(gb: float, device: torch.device) -> dict[str, torch.Tensor]:
    """Tensors of this size together, with elements that differ and stay exact when small numbers are added."""
    columns, count = 4096, 8
    rows = max(1, round(gb * 1e9 / (4 * columns * count)))
    each = torch.arange(rows * columns, device=device) % (1 << 20)
    return {str(number): (each + number).float().view(rows, columns) for number in range(count)}


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
