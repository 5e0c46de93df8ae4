"""Compares the log-probs of trainer and sampler bit by bit, for any model and any two parallelisms.

    python -m goaly.parity --config FILE [--requests N] [key=value ...]

A config of a run says which model, and how generator and trainer divide it. The generator samples requests of mixed
lengths, in groups with the same prompt. The first answers and one prompt are as long as the config allows, the others
are short. All are there at once, in a cache that is too small for them and in steps that are too short for many
prompts. The trainer recomputes what was sampled, on three packings. If a run of this config can update weights in the
middle of an answer, so does the check, once: half as large ones. If a run replays choices of experts, so does the
check. Adapters are left out: new ones change nothing.

The exit code is 1 if a log-prob differs. With bitwise numerics the check then searches for the operation that computes
other bits (`parity_search.py`). Each rank is a process of its own, which this one starts and waits for.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from goaly.backlog.packing import assign
from goaly.base.config import load
from goaly.base.errors import ConfigError
from goaly.generate.request import Sampling
from goaly.generate.scheduling_counter import SchedulingCounts
from goaly.generate.settings import GeneratorSettings
from goaly.models.families import architecture, read_config
from goaly.models.settings import ModelSettings
from goaly.parity_search import UPDATED, halve, keep_first, search, with_cache_of
from goaly.plan.run_config import RunConfig
from goaly.run.rendezvous import fork_ranks_from_one_server, in_ranks
from goaly.train.rank_thread import join_process_group
from goaly.train.settings import TrainerSettings
from goaly.trajectory import EXPERT_CHOICES, TensorDict, pack_rows, token_data

if TYPE_CHECKING:
    from goaly.generate.request import Sample
    from goaly.generate.vllm_engine import VllmEngine

SHARED = 4
"""Successive requests with the same prompt, as the samples of a group."""
LONG = 3
"""Answers that end at the longest sequence that is allowed."""
SHORT = 512
"""The most tokens of the other prompts and answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """A request of the check."""

    name: str
    prompt: list[int]
    sampling: Sampling

    @property
    def tokens(self) -> int:
        """Those of the whole sequence."""
        return len(self.prompt) + self.sampling.max_tokens


def mixed_requests(
    count: int, *, vocabulary: int, longest: int, temperature: float = 1.0, seed: int = 0
) -> list[CheckedRequest]:
    """Seeded requests, whose sequences have at most `longest` tokens; some have as many."""
    draw = random.Random(seed)
    asked: list[CheckedRequest] = []
    for number in range(count):
        if number % SHARED == 0:
            drawn = min(SHORT, int(8 * draw.paretovariate(0.7)))
            length = longest // 2 if number == SHARED else min(longest // 2, drawn)
            prompt = [draw.randrange(vocabulary) for _ in range(length)]
        room = longest - len(prompt)
        drawn = min(SHORT, int(8 * draw.paretovariate(0.8)))
        length = room if number < LONG else max(1, min(room, drawn))
        sampling = Sampling(max_tokens=length, temperature=temperature, seed=draw.randrange(1 << 30))
        asked.append(CheckedRequest(name=f"{seed}-{number}", prompt=prompt, sampling=sampling))
    return asked


