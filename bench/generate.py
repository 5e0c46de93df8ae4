"""How much of a bare engine's speed is left when requests come through the generator actor.

    python -m bench.generate [--requests N] [--model FOLDER] [--json FILE]

The same requests of heavy-tailed length, all there at once, each writing exactly its number of tokens, on one thread of
one core: sent from this process through the actor, as in a run (`actor`); given directly to the same engine, in the
same process, while the actor rests (`bare`); and given directly to vLLM around its own model (`native`). The sides take
turns. `ratio` is actor / bare, `native_ratio` is actor / native, each the median over the rounds.
"""

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, cast

from monarch.actor import Actor, concurrent_endpoint, endpoint, this_host
from rich.console import Console
from rich.table import Table

from goaly.generate.connection import Connection
from goaly.generate.generator import Generator
from goaly.generate.request import Sampling
from goaly.generate.settings import GeneratorSettings
from goaly.models.settings import ModelSettings
from goaly.models.tiny import write_tiny_model

if TYPE_CHECKING:
    from goaly.generate.engine import Engine

ROUNDS = 5
MAX_TOKENS = 384


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt, and how many tokens are written to it."""

    prompt: list[int]
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The seconds of each side, measured one after the other."""

    bare: float
    actor: float
    native: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What was measured."""

    requests: int
    tokens: int
    rounds: list[Round]

    def numbers(self) -> dict[str, float]:
        """Tokens per second and ratios, by name, for the table and the file."""
        sides = {
            side: self.tokens / median(getattr(one, side) for one in self.rounds)
            for side in ("actor", "bare", "native")
        }
        return {
            "requests": self.requests,
            "tokens": self.tokens,
            **{f"{side}_tokens_per_second": speed for side, speed in sides.items()},
            "ratio": median(one.bare / one.actor for one in self.rounds),
            "native_ratio": median(one.native / one.actor for one in self.rounds),
        }


def heavy_tailed(count: int) -> list[Request]:
    """Requests whose lengths follow a Pareto law: most are short, a few are as long as the limit."""
    draw = random.Random(0)
    return [
        Request(
            prompt=[draw.randrange(2, 30) for _ in range(draw.randrange(8, 33))],
            tokens=min(MAX_TOKENS, int(12 * draw.paretovariate(1.1))),
        )
        for _ in range(count)
    ]


def settings(engine: str) -> GeneratorSettings:
    """The same for every side."""
    return GeneratorSettings(engine=engine, max_running=128, max_context=512, kv_cache_gib=0.5)


def _one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    from goaly.telemetry import logs

    logs.quiet(Path(tempfile.gettempdir()) / "goaly-bench-generate.log")


class Measured(Generator):
    """A generator whose engine can also be timed without the actor around it."""

    @concurrent_endpoint
    async def bare_seconds(self, requests: list[Request]) -> float:
        """The time that the engine alone takes; the actor's own thread sleeps meanwhile."""
        engine = cast("Engine", self._started_loop()._engine)
        return await asyncio.to_thread(bare_seconds, engine, requests)


class Native(Actor):
    """A process that holds nothing but vLLM's engine around its own model."""

    def __init__(self, model: ModelSettings):
        from goaly.generate.engine import Engine

        self._engine = Engine(settings("native"), model)

    @endpoint
    def bare_seconds(self, requests: list[Request]) -> float:
        """The time that the engine takes."""
        return bare_seconds(self._engine, requests)


def bare_seconds(engine: "Engine", requests: list[Request]) -> float:
    """How long vLLM's engine takes to end all requests: nothing of ours runs."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    vllm = engine._vllm
    started = time.perf_counter()
    for number, request in enumerate(requests):
        parameters = SamplingParams(
            max_tokens=request.tokens,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        vllm.add_request(str(number), tokens_input(request.prompt), parameters)
    written = 0
    while vllm.has_unfinished_requests():
        written += sum(len(output.outputs[0].token_ids) for output in vllm.step())
    seconds = time.perf_counter() - started
    assert written == sum(request.tokens for request in requests)
    return seconds


async def measure(folder: Path, count: int) -> Result:
    """Run the sides in turns."""
    requests, model = heavy_tailed(count), ModelSettings(path=str(folder))
    procs = [this_host().spawn_procs(per_host={"procs": 1}, bootstrap=_one_thread) for _ in range(2)]
    generator = procs[0].spawn("generator", Measured, settings("torchtitan"), model)
    native = procs[1].spawn("native", Native, model)
    await generator.start.call_one()
    connection = Connection(generator)

    async def through_the_actor(batch: list[Request], label: str) -> float:
        started = time.perf_counter()
        samples = await asyncio.gather(
            *(
                connection.submit(f"{label} {number}", request.prompt, Sampling(max_tokens=request.tokens))
                for number, request in enumerate(batch)
            )
        )
        seconds = time.perf_counter() - started
        assert sum(len(sample.tokens) for sample in samples) == sum(request.tokens for request in batch)
        return seconds

    warm_up = requests[:64]
    await through_the_actor(warm_up, "warm-up")
    await native.bare_seconds.call_one(warm_up)
    rounds = [
        Round(
            bare=await generator.bare_seconds.call_one(requests),
            actor=await through_the_actor(requests, str(turn)),
            native=await native.bare_seconds.call_one(requests),
        )
        for turn in range(ROUNDS)
    ]
    connection.close()
    await generator.close.call_one()
    await asyncio.gather(*(mesh.stop() for mesh in procs))
    return Result(requests=count, tokens=sum(request.tokens for request in requests), rounds=rounds)


def main() -> None:
    """Measure, print a table, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; a tiny random model if not given")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.model is None:
            write_tiny_model(folder)
        result = asyncio.run(measure(arguments.model or Path(folder), arguments.requests))
    numbers = result.numbers()
    table = Table("", "value", title="generation, one thread")
    for name, value in numbers.items():
        table.add_row(name, f"{value:,.3f}" if "ratio" in name else f"{value:,.0f}")
    Console().print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(numbers, indent=2) + "\n")


if __name__ == "__main__":
    main()
