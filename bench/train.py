"""How much of a bare torchtitan loop's speed is left when batches come through the trainer actor.

    python -m bench.train [--steps N] [--model FOLDER] [--json FILE]

The same packed batches, model, loss and threads (one), each side in a process of its own, taking turns. `actor` is a
step as in a run: the controller calls, the trainer pulls its rows from another process, steps, reports metrics and
publishes the new weights. `bare` is a plain loop over the same model (torchtitan's, with goaly's layers on a CPU) and
optimizer with the rows at hand: logits at trained positions, the GRPO loss written out, no metrics, nothing published.
`ratio` is actor / bare in tokens per second.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from monarch.actor import Actor, concurrent_endpoint, endpoint, this_host
from rich.console import Console
from rich.table import Table
from tensordict import TensorDict

from goaly.backlog.batch import BatchHandle
from goaly.losses.settings import LossSettings
from goaly.models.settings import ModelSettings
from goaly.models.tiny import write_tiny_model
from goaly.train.settings import OptimizerSettings, TrainerSettings
from goaly.train.trainer import PolicyTrainer
from goaly.trajectory import PackedRows
from goaly.weights.settings import WeightSettings
from goaly.weights.store import WeightStore

ROUNDS = 4
WARM_STEPS = 2
ROWS, ROW_LENGTH, PROMPT = 8, 1024, 8
LR, CLIP = 1e-3, 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Tokens per second of each side, and what they come to."""

    tokens_per_step: int
    actor: float
    bare: float
    publish_seconds: float

    @property
    def ratio(self) -> float:
        """Through the actor, over the bare loop."""
        return self.actor / self.bare


