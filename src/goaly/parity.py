"""Compares the log-probs of trainer and sampler bit by bit, for any model and any two parallelisms.

    python -m goaly.parity --config FILE [--requests N] [key=value ...]

A config of a run says which model, and how generator and trainer divide it. The generator samples requests of mixed
lengths, of which some share a prompt, all there at once in a cache that is too small for them and in steps that are
too short for many prompts; the trainer recomputes what was sampled, on several packings. The exit code is 1 if a
log-prob differs. Then one rank recomputes it, too, and the operations of the side that differs from this rank are
compared with the rank's, to name the first that does.

Each rank is a process of its own, which this one starts and waits for.
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
from goaly.config import load
from goaly.errors import ConfigError
from goaly.generate.request import Sampling
from goaly.generate.settings import GeneratorSettings
from goaly.models.operations import Outputs, first_other
from goaly.models.settings import ModelSettings
from goaly.models.spec import architecture, read_config
from goaly.run.config import RunConfig
from goaly.run.ranks import fork_ranks_from_one_server, in_ranks
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
class Difference:
    """A token whose log-prob is not the sampler's."""

    sequence: int
    """The number of its request."""
    position: int
    token: int
    trainer: float
    sampler: float

    def __str__(self) -> str:
        return (
            f"The first is token {self.token} at position {self.position} of sequence {self.sequence}: the trainer's "
            f"log-prob is {self.trainer!r}, the sampler's {self.sampler!r}."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Trained tokens, and those whose log-probs are not equal."""

    tokens: int
    differing: int
    largest: float
    """The largest difference."""
    first: Difference | None = None
    """One of the tokens that differ."""
    explained: str = ""
    """The operation that makes the first token differ, if it was searched for."""


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
    return pack_rows(sequences, _places(sequences, row_length, ranks)[rank], row_length, 0)


def _places(sequences: Sequence[TensorDict], row_length: int, ranks: int) -> Sequence[Sequence[tuple[int, ...]]]:
    """The numbers of the sequences in each row of each rank."""
    return assign([len(one["tokens"]) for one in sequences], row_length, ranks)


def compared(rows: TensorDict, logprobs_RL: torch.Tensor) -> Compared:
    """The comparison of recomputed log-probs with the sampler's."""
    trained_RL = rows["trained"]
    mine, sampler = logprobs_RL[trained_RL], rows["sampler_logprobs"][trained_RL]
    return Compared(
        tokens=len(mine),
        differing=int((mine != sampler).sum()),
        largest=float((mine - sampler).abs().max()) if len(mine) else 0.0,
    )


def _first(rows: TensorDict, places: Sequence[tuple[int, ...]], logprobs_RL: torch.Tensor) -> Difference | None:
    """The first token of these rows whose log-prob is not the sampler's."""
    sampler_RL = rows["sampler_logprobs"]
    differs = (rows["trained"] & (logprobs_RL != sampler_RL)).nonzero()
    if not len(differs):
        return None
    at = row, column = tuple(differs[0].tolist())
    return Difference(
        sequence=places[row][int((rows["positions"][row, : column + 1] == 0).sum()) - 1],
        position=int(rows["positions"][at]),
        token=int(rows["tokens"][at]),
        trainer=float(logprobs_RL[at]),
        sampler=float(sampler_RL[at]),
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


def cramped(model: ModelSettings, generator: GeneratorSettings, tokens: int) -> GeneratorSettings:
    """The generator with a cache of so many tokens and short steps, so that requests are preempted and prompts are
    computed in parts."""
    shape = architecture(read_config(model.path))
    heads = 2 * shape.layers * shape.kv_heads // generator.tp
    each = heads * shape.head_dim * getattr(torch, model.dtype).itemsize
    held = max(tokens, generator.max_context + 64)
    return replace(generator, kv_cache_gib=held * each / GIB, max_step_tokens=2 * generator.max_running)


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
        first=next((part.first for part in parts if part.first), None),
    )


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
        sequences = _sequences(one)
        found.append([])
        for row_length, microbatch_rows in one.packings:
            engine = TrainEngine(one.model, replace(one.trainer, microbatch_rows=microbatch_rows))
            places = _places(sequences, row_length, one.trainer.fsdp)[engine.dp_rank]
            rows = pack_rows(sequences, places, row_length, 0)
            logprobs_RL = engine.logprobs(rows)
            if engine.leads:
                found[-1].append(replace(compared(rows, logprobs_RL), first=_first(rows, places, logprobs_RL)))
    if found[0]:
        torch.save(found, out / str(rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A search for the operation that makes a token differ, in a folder for what the ranks find."""

    sampler: Sampler
    recomputer: Recomputer
    """On the packing where the token differs."""
    difference: Difference
    folder: Path

    def explained(self) -> str:
        """The first operation that computes other bits, and where."""
        recomputer = self.recomputer
        in_ranks(_compute_alone, 1, (self,))
        said, _ = torch.load(self.folder / "alone")
        if said:
            said = f"One rank of a trainer says: {said}"
            searched, ranks, side = _sampler_operations, self.sampler.generator.tp, "sampler"
        else:
            searched, ranks, side = _trainer_operations, recomputer.trainer.ranks, "trainer"
            said = "One rank of a trainer computes the sampler's bits."
        in_ranks(searched, ranks, (self,))
        found = {rank: torch.load(self.folder / f"rank-{rank}") for rank in range(ranks)}
        names = [*torch.load(self.folder / "alone")[1], None]
        rank = min(found, key=lambda rank: names.index(found[rank]))
        if found[rank] is not None:
            return f"{said} The first operation whose output on {side} rank {rank} is not that rank's is {found[rank]}."
        if side == "trainer":
            return f"{said} All operations of the trainer's ranks before lm_head do, too, so it is lm_head."
        return f"{said} All operations of the sampler before lm_head compute the same bits of a prompt."


def _compute_alone(_: int, search: Search) -> None:
    """What one rank says of the packing, and what its operations give the tokens before the one that differs."""
    from goaly.train.engine import TrainEngine

    one, at = search.recomputer, search.difference
    ((row_length, microbatch_rows),) = one.packings
    join_process_group(one.trainer.threads, 1)
    alone = replace(one.trainer, pp=1, fsdp=1, tp=1, ep=1, microbatch_rows=microbatch_rows)
    engine, sequences = TrainEngine(one.model, alone), _sequences(one)
    said = engine.explain(rows_of(sequences, row_length))
    sequence = sequences[at.sequence]
    outputs = engine.operations(rows_of([sequence], len(sequence["tokens"])))
    torch.save((said, _of_tokens(outputs, 0, at.position)), search.folder / "alone")


def _trainer_operations(rank: int, search: Search) -> None:
    from goaly.train.engine import TrainEngine

    one, at = search.recomputer, search.difference
    ((row_length, microbatch_rows),) = one.packings
    join_process_group(one.trainer.threads, one.trainer.ranks)
    engine, sequences = TrainEngine(one.model, replace(one.trainer, microbatch_rows=microbatch_rows)), _sequences(one)
    places = _places(sequences, row_length, one.trainer.fsdp)[engine.dp_rank]
    first = None
    for start in range(0, len(places), microbatch_rows):
        rows = places[start : start + microbatch_rows]
        outputs = engine.operations(pack_rows(sequences, rows, row_length, 0))
        order = [number for row in rows for number in row]
        if at.sequence in order:
            before = sum(len(sequences[number]["tokens"]) for number in order[: order.index(at.sequence)])
            _, alone = torch.load(search.folder / "alone")
            mine = _of_tokens(outputs, before, before + at.position)
            first = first_other(mine, alone, rank=rank % one.trainer.tp, ranks=one.trainer.tp)
    torch.save(first, search.folder / f"rank-{rank}")


def _sampler_operations(rank: int, search: Search) -> None:
    from goaly.generate.engine import Engine

    one, at = search.sampler, search.difference
    torch.set_num_threads(one.generator.threads)
    tokens = _sequences(search.recomputer)[at.sequence]["tokens"][: at.position].tolist()
    _, alone = torch.load(search.folder / "alone")
    whole = replace(one.generator, max_step_tokens=max(one.generator.max_step_tokens, len(tokens)))
    engine = Engine(whole, one.model)
    mine = _of_tokens(engine.operations(tokens), 0, at.position)
    torch.save(first_other(mine, alone, rank=rank, ranks=one.generator.tp), search.folder / f"rank-{rank}")
    if one.generator.tp > 1:
        dist.barrier()


def _of_tokens(outputs: Outputs, start: int, stop: int) -> Outputs:
    return {name: tuple(part[:, start:stop].clone() for part in parts) for name, parts in outputs.items()}


def _sequences(recomputer: Recomputer) -> list[TensorDict]:
    return [token_data(columns) for columns in torch.load(recomputer.sequences)]


def check(config: RunConfig, requests: int) -> list[Compared]:
    """Compare the generator and the trainer of this config on three packings. With bitwise numerics the first one that
    differs is explained."""
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
        sampler = Sampler(model=config.model, generator=cramped(config.model, generator, 2 * longest), asked=asked)
        sample_in_ranks(sampler, file)
        recomputer = Recomputer(model=config.model, trainer=config.trainer, sequences=file, packings=packings)
        (found,) = recompute_in_ranks([recomputer])
        for number, packing in enumerate(packings):
            if (first := found[number].first) is not None and config.model.numerics == "bitwise":
                where = replace(recomputer, packings=[packing])
                search = Search(sampler=sampler, recomputer=where, difference=first, folder=Path(folder))
                found[number] = replace(found[number], explained=search.explained())
                break
        return found


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
        if comparison.first is not None:
            print(" ".join(filter(None, (str(comparison.first), comparison.explained))))
    return int(any(comparison.differing for comparison in found))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(str(error))
