"""The cost of the agents' endpoint: the same chats without HTTP, through it, and through vLLM's own OpenAI server.

    python -m bench.gateway [--streams N] [--rounds N] [--json FILE]

As many streams as given, each a connection with one chat after the other, stream answers of a tiny model. One generator
has the last core; the first core has all that is in front of it: the endpoint, as in a rollout worker, or vLLM's
server, with the client of both in a process of its own. Without HTTP (`direct`), this process asks its router with the
rendered tokens. The endpoint writes each turn to its session's file, and both servers look for tool calls in answers.
Answers have 64 to 192 tokens, the same in each arm, and the arms take turns. `ratio` is gateway /
direct, `over_vllm` is gateway / vLLM, in tokens per second, each the median over the rounds. Latencies are those of
whole answers.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import psutil
from monarch.actor import this_host

from bench.gateway_client import Load, Seen, answer_tokens
from bench.report import Machine, options, show, write
from goaly.agents.answer_parser import AnswerParser
from goaly.agents.gateway import Endpoint, Gateway
from goaly.agents.session import Session
from goaly.agents.session_files import SessionFiles
from goaly.agents.settings import EndpointSettings
from goaly.base.telemetry import process_logs
from goaly.generate.generator import Generator
from goaly.generate.policy import Policy
from goaly.generate.request import Sampling
from goaly.generate.router import Router
from goaly.generate.settings import GeneratorSettings
from goaly.models.settings import ModelSettings
from goaly.models.tiny_model import write_tiny_model
from goaly.prompts.prompt import Message
from goaly.prompts.settings import ChatSettings
from goaly.prompts.tokenizer import ChatTokenizer
from tests.vllm_server import vllm_server

CONTEXT = 256
QUESTION = "1234+5678="
TOOL_PARSER = "hermes"
TOKENS = 128
"""Mean length of an answer; those that measure requests per second have one token."""
CHATS = 4
"""Chats of each stream."""
ONE_STREAM_CHATS = 16
ARMS = ("direct", "gateway", "vllm")

Ask = Callable[[Load], Awaitable[Seen]]


@dataclass(slots=True, kw_only=True)
class Measured:
    """Measurements of each arm, by the name of the load."""

    seen: dict[str, dict[str, list[Seen]]] = field(default_factory=dict)

    def add(self, load: str, arm: str, seen: Seen) -> None:
        """Keep one measurement."""
        self.seen.setdefault(load, {}).setdefault(arm, []).append(seen)

    def numbers(self, streams: int) -> dict[str, float]:
        """Speeds, ratios and latencies, by name."""
        many, one, short = self.seen["many"], self.seen["one"], self.seen["short"]

        def speed(arm: str) -> list[float]:
            return [seen.tokens / seen.seconds for seen in many[arm]]

        def latency(seen: list[Seen]) -> float:
            return 1000 * median(median(each.latencies) for each in seen)

        def over(other: str) -> float:
            return median(ours / theirs for ours, theirs in zip(speed("gateway"), speed(other), strict=True))

        return {
            "streams": streams,
            "ratio": over("direct"),
            "over_vllm": over("vllm"),
            **{f"{arm}_tokens_per_second": median(speed(arm)) for arm in ARMS},
            **{f"{arm}_requests_per_second": median(len(s.latencies) / s.seconds for s in short[arm]) for arm in ARMS},
            "added_ms_at_1_stream": latency(one["gateway"]) - latency(one["direct"]),
            "vllm_added_ms_at_1_stream": latency(one["vllm"]) - latency(one["direct"]),
            f"added_ms_at_{streams}_streams": latency(many["gateway"]) - latency(many["direct"]),
            f"vllm_added_ms_at_{streams}_streams": latency(many["vllm"]) - latency(many["direct"]),
        }


class Front:
    """A generator, and the sessions of a rollout worker in front of it."""

    def __init__(
        self, chat: ChatTokenizer, router: Router, gateway: Gateway, parser: AnswerParser, files: SessionFiles
    ):
        self._chat = chat
        self._files = files
        self._router = router
        self._gateway = gateway
        self._parser = parser
        self._asked = 0

    async def direct(self, load: Load) -> Seen:
        """Ask without HTTP, with tokens."""
        tokens = self._chat.render([Message(role="user", content=QUESTION)])
        latencies: list[float] = []

        async def stream(number: int) -> int:
            policy, written = self._policy(), 0
            for chat in range(load.chats):
                began = time.perf_counter()
                length = answer_tokens(load.tokens, number, chat)
                written += len((await policy.sample(tokens, max_tokens=length, min_tokens=length)).tokens)
                latencies.append(time.perf_counter() - began)
            return written

        began = time.perf_counter()
        written = sum(await asyncio.gather(*(stream(number) for number in range(load.streams))))
        return Seen(seconds=time.perf_counter() - began, tokens=written, latencies=latencies)

    async def by_http(self, load: Load) -> Seen:
        """Ask at the endpoint: each stream has a session."""
        with ExitStack() as open_sessions:
            endpoints = [open_sessions.enter_context(self._served()) for _ in range(load.streams)]
            return await asked(load, endpoints[0].base_url, [endpoint.api_key for endpoint in endpoints])

    def _served(self) -> AbstractContextManager[Endpoint]:
        policy = self._policy()
        session = Session(self._chat, prompt_id="q", log=partial(self._files.write, policy.name))
        return self._gateway.serve(session, policy, self._parser)

    def _policy(self) -> Policy:
        self._asked += 1
        return Policy(
            sampler=self._router,
            name=f"bench.{self._asked}",
            session=str(self._asked),
            sampling=Sampling(max_tokens=TOKENS),
            min_version=0,
            max_context=CONTEXT,
            decode=self._chat.decode,
            evaluation=True,
        )


async def asked(load: Load, url: str, keys: list[str]) -> Seen:
    """The measurements of the client's process."""
    command = [sys.executable, "-m", "bench.gateway_client"]
    client = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    out, _ = await client.communicate(json.dumps(load.request(url, keys, QUESTION)).encode())
    if client.returncode:
        raise RuntimeError(f"the client ended with {client.returncode}")
    return Seen(**json.loads(out))