def packed_batch(seed: int = 0, vocabulary: int = 32) -> PackedRows:
    """Rows full of documents of 20-200 tokens, the shorter the more frequent, trained after their prompts."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.zeros(ROWS, ROW_LENGTH, dtype=torch.int64)
    for row in range(ROWS):
        start = 0
        while start < ROW_LENGTH:
            length = int(20 * 10 ** torch.rand((), generator=generator).item())
            stop = min(start + length, ROW_LENGTH)
            positions[row, start:stop] = torch.arange(stop - start)
            start = stop
    trained = positions >= PROMPT
    columns = {
        "tokens": torch.randint(0, vocabulary, positions.shape, generator=generator),
        "positions": positions,
        "trained": trained,
        "sampler_logprobs": -3.4 * trained,
        "sampler_versions": torch.where(trained, 0, -1).int(),
        "rewards": torch.zeros(positions.shape),
        "advantages": torch.randn(positions.shape, generator=generator) * trained,
    }
    return PackedRows(
        rows=TensorDict(columns, batch_size=positions.shape),
        batch_trained_tokens=int(trained.sum()),
        batch_sequences=int((positions == 0).sum()),
    )


class Batches(Actor):
    """Stands in for the trajectory queue: always has the same batch."""

    def __init__(self) -> None:
        self._batch = packed_batch()

    @concurrent_endpoint
    async def rows(self, batch_id: int, dp_rank: int) -> PackedRows:
        """The batch."""
        return self._batch


class BareLoop(Actor):
    """A plain torchtitan loop in a process of its own."""

    def __init__(self, folder: str):
        self._step = bare_step(folder)

    @endpoint
    def run(self, steps: int) -> float:
        """Seconds that so many steps took."""
        started = time.perf_counter()
        for _ in range(steps):
            self._step()
        return time.perf_counter() - started


def bare_step(folder: str) -> Callable[[], None]:
    """One step of the plain loop, as a function."""
    from goaly.models.attention import document_masks
    from goaly.models.hf import load_hf
    from goaly.models.spec import model_spec

    torch.set_num_threads(1)
    spec = model_spec(folder)
    model = spec.model.build()
    load_hf(model, spec, folder)
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
    from torchtitan.distributed.utils import clip_grad_norm_

    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": LR, "betas": (0.9, 0.95)})
    optimizers = OptimizersContainer.Config(param_groups=[group], implementation="fused").build(model_parts=[model])
    head, model.lm_head = model.lm_head, torch.nn.Identity()  # applied below, where something is trained
    parameters = [*model.parameters(), *head.parameters()]
    microbatch_rows = TrainerSettings().microbatch_rows
    batch = packed_batch()

    def step() -> None:
        for rows in batch.rows.split(microbatch_rows, dim=0):
            hidden = model(
                rows["tokens"],
                positions=rows["positions"],
                attention_masks=document_masks(model, rows["positions"]),
            )
            trained = rows["trained"][:, 1:]
            logits = head(hidden[:, :-1][trained])
            targets = rows["tokens"][:, 1:][trained]
            logprobs = logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
            ratio = (logprobs - rows["sampler_logprobs"][:, 1:][trained]).exp()
            advantages = rows["advantages"][:, 1:][trained]
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            losses = -torch.minimum(ratio * advantages, clipped * advantages)
            (losses.sum() / batch.batch_trained_tokens).backward()
        clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizers.step()
        optimizers.zero_grad()

    return step


async def measure(folder: str, steps: int) -> Result:
    """Both sides in turns; the median turn counts."""
    hub, trainer_proc, bare_proc = (this_host().spawn_procs(per_host={"procs": 1}, bootstrap=_quiet) for _ in range(3))
    store = hub.spawn("store", WeightStore, WeightSettings())
    queue = hub.spawn("queue", Batches)
    settings = TrainerSettings(optimizer=OptimizerSettings(lr=LR))
    trainer = trainer_proc.spawn(
        "trainer", PolicyTrainer, settings, ModelSettings(path=folder), LossSettings(), WeightSettings(), store, queue
    )
    bare = bare_proc.spawn("bare", BareLoop, folder)
    batch = packed_batch()
    tokens = batch.rows.batch_size.numel()
    handle = BatchHandle(
        id=0, sequences=batch.batch_sequences, trained_tokens=batch.batch_trained_tokens, tokens=tokens, metrics={}
    )
    published: list[float] = []

    async def run_actor(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            await trainer.step.call_one(handle)
            publishing = time.perf_counter()
            await trainer.publish.call_one()
            published.append(time.perf_counter() - publishing)
        return time.perf_counter() - started

    await trainer.start.call_one()
    await run_actor(WARM_STEPS)
    await bare.run.call_one(WARM_STEPS)
    turns: dict[str, list[float]] = {"actor": [], "bare": []}
    for turn in range(ROUNDS):
        for side in ("actor", "bare") if turn % 2 == 0 else ("bare", "actor"):
            seconds = await (run_actor(steps) if side == "actor" else bare.run.call_one(steps))
            turns[side].append(steps * tokens / seconds)
    await trainer.close.call_one()
    await asyncio.gather(*(mesh.stop() for mesh in (hub, trainer_proc, bare_proc)))
    return Result(
        tokens_per_step=tokens,
        actor=statistics.median(turns["actor"]),
        bare=statistics.median(turns["bare"]),
        publish_seconds=statistics.median(published),
    )


def _quiet() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description="The trainer actor against a bare torchtitan loop.")
    parser.add_argument("--steps", type=int, default=8, help="steps in a turn")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; a tiny model by default")
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.model or write_tiny_model(Path(made) / "model")
        result = asyncio.run(measure(str(folder), arguments.steps))
    report(result, arguments.json)


def report(result: Result, json_file: Path | None) -> None:
    """The table, and the file."""
    table = Table(title=f"{result.tokens_per_step} tokens a step, one thread")
    table.add_column("")
    table.add_column("tokens/s", justify="right")
    table.add_row("trainer actor", f"{result.actor:.0f}")
    table.add_row("bare torchtitan loop", f"{result.bare:.0f}")
    table.add_row("ratio", f"{result.ratio:.3f}")
    Console().print(table)
    if json_file is not None:
        content: dict[str, Any] = {**asdict(result), "ratio": result.ratio}
        json_file.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
