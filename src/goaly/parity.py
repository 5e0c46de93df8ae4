"""Compares the log-probs of trainer and sampler bit by bit, for any model and any two parallelisms.

    python -m goaly.parity --config FILE [--requests N] [key=value ...]

A config of a run says which model, and how generator and trainer divide it. The generator samples requests of mixed
lengths, of which some share a prompt, all there at once in a cache that is too small for them; the trainer recomputes
what was sampled, on several packings. The exit code is 1 if a log-prob differs.

Each rank is a process of its own, which this one starts and waits for.
"""

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from goaly.backlog.packing import assign
from goaly.config import load
from goaly.errors import ConfigError
from goaly.generate.request import Sampling
from goaly.generate.settings import GeneratorSettings
from goaly.models.settings import ModelSettings
from goaly.models.spec import architecture, read_config
from goaly.run.config import RunConfig
from goaly.run.fork_server import FORKED
from goaly.run.process_agent import lasting_port
from goaly.train.rank import join_process_group
from goaly.train.settings import TrainerSettings
from goaly.trajectory import EXPERT_CHOICES, TensorDict, pack_rows, token_data

if TYPE_CHECKING:
    from goaly.generate.engine import Engine
    from goaly.generate.request import Sample

GIB = 1 << 30
SHARED = 4
"""Every so many requests have the same prompt, as the samples of a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """A request of the check."""

    name: str
    prompt: list[int]
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Trained tokens, and those whose log-probs are not equal."""

    tokens: int
    differing: int
    largest: float
    """The largest difference."""
    explained: str = ""
    """The first difference; empty if there is none."""


