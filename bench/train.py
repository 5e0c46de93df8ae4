"""How fast the trainer actor is, beside a bare torchtitan loop and a plain transformers loop.

    python -m bench.train [--steps N] [--model FOLDER] [--json FILE] [--markdown FILE]

The same documents of heavy-tailed lengths, model, loss and threads (one), each side in a process of its own, taking
turns. `actor` is a step as in a run: the controller calls, the trainer pulls its packed rows from another process,
steps, reports metrics and publishes the new weights. `bare` is a plain loop over the same model (torchtitan's, with
goaly's layers on a CPU) and optimizer with the rows at hand: logits at trained positions, the GRPO loss written out, no
metrics, nothing published. `transformers` is the same loop over transformers' model and PyTorch's fused AdamW, with
padded batches: the documents are sorted by length, and a batch has as many as fit into the slots of a microbatch.
`unsorted` pads them as they come, 16 at a time. `ratio` is actor / bare in tokens per second, `over_transformers` is
actor / transformers, `over_unsorted` actor / unsorted; padding does not count as tokens.
"""

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from monarch.actor import Actor, concurrent_endpoint, endpoint, this_host
from tensordict import TensorDict, pad_sequence

from bench.report import Machine, markdown_table, options, page, write
from goaly.backlog.batch import BatchHandle
from goaly.losses.settings import LossSettings
from goaly.models.settings import ModelSettings
from goaly.models.tiny_model import write_tiny_model
from goaly.simulator.full_batches import random_rows
from goaly.train.settings import OptimizerSettings, TrainerSettings
from goaly.train.trainer import PolicyTrainer
from goaly.trajectory import PackedRows
from goaly.weights.settings import WeightSettings
from goaly.weights.store import WeightStore

ROUNDS = 4
WARM_STEPS = 2
ROWS, ROW_LENGTH, PROMPT = 8, 1024, 8
LR, CLIP = 1e-3, 0.2
RATIOS = ("ratio", "over_transformers", "over_unsorted")
AT_ONCE = 16
"""Documents of an unsorted padded batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Tokens per second of each side, and what they come to."""

    tokens_per_step: int
    actor: float
    bare: float
    transformers: float
    unsorted: float
    publish_seconds: float

    @property
    def ratio(self) -> float:
        """Through the actor, over the bare loop."""
        return self.actor / self.bare

    @property
    def over_transformers(self) -> float:
        """Through the actor, over the plain transformers loop."""
        return self.actor / self.transformers

    @property
    def over_unsorted(self) -> float:
        """Through the actor, over the transformers loop that pads documents as they come."""
        return self.actor / self.unsorted


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
    return random_rows(positions, PROMPT, vocabulary, generator, sampler_logprob=-3.4)


class Batches(Actor):
    """Stands in for the trajectory queue: always has the same batch."""

    def __init__(self) -> None:
        self._batch = packed_batch()

    @concurrent_endpoint
    async def rows(self, batch_id: int, dp_rank: int) -> PackedRows:
        """The batch."""
        return self._batch


class PlainLoop(Actor):
    """A plain loop in a process of its own."""

    def __init__(self, folder: str, step: Callable[[str], Callable[[], None]]):
        torch.set_num_threads(1)
        self._step = step(folder)

    @endpoint
    def run(self, steps: int) -> float:
        """The seconds of N steps."""
        started = time.perf_counter()
        for _ in range(steps):
            self._step()
        return time.perf_counter() - started


def bare_step(folder: str) -> Callable[[], None]:
    """One step over torchtitan's model, as a function."""
    from goaly.models.attention import document_masks
    from goaly.models.definition import model_spec
    from goaly.models.hf import load_hf

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
            logits = head(hidden[:, :-1][rows["trained"][:, 1:]])
            (grpo_loss(logits, rows) / batch.batch_trained_tokens).backward()
        clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizers.step()
        optimizers.zero_grad()

    return step


def grpo_loss(logits: torch.Tensor, rows: TensorDict) -> torch.Tensor:
    """The loss of the rows' trained tokens, which these logits predict, summed."""
    trained = rows["trained"][:, 1:]
    targets = rows["tokens"][:, 1:][trained]
    logprobs = logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    ratio = (logprobs - rows["sampler_logprobs"][:, 1:][trained]).exp()
    advantages = rows["advantages"][:, 1:][trained]
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).sum()


def sorted_step(folder: str) -> Callable[[], None]:
    """One step over transformers' model and documents of similar lengths, as a function."""
    slots = TrainerSettings().microbatch_rows * ROW_LENGTH
    batches: list[list[TensorDict]] = []
    for document in sorted(documents(), key=len, reverse=True):
        if not batches or (len(batches[-1]) + 1) * len(batches[-1][0]) > slots:
            batches.append([])
        batches[-1].append(document)
    return padded_step(folder, batches)