def cramped(model: ModelSettings, generator: GeneratorSettings, asked: Sequence[CheckedRequest]) -> GeneratorSettings:
    """The generator with a cache for half of the longest sequences of these requests, but for one whole sequence at
    least, and with short steps: requests are preempted and prompts are computed in parts."""
    at_once = sorted(one.tokens for one in asked)[-min(LONG, generator.most_running) :]
    steps = replace(generator, max_step_tokens=2 * generator.most_running)
    return with_cache_of(model, steps, sum(at_once) // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Trained tokens, and those whose log-probs are not equal."""

    tokens: int
    differing: int
    largest: float
    """The largest difference."""


def sampled(engine: "VllmEngine", asked: Sequence[CheckedRequest], *, updates: bool = False) -> list[TensorDict]:
    """The sequences that the engine makes of these requests. If it `updates`, the weights are halved when half of the
    answers are complete."""
    for one in asked:
        engine.add(one.name, one.prompt, one.sampling)
    samples: dict[str, Sample] = {}
    while engine.running:
        samples |= dict(engine.step())
        if updates and 2 * len(samples) >= len(asked):
            updates = False
            engine.apply(lambda: halve(engine.named_tensors()))
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
    places = assign([len(one["tokens"]) for one in sequences], row_length, ranks)
    return pack_rows(sequences, places[rank], row_length, 0)


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
    records_choices: bool = False
    updates: bool = False
    """Whether the weights are updated in the middle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputer:
    """A trainer to check, the file of what was sampled, and the packings: row lengths, and rows of a microbatch."""

    model: ModelSettings
    trainer: TrainerSettings
    sequences: Path
    packings: Sequence[tuple[int, int]]
    search: Path | None = None
    """The folder for what a search for the operation needs of the first token that differs; null does not search."""


def sample_in_ranks(sampler: Sampler, out: Path) -> SchedulingCounts:
    """Write the sequences that this generator makes to a file; what its scheduler did."""
    with tempfile.TemporaryDirectory() as folder:
        in_ranks(_sample, sampler.generator.tp, (sampler, out, Path(folder)))
        counts, *others = [torch.load(file, weights_only=False) for file in Path(folder).iterdir()]
    assert others == [counts] * (sampler.generator.tp - 1), "the ranks of a generator schedule the same steps"
    return counts


def recompute_in_ranks(recomputers: Sequence[Recomputer]) -> list[list[Compared]]:
    """The comparisons that trainers of the same ranks make on each of their packings."""
    with tempfile.TemporaryDirectory() as folder:
        in_ranks(_recompute, recomputers[0].trainer.ranks, (recomputers, Path(folder)))
        found = [torch.load(file, weights_only=False) for file in sorted(Path(folder).iterdir())]
    return [[_joined(parts) for parts in zip(*of_ranks, strict=True)] for of_ranks in zip(*found, strict=True)]


def _joined(parts: Sequence[Compared]) -> Compared:
    return Compared(
        tokens=sum(part.tokens for part in parts),
        differing=sum(part.differing for part in parts),
        largest=max(part.largest for part in parts),
    )


def _sample(rank: int, sampler: Sampler, out: Path, counts: Path) -> None:
    from goaly.generate.vllm_engine import VllmEngine

    torch.set_num_threads(sampler.generator.threads)  # vLLM allows it no more later
    engine = VllmEngine(sampler.generator, sampler.model, records_choices=sampler.records_choices)
    counter = engine.counter()
    sequences = sampled(engine, sampler.asked, updates=sampler.updates)
    torch.save(counter.counts, counts / str(rank))
    if rank == 0:
        torch.save([dict(one.items()) for one in sequences], out)
    if sampler.generator.tp > 1:
        dist.barrier()


def _recompute(rank: int, recomputers: Sequence[Recomputer], out: Path) -> None:
    from goaly.train.train_engine import TrainEngine

    found = []
    for one in recomputers:
        folder = one.search
        join_process_group(one.trainer.threads, one.trainer.ranks)
        sequences = _read(one.sequences)
        found.append([])
        for row_length, microbatch_rows in one.packings:
            engine = TrainEngine(one.model, replace(one.trainer, microbatch_rows=microbatch_rows))
            rows = rows_of(sequences, row_length, ranks=one.trainer.fsdp, rank=engine.dp_rank)
            parts = []
            for version in _versions(sequences):
                if version == UPDATED:
                    engine.steps_done = halve(engine.named_tensors())
                part = rows.clone()
                part["trained"] &= part["sampler_versions"] == version
                logprobs_RL = engine.logprobs(part)
                parts.append(compared(part, logprobs_RL))
                if folder is not None and keep_first(engine, part, logprobs_RL, folder, rank):
                    folder = None
            if engine.leads:
                found[-1].append(_joined(parts))
    if found[0]:
        torch.save(found, out / str(rank))


def _versions(sequences: Sequence[TensorDict]) -> list[int]:
    """The versions that sampled tokens."""
    found = {version for one in sequences for version in one["sampler_versions"].unique().tolist()}
    return sorted(version for version in found if version >= 0)


def _read(sequences: Path) -> list[TensorDict]:
    return [token_data(columns) for columns in torch.load(sequences)]


def check(config: RunConfig, requests: int) -> bool:
    """Compare the generator and the trainer of this config, and print how many log-probs differ; whether any does."""
    shape = architecture(read_config(config.model.path))
    longest, row_length = config.max_context, config.backlog.row_length
    generator = replace(config.generator, max_context=longest, max_running=min(config.generator.most_running, 32))
    asked = mixed_requests(
        requests, vocabulary=shape.vocab_size, longest=longest, temperature=config.trainer.temperature
    )
    with tempfile.TemporaryDirectory() as made:
        sequences, searched = Path(made) / "sequences", Path(made) / "searched"
        searched.mkdir()
        sampler = Sampler(
            model=config.model,
            generator=cramped(config.model, generator, asked),
            asked=asked,
            records_choices=config.moe.replays,
            updates=config.generator.on_update == "recompute" and config.backlog.max_staleness > 0,
        )
        did = sample_in_ranks(sampler, sequences)
        updated = sum(len(_versions([one])) > 1 for one in _read(sequences))
        replayed = "; choices of experts were replayed" if config.moe.replays else ""
        print(
            f"{len(asked)} answers, {updated} of them with new weights in the middle; {did.preemptions} preempted, "
            f"{did.prompts_in_parts} prompts in parts, {did.prefix_hits} prefix hits{replayed}"
        )
        recomputer = Recomputer(
            model=config.model,
            trainer=replace(config.trainer, lora=None),
            sequences=sequences,
            search=searched if config.model.numerics == "bitwise" else None,
            packings=[(row_length, config.trainer.microbatch_rows), (longest, 1), (2 * row_length, 3)],
        )
        (found,) = recompute_in_ranks([recomputer])
        for packing in found:
            print(f"{packing.differing} of {packing.tokens} tokens differ, by at most {packing.largest:.3g}")
        differs = any(packing.differing for packing in found)
        if differs and recomputer.search is not None:
            print(search(config.model, recomputer.trainer, generator, searched))
        return differs


def main(argv: Sequence[str] | None = None) -> int:
    """Check, print what differs, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="the config of a run")
    parser.add_argument("--requests", type=int, default=64, help="number of answers that are sampled")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the config")
    given = parser.parse_intermixed_args(argv)
    arguments = [f"--config={given.config}", *given.overrides]
    config = load(RunConfig, arguments, prog="python -m goaly.parity", description="").config
    fork_ranks_from_one_server()
    return int(check(config, given.requests))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(str(error))