@asynccontextmanager
async def front(folder: Path, streams: int, cores: Sequence[int]) -> AsyncIterator[Front]:
    """The generator on the last core, the endpoint on this one."""
    chat, router = ChatTokenizer(folder), Router()
    procs = this_host().spawn_procs(per_host={"procs": 1}, bootstrap=partial(_begin_generator, cores[-1]))
    generator = procs.spawn("generator", Generator, _settings(streams), ModelSettings(path=str(folder)))
    await generator.start.call_one()
    router.update({"generator-0": generator})
    parser, files = AnswerParser(chat, ChatSettings(tool_parser=TOOL_PARSER)), SessionFiles(folder / "sessions")
    gateway = Gateway(EndpointSettings(), 0, str(folder), CONTEXT, files)
    await asyncio.to_thread(parser.load)
    await gateway.start(parser)
    try:
        yield Front(chat, router, gateway, parser, files)
    finally:
        await gateway.close()
        router.update({})
        await generator.close.call_one()
        await procs.stop()


def _settings(streams: int) -> GeneratorSettings:
    return GeneratorSettings(max_running=streams, max_context=CONTEXT, kv_cache_gib=1.0)


def _begin_generator(core: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.sched_setaffinity(0, {core})
    process_logs.quiet(Path(tempfile.gettempdir()) / "goaly-bench-gateway.log")


@contextmanager
def vllm_front(folder: Path, streams: int, cores: Sequence[int]) -> Iterator[Ask]:
    """vLLM's own server: its front on the first core, as this process, and its engine on the last."""
    options = ["--served-model-name", "policy", "--max-model-len", str(CONTEXT), "--max-num-seqs", str(streams)]
    options += ["--no-enable-log-requests", "--disable-uvicorn-access-log"]
    options += ["--enable-auto-tool-choice", "--tool-call-parser", TOOL_PARSER]
    with vllm_server(folder, folder / "vllm.log", *options, cores=cores) as (pid, url):
        front_process = psutil.Process(pid)
        _pin(front_process, cores[0])
        for engine in front_process.children(recursive=True):
            _pin(engine, cores[-1])
        yield lambda load: asked(load, url, ["none"] * load.streams)


def _pin(process: psutil.Process, core: int) -> None:
    for thread in process.threads():
        os.sched_setaffinity(thread.id, {core})


async def measure(folder: Path, streams: int, rounds: int, cores: Sequence[int]) -> Measured:
    """Run the arms in turns, under each load."""
    loads = {
        "many": Load(streams=streams, chats=CHATS, tokens=TOKENS),
        "short": Load(streams=streams, chats=CHATS, tokens=1),
        "one": Load(streams=1, chats=ONE_STREAM_CHATS, tokens=TOKENS),
    }
    measured = Measured()
    with vllm_front(folder, streams, cores) as vllm:
        async with front(folder, streams, cores) as ours:
            arms: dict[str, Ask] = {"direct": ours.direct, "gateway": ours.by_http, "vllm": vllm}
            for ask in arms.values():
                await ask(Load(streams=streams, chats=1, tokens=16))  # warms up
            for _ in range(rounds):
                for name, load in loads.items():
                    for arm, ask in arms.items():
                        measured.add(name, arm, await ask(load))
    return measured


def main() -> None:
    """Measure, print a table, write the file."""
    arguments = options(__doc__, "json", streams=256, rounds=5).parse_args()
    machine = Machine.now()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(folder)
        measured = asyncio.run(measure(Path(folder), arguments.streams, arguments.rounds, cores))
    numbers = measured.numbers(arguments.streams)
    show(numbers, f"the agents' endpoint; {machine}")
    write(arguments.json, {**numbers, "machine": machine.record()})


if __name__ == "__main__":
    main()
