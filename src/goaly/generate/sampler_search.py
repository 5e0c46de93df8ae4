"""Finds the operation with which a sampler gives a document other bits than one rank of a trainer does.

    python -m goaly.generate.sampler_search FOLDER

A trainer whose log-prob differs from the sampler's (`train/parity_search.py`) starts this program beside itself. It
builds the ranks of a generator with the trainer's weights, and lets them compute the document as a sampler may: in one
step, in two, and in steps of one token. So it finds what the generator's code does otherwise. It does not see the
processes of a run's generators, which may have other weights.

Invariants
    SY-1  No process of a search is left when its trainer ends, however that ends.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from goaly.environments import guardian
from goaly.generate.settings import GeneratorSettings
from goaly.models.operations import Outputs, by_token, first_other, joined, of_tokens
from goaly.models.settings import ModelSettings
from goaly.parity_requests import with_cache_of
from goaly.run.ranks import fork_ranks_from_one_server, in_ranks

if TYPE_CHECKING:
    from goaly.generate.engine import Engine

PROGRAM = (sys.executable, "-m", "goaly.generate.sampler_search")
ASKED, SAID = "asked", "said"
"""Files in the folder of a search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedSampler:
    """A generator, and what one rank of a trainer computed with the same weights."""

    model: ModelSettings
    generator: GeneratorSettings
    tokens: list[int]
    """The document."""
    outputs: Outputs
    """Those of the trainer's operations, of these tokens."""


def operation_of(sampler: SearchedSampler) -> str:
    """The first operation of the sampler's ranks with other outputs, or why none is named; in processes of its own."""
    with tempfile.TemporaryDirectory(prefix="goaly-sampler-") as folder:
        torch.save(sampler, Path(folder) / ASKED)
        watched = [sys.executable, guardian.__file__, str(os.getpid()), ""]  # SY-1
        ended = subprocess.run([*watched, *PROGRAM, folder], capture_output=True, text=True)
        if ended.returncode == 0:
            return (Path(folder) / SAID).read_text()
        why = ended.stderr.strip().splitlines()[-1:] or [f"exit code {ended.returncode}"]
        return f"The search in a sampler failed: {why[0]}"


def main(argv: Sequence[str]) -> None:
    """Search as the folder says."""
    (folder,) = map(Path, argv)
    sampler: SearchedSampler = torch.load(folder / ASKED, weights_only=False)
    fork_ranks_from_one_server()
    in_ranks(_compare, sampler.generator.tp, (sampler, folder))
    found = [torch.load(folder / str(rank)) for rank in range(sampler.generator.tp)]
    (folder / SAID).write_text(_said(sampler, found))


def _said(sampler: SearchedSampler, found: Sequence[Mapping[str, str | None]]) -> str:
    """The findings of all ranks in a sentence; each has one for each way in which it computed the document."""
    names = [*sampler.outputs, None]
    ways = _steps(sampler.tokens)
    for way in ways:
        rank = min(range(len(found)), key=lambda rank: names.index(found[rank][way]))
        if (name := found[rank][way]) is not None:
            return (
                f"The first operation whose output on sampler rank {rank} is not that of one trainer rank is {name}. "
                f"The sampler computed the document {way}."
            )
    return (
        "All operations of a sampler with the trainer's weights, before lm_head, give the document the bits of one "
        f"trainer rank, as a prompt that is computed {' or '.join(ways)}."
    )


def _steps(tokens: Sequence[int]) -> dict[str, int]:
    """Ways in which a sampler computes a document, and the most tokens of a step of each."""
    return {"in one step": len(tokens), "in two steps": (len(tokens) + 1) // 2, "in steps of one token": 1}


def _compare(rank: int, sampler: SearchedSampler, folder: Path) -> None:
    from goaly.generate.engine import Engine

    torch.set_num_threads(sampler.generator.threads)  # vLLM allows it no more later
    one_step = max(sampler.generator.max_step_tokens, len(sampler.tokens))
    generator = with_cache_of(sampler.model, replace(sampler.generator, max_step_tokens=one_step), len(sampler.tokens))
    engine = Engine(generator, sampler.model)
    found = {}
    for way, step_tokens in _steps(sampler.tokens).items():
        mine = _outputs(engine, sampler.tokens, step_tokens, ep=generator.ep)
        found[way] = first_other(mine, sampler.outputs, rank=rank, ranks=generator.tp)
    torch.save(found, folder / str(rank))
    if generator.tp > 1:
        dist.barrier()


def _outputs(engine: "Engine", tokens: list[int], step_tokens: int, *, ep: int) -> Outputs:
    """The outputs of this rank's operations for these tokens, a prompt that steps of so many tokens compute."""
    from goaly.generate.request import Sampling

    engine.limit_steps(step_tokens)
    engine.add("searched", tokens, Sampling(max_tokens=1))
    passes = []
    for start in range(0, len(tokens), step_tokens):
        with engine.recorded() as outputs:
            engine.step()
        of_step = by_token(outputs, has_all_experts=ep == 1)
        passes.append(of_tokens(of_step, 0, min(step_tokens, len(tokens) - start)))
    while engine.running:  # with `generator.async_scheduling` the last step has not been read
        engine.step()
    return joined(passes)


if __name__ == "__main__":
    main(sys.argv[1:])
