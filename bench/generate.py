"""How much of a bare engine's speed is left when requests come through the generator actor, and what vLLM's own model
would reach.

    python -m bench.generate [--only dense|experts | --model FOLDER] [--streams N ...] [--rounds N] [--json FILE]
                             [--markdown FILE]

A stream sends its next request when its last answer is there, as an episode does. Answers have heavy-tailed lengths.
One thread of one core generates, and the streams are on another core. Sides take turns:

    actor    the streams send their requests through the generator actor, as in a run
    bare     the same engine in the same process gets the same requests directly, while the actor rests
    native   vLLM's engine around its own model gets the same requests directly

`ratio` is actor / bare in tokens per second, `definition` is bare / native: what torchtitan's definition of the model
costs inside vLLM. Both are medians over the rounds.
"""

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from monarch.actor import Actor, concurrent_endpoint, endpoint, this_host

from bench.report import Machine, markdown_table, options, page, write
from goaly.generate.connection import Connection
from goaly.generate.generator import Generator
from goaly.generate.request import Sampling
from goaly.generate.settings import GeneratorSettings
from goaly.models.settings import ModelSettings
from goaly.models.tiny_model import TinyModel, write_tiny_model

if TYPE_CHECKING:
    from goaly.generate.vllm_engine import VllmEngine

