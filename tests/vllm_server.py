"""vLLM's own OpenAI server on CPUs, which tests and benchmarks compare goaly with."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path

import httpx

from goaly.base.process import die_with
from goaly.run.rendezvous import lasting_port
from tests.program import Program

SERVER = "vllm.entrypoints.openai.api_server"
START_SECONDS = 600
"""On a busy machine it takes minutes to start."""
VARIABLES = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # or its engine imports everything again
}


@contextmanager
def vllm_server(
    model: Path, log: Path, *options: str, cores: Collection[int] | None = None
) -> Iterator[tuple[int, str]]:
    """The process id and the base URL of a server that answers; it ends with the block, or with this process. It may
    use these cores, or those of this process."""
    port = lasting_port()
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", SERVER, *_arguments(model, port, options)],
            env={**os.environ, **VARIABLES},
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=partial(_begin, os.getpid(), cores or os.sched_getaffinity(0)),
        )
    try:
        yield server.pid, _url(port, server.poll, log)
    finally:
        server.terminate()
        server.wait()


@contextmanager
def forked_vllm_server(model: Path, log: Path, *options: str) -> Iterator[str]:
    """The base URL of a server that answers, which need not import its libraries; it ends with the block."""
    port = lasting_port()
    variables = {**os.environ, **VARIABLES, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    server = Program(SERVER, *_arguments(model, port, options), output=log, variables=variables)
    try:
        yield _url(port, server.poll, log)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def _arguments(model: Path, port: int, options: Sequence[str]) -> list[str]:
    arguments = ["--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    return [*arguments, "--dtype", "float32", "--generation-config", "vllm", "--disable-log-stats", *options]


def _url(port: int, poll: Callable[[], int | None], log: Path) -> str:
    """The base URL of a server, once it answers."""
    deadline = time.monotonic() + START_SECONDS
    while not _answers(port):
        if poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"vLLM's server did not start:\n{log.read_text()}")
        time.sleep(0.2)
    return f"http://127.0.0.1:{port}/v1"


def _begin(parent: int, cores: Collection[int]) -> None:
    die_with(parent)
    os.sched_setaffinity(0, cores)


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == HTTPStatus.OK
    except httpx.TransportError:
        return False