def mixed_requests(
    count: int, *, vocabulary: int, longest: int, temperature: float = 1.0, seed: int = 0
) -> list[CheckedRequest]:
    """Seeded requests of heavy-tailed lengths, of which groups of `SHARED` have a common prompt."""
    draw = random.Random(seed)
    asked: list[CheckedRequest] = []
    for number in range(count):
        if number % SHARED == 0:
            prompt = [draw.randrange(vocabulary) for _ in range(min(longest // 2, int(4 * draw.paretovariate(0.7))))]
        room = longest - len(prompt)
        length = max(1, min(room, int(8 * draw.paretovariate(0.8))))
        sampling = Sampling(max_tokens=length, temperature=temperature, seed=draw.randrange(1 << 30))
        asked.append(CheckedRequest(name=f"{seed}-{number}", prompt=prompt, sampling=sampling))
    return asked


def sampled(engine: "Engine", asked: Sequence[CheckedRequest]) -> list[TensorDict]:
    """The sequences that the engine makes of these requests."""
    for one in asked:
        engine.add(one.name, one.prompt, one.sampling)
    samples: dict[str, Sample] = {}
    while engine.running:
        samples |= dict(engine.step())
    return [sequence(one.prompt, samples[one.name]) for one in asked]


def sequence(prompt: list[int], sample: "Sample") -> TensorDict:
    """A prompt and its answer, as a batch holds them."""
    before = len(prompt)
    choices = {}
    if sample.choices is not None:  # of all tokens but the last
        choices[EXPERT_CHOICES] = torch.cat([sample.choices, torch.zeros_like(sample.choices[:1])])
    trained = torch.arange(before + len(sample.tokens)) >= before
    versions = torch.full((before,), -1, dtype=torch.int32)
    return token_data(
        {
            "tokens": torch.cat([torch.tensor(prompt), sample.tokens]),
            "trained": trained,
            "sampler_logprobs": torch.cat([torch.zeros(before), sample.logprobs]),
            "sampler_versions": torch.cat([versions, sample.versions]),
            "rewards": torch.zeros(len(trained)),
            "advantages": trained.float(),
            **choices,
        }
    )


def rows_of(sequences: Sequence[TensorDict], row_length: int, *, ranks: int = 1, rank: int = 0) -> TensorDict:
    """A rank's rows of these sequences."""
    lengths = [len(one["tokens"]) for one in sequences]
    return pack_rows(sequences, assign(lengths, row_length, ranks)[rank], row_length, 0)


def compared(rows: TensorDict, logprobs_RL: torch.Tensor) -> Compared:
    """The comparison of recomputed log-probs with the sampler's."""
    trained_RL = rows["trained"]
    mine, sampler = logprobs_RL[trained_RL], rows["sampler_logprobs"][trained_RL]
    return Compared(
        tokens=len(mine),
        differing=int((mine != sampler).sum()),
        largest=float((mine - sampler).abs().max()) if len(mine) else 0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """A generator to check, and what it is asked."""

    model: ModelSettings
    generator: GeneratorSettings
    asked: Sequence[CheckedRequest]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputer:
    """A trainer to check, the file of what was sampled, and the packings: row lengths, and rows of a microbatch."""

    model: ModelSettings
    trainer: TrainerSettings
    sequences: Path
    packings: Sequence[tuple[int, int]]


def small_cache(model: ModelSettings, generator: GeneratorSettings, tokens: int) -> GeneratorSettings:
    """The generator with a cache of so many tokens, so that requests are preempted."""
    shape = architecture(read_config(model.path))
    heads = 2 * shape.layers * shape.kv_heads // generator.tp
    each = heads * shape.head_dim * getattr(torch, model.dtype).itemsize
    return replace(generator, kv_cache_gib=max(tokens, generator.max_context + 64) * each / GIB)


def sample_in_ranks(sampler: Sampler, out: Path) -> None:
    """Write the sequences that this generator makes to a file."""
    in_ranks(_sample, sampler.generator.tp, (sampler, out))


def recompute_in_ranks(recomputers: Sequence[Recomputer]) -> list[list[Compared]]:
    """What trainers of the same ranks find on each of their packings."""
    with tempfile.TemporaryDirectory() as folder:
        in_ranks(_recompute, recomputers[0].trainer.ranks, (recomputers, Path(folder)))
        found = [torch.load(file, weights_only=False) for file in sorted(Path(folder).iterdir())]
    return [[_joined(parts) for parts in zip(*of_ranks, strict=True)] for of_ranks in zip(*found, strict=True)]


def _joined(parts: Sequence[Compared]) -> Compared:
    return Compared(
        tokens=sum(part.tokens for part in parts),
        differing=sum(part.differing for part in parts),
        largest=max(part.largest for part in parts),
        explained=next((part.explained for part in parts if part.explained), ""),
    )


def fork_ranks_from_one_server() -> None:
    """Let the ranks be forks of one process that imports what they need. To be called before the first `in_ranks`."""
    if torch.cuda.device_count() == 0:  # an import may initialize CUDA, which a fork cannot use
        multiprocessing.set_forkserver_preload([*FORKED["generator"], *FORKED["trainer"]])


def in_ranks(work: Callable[..., None], ranks: int, arguments: tuple[Any, ...]) -> None:
    """Call `work` in so many processes that can form a process group, with the rank and then these arguments."""
    torch.multiprocessing.start_processes(
        _in_rank, (work, ranks, lasting_port(), *arguments), nprocs=ranks, start_method="forkserver"
    )


def _in_rank(rank: int, work: Callable[..., None], ranks: int, port: int, *arguments: Any) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    work(rank, *arguments)
    sys.stdout.flush()
    os._exit(0)  # libraries' threads would take seconds to end


def _sample(rank: int, sampler: Sampler, out: Path) -> None:
    from goaly.generate.engine import Engine

    torch.set_num_threads(sampler.generator.threads)  # vLLM allows it no more later
    engine = Engine(sampler.generator, sampler.model)
    sequences = sampled(engine, sampler.asked)
    if rank == 0:
        torch.save([dict(one.items()) for one in sequences], out)
    if sampler.generator.tp > 1:
        dist.barrier()


def _recompute(rank: int, recomputers: Sequence[Recomputer], out: Path) -> None:
    from goaly.train.engine import TrainEngine

    found = []
    for one in recomputers:
        join_process_group(one.trainer.threads, one.trainer.ranks)
        sequences = [token_data(columns) for columns in torch.load(one.sequences)]
        found.append([])
        for row_length, microbatch_rows in one.packings:
            engine = TrainEngine(one.model, replace(one.trainer, microbatch_rows=microbatch_rows))
            rows = rows_of(sequences, row_length, ranks=one.trainer.fsdp, rank=engine.dp_rank)
            comparison = compared(rows, engine.logprobs(rows))
            if comparison.differing and one.model.numerics == "bitwise":
                comparison = replace(comparison, explained=engine.explain(rows))
            if engine.leads:
                found[-1].append(comparison)
    if found[0]:
        torch.save(found, out / str(rank))


def check(config: RunConfig, requests: int) -> list[Compared]:
    """Compare the generator and the trainer of this config on three packings."""
    shape = architecture(read_config(config.model.path))
    longest = config.max_context
    generator = replace(config.generator, max_context=longest, max_running=min(config.generator.max_running, 32))
    asked = mixed_requests(
        requests, vocabulary=shape.vocab_size, longest=longest, temperature=config.trainer.temperature
    )
    row_length = config.backlog.row_length
    packings = [(row_length, config.trainer.microbatch_rows), (longest, 1), (2 * row_length, 3)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sequences"
        sampler = Sampler(model=config.model, generator=small_cache(config.model, generator, 2 * longest), asked=asked)
        sample_in_ranks(sampler, file)
        recomputer = Recomputer(model=config.model, trainer=config.trainer, sequences=file, packings=packings)
        return recompute_in_ranks([recomputer])[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Check, say what differs, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="the config of a run")
    parser.add_argument("--requests", type=int, default=64, help="number of answers that are sampled")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the config")
    line = parser.parse_intermixed_args(argv)
    arguments = [f"--config={line.config}", *line.overrides]
    config = load(RunConfig, arguments, prog="python -m goaly.parity", description="").config
    fork_ranks_from_one_server()
    found = check(config, line.requests)
    for comparison in found:
        print(f"{comparison.differing} of {comparison.tokens} tokens differ, by at most {comparison.largest:.3g}")
        if comparison.explained:
            print(comparison.explained)
    return int(any(comparison.differing for comparison in found))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(str(error))