MAX_TOKENS = 384
STREAMS = (1, 16, 256)
REQUESTS = {1: 24, 16: 192}
"""Requests of a round, by the number of streams; with others, four for each stream."""
SIZES = {"dense": TinyModel(), "experts": TinyModel(experts=8)}
BARS = {"ratio": 0.95, "definition": 1.0}


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
class Load:
    """The rounds of one model and number of streams."""

    model: str
    streams: int
    tokens: int
    rounds: list[Round]

    def numbers(self) -> dict[str, float]:
        """Tokens per second and ratios, by name."""
        sides = {
            side: self.tokens / median(getattr(one, side) for one in self.rounds)
            for side in ("actor", "bare", "native")
        }
        return {
            **sides,
            "ratio": median(one.bare / one.actor for one in self.rounds),
            "definition": median(one.native / one.bare for one in self.rounds),
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
    return GeneratorSettings(engine=engine, max_running=max(STREAMS), max_context=512, kv_cache_gib=0.5)


def _one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    from goaly.base.telemetry import process_logs

    process_logs.quiet(Path(tempfile.gettempdir()) / "goaly-bench-generate.log")


class Measured(Generator):
    """A generator whose engine can also be timed without the actor around it."""

    @concurrent_endpoint
    async def bare_seconds(self, requests: list[Request], streams: int) -> float:
        """The time that the engine alone takes; the actor's own thread sleeps meanwhile."""
        engine = cast("VllmEngine", self._started_loop()._engine)
        return await asyncio.to_thread(bare_seconds, engine, requests, streams)


class Native(Actor):
    """A process that holds nothing but vLLM's engine around its own model."""

    def __init__(self, model: ModelSettings):
        from goaly.generate.vllm_engine import VllmEngine

        self._engine = VllmEngine(settings("native"), model)

    @endpoint
    def bare_seconds(self, requests: list[Request], streams: int) -> float:
        """The time that the engine takes."""
        return bare_seconds(self._engine, requests, streams)


def bare_seconds(engine: "VllmEngine", requests: list[Request], streams: int) -> float:
    """How long vLLM's engine takes to end all requests: nothing of ours runs."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    vllm = engine._vllm
    waiting = iter(enumerate(requests))

    def begin(count: int) -> None:
        for _, (number, request) in zip(range(count), waiting, strict=False):
            parameters = SamplingParams(
                max_tokens=request.tokens,
                ignore_eos=True,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            vllm.add_request(str(number), tokens_input(request.prompt), parameters)

    started = time.perf_counter()
    begin(streams)
    written = 0
    while vllm.has_unfinished_requests():
        ended = vllm.step()
        written += sum(len(output.outputs[0].token_ids) for output in ended)
        begin(len(ended))
    seconds = time.perf_counter() - started
    assert written == sum(request.tokens for request in requests)
    return seconds


async def through_the_actor(connection: Connection, requests: list[Request], streams: int, label: str) -> float:
    """How long the streams take to get all answers."""
    waiting = iter(enumerate(requests))

    async def stream(waiting: Iterator[tuple[int, Request]]) -> int:
        written = 0
        for number, request in waiting:
            sampling = Sampling(max_tokens=request.tokens)
            written += len((await connection.submit(f"{label} {number}", request.prompt, sampling)).tokens)
        return written

    started = time.perf_counter()
    written = await asyncio.gather(*(stream(waiting) for _ in range(streams)))
    seconds = time.perf_counter() - started
    assert sum(written) == sum(request.tokens for request in requests)
    return seconds


async def measure(name: str, folder: Path, streams: Sequence[int], rounds: int) -> list[Load]:
    """The loads of one model: its sides in turns."""
    model = ModelSettings(path=str(folder))
    procs = [this_host().spawn_procs(per_host={"procs": 1}, bootstrap=_one_thread) for _ in range(2)]
    generator = procs[0].spawn("generator", Measured, settings("torchtitan"), model)
    native = procs[1].spawn("native", Native, model)
    await generator.start.call_one()
    connection = Connection(generator)
    warm_up = heavy_tailed(64)
    await through_the_actor(connection, warm_up, 64, "warm-up")
    await generator.bare_seconds.call_one(warm_up, 64)
    await native.bare_seconds.call_one(warm_up, 64)
    loads = []
    for count in streams:
        requests = heavy_tailed(REQUESTS.get(count, 4 * count))
        measured = [
            Round(
                bare=await generator.bare_seconds.call_one(requests, count),
                actor=await through_the_actor(connection, requests, count, f"{count} {turn}"),
                native=await native.bare_seconds.call_one(requests, count),
            )
            for turn in range(rounds)
        ]
        tokens = sum(request.tokens for request in requests)
        loads.append(Load(model=name, streams=count, tokens=tokens, rounds=measured))
    connection.close()
    await generator.close.call_one()
    await asyncio.gather(*(mesh.stop() for mesh in procs))
    return loads


def rows(loads: Sequence[Load]) -> list[list[str]]:
    """The cells of the table."""
    found = []
    for load in loads:
        numbers = load.numbers()
        speeds = [f"{numbers[side]:,.0f}" for side in ("actor", "bare", "native")]
        found.append([load.model, str(load.streams), *speeds, *(f"{numbers[name]:.3f}" for name in BARS)])
    return found


COLUMNS = ("model", "streams", "actor tok/s", "bare tok/s", "native tok/s", *BARS)


def markdown(loads: Sequence[Load], machine: Machine) -> str:
    """The page of the results."""
    bars = " and ".join(f"{bar} for `{name}`" for name, bar in BARS.items())
    facts = f"The bars are {bars}. Rounds: {len(loads[0].rounds)}. Machine at the start: {machine}."
    about = (__doc__ or "").split("\n\n", 2)[2].strip()
    return page("generate", "Generation", about, facts, markdown_table(COLUMNS, rows(loads)))


def main() -> None:
    """Measure, print a table, write the files."""
    parser = options(__doc__, "json", "markdown", rounds=5)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--only", choices=SIZES, help="measure one of the tiny random models; both by default")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; two tiny random models if not given")
    arguments = parser.parse_args()
    machine = Machine.now()
    loads: list[Load] = []
    with tempfile.TemporaryDirectory() as made:
        sizes = SIZES if arguments.only is None else {arguments.only: SIZES[arguments.only]}
        models = {name: write_tiny_model(Path(made) / name, size) for name, size in sizes.items()}
        if arguments.model is not None:
            models = {arguments.model.name: arguments.model}
        for name, folder in models.items():
            loads += asyncio.run(measure(name, folder, arguments.streams, arguments.rounds))
    print(markdown_table(COLUMNS, rows(loads)))
    found: list[dict[str, Any]] = [{**asdict(load), **load.numbers()} for load in loads]
    write(arguments.json, {"machine": machine.record(), "loads": found})
    write(arguments.markdown, markdown(loads, machine))


if __name__ == "__main__":
    main()