def unsorted_step(folder: str) -> Callable[[], None]:
    """One step over transformers' model and documents as they come, as a function."""
    found = documents()
    return padded_step(folder, [found[start : start + AT_ONCE] for start in range(0, len(found), AT_ONCE)])


def documents() -> list[TensorDict]:
    """The documents of the packed batch."""
    rows = packed_batch().rows.flatten()
    starts = (rows["positions"] == 0).nonzero().flatten().tolist()
    return [rows[start:stop] for start, stop in pairwise([*starts, len(rows)])]


def padded_step(folder: str, batches: list[list[TensorDict]]) -> Callable[[], None]:
    """One step over transformers' model and these batches, each padded to its longest document, as a function."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), fused=True)
    padded = [pad_sequence(batch, pad_dim=0, return_mask=True) for batch in batches]
    trained = sum(int(rows["trained"][:, 1:].sum()) for rows in padded)

    def step() -> None:
        for rows in padded:
            hidden = model.model(
                input_ids=rows["tokens"], attention_mask=rows["masks", "tokens"].long()
            ).last_hidden_state
            logits = model.lm_head(hidden[:, :-1][rows["trained"][:, 1:]])
            (grpo_loss(logits, rows) / trained).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return step


PLAIN = {"bare": bare_step, "transformers": sorted_step, "unsorted": unsorted_step}


async def measure(folder: str, steps: int) -> Result:
    """All sides in turns; the median turn counts."""
    hub, trainer_proc, *plain_procs = (
        this_host().spawn_procs(per_host={"procs": 1}, bootstrap=_quiet) for _ in range(2 + len(PLAIN))
    )
    store = hub.spawn("store", WeightStore, WeightSettings())
    queue = hub.spawn("queue", Batches)
    settings = TrainerSettings(optimizer=OptimizerSettings(lr=LR))
    trainer = trainer_proc.spawn(
        "trainer", PolicyTrainer, settings, ModelSettings(path=folder), LossSettings(), WeightSettings(), store, queue
    )
    plain = {
        side: proc.spawn(side, PlainLoop, folder, step)
        for (side, step), proc in zip(PLAIN.items(), plain_procs, strict=True)
    }
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
    for loop in plain.values():
        await loop.run.call_one(WARM_STEPS)
    turns: dict[str, list[float]] = {side: [] for side in ("actor", *plain)}
    for turn in range(ROUNDS):
        for side in turns if turn % 2 == 0 else reversed(turns):
            seconds = await (run_actor(steps) if side == "actor" else plain[side].run.call_one(steps))
            turns[side].append(steps * tokens / seconds)
    await trainer.close.call_one()
    await asyncio.gather(*(mesh.stop() for mesh in (hub, trainer_proc, *plain_procs)))
    speeds = {side: statistics.median(found) for side, found in turns.items()}
    return Result(tokens_per_step=tokens, publish_seconds=statistics.median(published), **speeds)


def _quiet() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"


def main() -> None:
    """Measure, print, and write."""
    parser = options(__doc__, "json", "markdown", steps=8)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; a tiny model by default")
    arguments = parser.parse_args()
    machine = Machine.now()
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.model or write_tiny_model(Path(made) / "model")
        result = asyncio.run(measure(str(folder), arguments.steps))
    print(markdown_table(("", "tokens/s"), rows(result)))
    ratios = {name: getattr(result, name) for name in RATIOS}
    content: dict[str, Any] = {"machine": machine.record(), **asdict(result), **ratios}
    write(arguments.json, content)
    write(arguments.markdown, markdown(result, machine))


def rows(result: Result) -> list[tuple[str, str]]:
    """The lines of the table."""
    speeds = {
        "trainer actor": result.actor,
        "bare torchtitan loop": result.bare,
        "plain transformers loop, sorted by length": result.transformers,
        "the same, unsorted": result.unsorted,
    }
    ratios = {name: getattr(result, name) for name in RATIOS}
    return [(name, f"{speed:,.0f}") for name, speed in speeds.items()] + [
        (f"`{name}`", f"{ratio:.3f}") for name, ratio in ratios.items()
    ]


def markdown(result: Result, machine: Machine) -> str:
    """The page of the results."""
    facts = f"{result.tokens_per_step} tokens a step, medians over {ROUNDS} rounds. Machine at the start: {machine}."
    about = (__doc__ or "").split("\n\n", 2)[2].strip()
    return page("train", "Training", about, facts, markdown_table(("", "tokens/s"), rows(result)))


if __name__ == "__main__":
    main()
