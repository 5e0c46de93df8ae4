"""How much of a bare engine's speed is left when requests come through the generator actor.

    python -m bench.generate [--requests N] [--model FOLDER] [--json FILE]

The same requests of heavy-tailed length, one engine at a time, each in a process of its own, one thread on one core:
sent from this process through the actor, as in a run (`actor`); given directly to vLLM's engine around the same model
definition (`bare`); and to vLLM around its own model (`native`). All requests are there at once and each writes exactly
its number of tokens. `ratio` is actor / bare, `native_ratio` is actor / native: medians over rounds in which each side
runs once.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from monarch.actor import Actor, endpoint, this_host
from rich.console import Console
from rich.table import Table

from goaly.generate.actor import Generator
from goaly.generate.request import Sampling
from goaly.generate.settings import GeneratorSettings
from goaly.models.settings import ModelSettings
from goaly.models.tiny import write_tiny_model

ROUNDS = 5
MAX_TOKENS = 384


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt, and how many tokens are written to it."""

    prompt: list[int]
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Tokens per second of each side, and what they come to."""

    requests: int
    tokens: int
    actor: float
    bare: float
    native: float

    @property
    def ratio(self) -> float:
        """Through the actor, over the bare engine around the same model."""
        return self.actor / self.bare

    @property
    def native_ratio(self) -> float:
        """Through the actor, over the bare engine around vLLM's own model."""
        return self.actor / self.native


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


def _sampling(request: Request) -> Sampling:
    return Sampling(max_tokens=request.tokens)


def _one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    from goaly.telemetry import logs

    logs.quiet(Path(tempfile.gettempdir()) / "goaly-bench-generate.log")


class Bare(Actor):
    """A process that holds nothing but vLLM's engine, and times it from inside: asking it costs nothing."""

    def __init__(self, engine: str, model: ModelSettings):
        from goaly.generate.engine import Engine

        self._vllm = Engine(settings(engine), model)._vllm

    @endpoint
    def seconds(self, requests: list[Request]) -> float:
        """The time that the engine takes to end all requests."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

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
            self._vllm.add_request(str(number), tokens_input(request.prompt), parameters)
        written = 0
        while self._vllm.has_unfinished_requests():
            written += sum(len(output.outputs[0].token_ids) for output in self._vllm.step())
        assert written == sum(request.tokens for request in requests)
        return time.perf_counter() - started


async def measure(folder: Path, count: int) -> Result:
    """Run every side in turns; medians."""
    requests, model = heavy_tailed(count), ModelSettings(path=str(folder))
    tokens = sum(request.tokens for request in requests)
    procs = [this_host().spawn_procs(per_host={"procs": 1}, bootstrap=_one_thread) for _ in range(3)]
    generator = procs[0].spawn("generator", Generator, settings("torchtitan"), model)
    bare = procs[1].spawn("bare", Bare, "torchtitan", model)
    native = procs[2].spawn("native", Bare, "native", model)
    await generator.start.call_one()

    async def through_the_actor(batch: list[Request], label: str) -> float:
        started = time.perf_counter()
        samples = await asyncio.gather(
            *(
                generator.generate.call_one(f"{label} {number}", request.prompt, _sampling(request))
                for number, request in enumerate(batch)
            )
        )
        assert sum(len(sample.tokens) for sample in samples) == sum(request.tokens for request in batch)
        return time.perf_counter() - started

    warm_up = requests[:64]
    await through_the_actor(warm_up, "warm-up")
    await bare.seconds.call_one(warm_up)
    await native.seconds.call_one(warm_up)
    seconds: dict[str, list[float]] = {"actor": [], "bare": [], "native": []}
    for turn in range(ROUNDS):
        seconds["bare"].append(await bare.seconds.call_one(requests))
        seconds["actor"].append(await through_the_actor(requests, str(turn)))
        seconds["native"].append(await native.seconds.call_one(requests))
    await generator.close.call_one()
    await asyncio.gather(*(mesh.stop() for mesh in procs))
    speeds = {side: tokens / statistics.median(taken) for side, taken in seconds.items()}
    return Result(requests=count, tokens=tokens, **speeds)


def report(result: Result) -> dict[str, Any]:
    """Numbers by name, for the table and the file."""
    return {**asdict(result), "ratio": result.ratio, "native_ratio": result.native_ratio}


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
    numbers = report(result)
    table = Table("", "value", title="generation, one thread")
    for name, value in numbers.items():
        table.add_row(name, f"{value:,.3f}" if "ratio" in name else f"{value:,.0f}")
    Console().print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(numbers, indent=2) + "\n")


if __name__ == "__main__":
    main()
