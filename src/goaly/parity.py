"""Compares the log-probs of trainer and sampler bit by bit, for any model and any two parallelisms.

    python -m goaly.parity --config FILE [--requests N] [key=value ...]

A config of a run says which model, and how generator and trainer divide it. The generator samples requests of mixed
lengths up to the longest sequence, of which some share a prompt (`parity_requests.py`). All are there at once, in a
cache that is too small for them and in steps that are too short for many prompts; the numbers of preemptions, of
prompts in parts and of prefix hits are printed. The trainer recomputes what was sampled, on several packings. If a run
of this config can update weights in the middle of an answer, so does the check, once: half as large ones. If it
replays choices of experts, the trainer does that here, too. Adapters are left out: new ones change nothing.

The exit code is 1 if a log-prob differs. With bitwise numerics the operation that computes other bits is then searched
for (`parity_search.py`).

Each rank is a process of its own, which this one starts and waits for.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from goaly.backlog.packing import assign
from goaly.base.config import load
from goaly.base.errors import ConfigError
from goaly.generate.scheduling import SchedulingCounts
from goaly.generate.settings import GeneratorSettings
from goaly.models.architecture import architecture, read_config
from goaly.models.settings import ModelSettings
from goaly.parity_requests import UPDATED, CheckedRequest, cramped, halve, mixed_requests
from goaly.parity_search import keep_first, search
from goaly.plan.config import RunConfig
from goaly.run.ranks import fork_ranks_from_one_server, in_ranks
from goaly.train.rank import join_process_group
from goaly.train.settings import TrainerSettings
from goaly.trajectory import EXPERT_CHOICES, TensorDict, pack_rows, token_data

if TYPE_CHECKING:
    from goaly.generate.engine import Engine
    from goaly.generate.request import Sample
    from goaly.train.engine import TrainEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Trained tokens, and those whose log-probs are not equal."""

    tokens: int
    differing: int
    largest: float
    """The largest difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The result of a check."""

    answers: int
    updated: int
    """Answers in whose middle the weights were updated."""
    scheduling: SchedulingCounts
    replays: bool
    """Whether choices of experts were replayed."""
    packings: list[Compared]
    explained: str = ""
    """One of the tokens that differ, and the operation that makes it differ, if it was searched for."""


def sampled(engine: "Engine", asked: Sequence[CheckedRequest], *, updates: bool = False) -> list[TensorDict]:
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

    def engine(self) -> "Engine":
        """This rank's engine."""
        from goaly.generate.engine import Engine

        torch.set_num_threads(self.generator.threads)  # vLLM allows it no more later
        return Engine(self.generator, self.model, records_choices=self.records_choices)


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
    )


def _sample(rank: int, sampler: Sampler, out: Path, counts: Path) -> None:
    engine = sampler.engine()  # whose end is that of the ranks' group
    counter = engine.counter()
    sequences = sampled(engine, sampler.asked, updates=sampler.updates)
    torch.save(counter.counts, counts / str(rank))
    if rank == 0:
        torch.save([dict(one.items()) for one in sequences], out)
    if sampler.generator.tp > 1:
        dist.barrier()


def _recompute(rank: int, recomputers: Sequence[Recomputer], out: Path) -> None:
    from goaly.train.engine import TrainEngine

    found = []
    for one in recomputers:
        folder = one.search
        join_process_group(one.trainer.threads, one.trainer.ranks)
        sequences = _sequences(one)
        found.append([])
        for row_length, microbatch_rows in one.packings:
            engine = TrainEngine(one.model, replace(one.trainer, microbatch_rows=microbatch_rows))
            rows = rows_of(sequences, row_length, ranks=one.trainer.fsdp, rank=engine.dp_rank)
            parts = []
            for part in _by_version(engine, rows, _versions(sequences)):
                logprobs_RL = engine.logprobs(part)
                parts.append(compared(part, logprobs_RL))
                if folder is not None and keep_first(engine, part, logprobs_RL, folder, rank):
                    folder = None
            if engine.leads:
                found[-1].append(_joined(parts))
    if found[0]:
        torch.save(found, out / str(rank))


def _by_version(engine: "TrainEngine", rows: TensorDict, versions: Sequence[int]) -> Iterator[TensorDict]:
    """The rows with the trained tokens of one version at a time, whose weights the engine then has."""
    for version in versions:
        if version == UPDATED:
            engine.steps_done = halve(engine.named_tensors())
        part = rows.clone()
        part["trained"] &= part["sampler_versions"] == version
        yield part


def _versions(sequences: Sequence[TensorDict]) -> list[int]:
    """The versions that sampled tokens."""
    found = {version for one in sequences for version in one["sampler_versions"].unique().tolist()}
    return sorted(version for version in found if version >= 0)


def _sequences(recomputer: Recomputer) -> list[TensorDict]:
    return [token_data(columns) for columns in torch.load(recomputer.sequences)]


def check(config: RunConfig, requests: int) -> Checked:
    """Compare the generator and the trainer of this config on three packings. With bitwise numerics the first one that
    differs is explained."""
    shape = architecture(read_config(config.model.path))
    longest = config.max_context
    generator = replace(config.generator, max_context=longest, max_running=min(config.generator.max_running, 32))
    asked = mixed_requests(
        requests, vocabulary=shape.vocab_size, longest=longest, temperature=config.trainer.temperature
    )
    row_length = config.backlog.row_length
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        sampler = Sampler(
            model=config.model,
            generator=cramped(config.model, generator, asked),
            asked=asked,
            records_choices=config.moe.replays,
            updates=config.generator.on_update == "recompute" and config.backlog.max_staleness > 0,
        )
        scheduling = sample_in_ranks(sampler, folder / "sequences")
        searched = folder / "searched"
        searched.mkdir()
        recomputer = Recomputer(
            model=config.model,
            trainer=replace(config.trainer, lora=None),
            sequences=folder / "sequences",
            search=searched if config.model.numerics == "bitwise" else None,
            packings=[(row_length, config.trainer.microbatch_rows), (longest, 1), (2 * row_length, 3)],
        )
        (found,) = recompute_in_ranks([recomputer])
        explained = ""
        if recomputer.search is not None and any(comparison.differing for comparison in found):
            explained = search(config.model, recomputer.trainer, generator, searched)
        return Checked(
            answers=len(asked),
            updated=sum(len(_versions([one])) > 1 for one in _sequences(recomputer)),
            scheduling=scheduling,
            replays=config.moe.replays,
            packings=found,
            explained=explained,
        )


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
    scheduled, replayed = found.scheduling, "; choices of experts were replayed" if found.replays else ""
    print(
        f"{found.answers} answers, {found.updated} of them with new weights in the middle; {scheduled.preemptions} "
        f"preempted, {scheduled.prompts_in_parts} prompts in parts, {scheduled.prefix_hits} prefix hits{replayed}"
    )
    for comparison in found.packings:
        print(f"{comparison.differing} of {comparison.tokens} tokens differ, by at most {comparison.largest:.3g}")
    if found.explained:
        print(found.explained)
    return int(any(comparison.differing for comparison in found.packings))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(str(error))
