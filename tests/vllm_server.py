"""vLLM's own OpenAI server on CPUs, which tests and benchmarks compare goaly with."""

import os
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

import httpx

from goaly.run.process_agent import lasting_port
from tests.program import Program

START_SECONDS = 600
"""On a busy machine it takes minutes to start."""
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
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
    settings = ["--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    settings += ["--dtype", "float32", "--generation-config", "vllm", "--disable-log-stats", *options]
    variables = {**os.environ, **VARIABLES}
    server = Program("vllm.entrypoints.openai.api_server", *settings, output=log, variables=variables, cores=cores)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(port):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"vLLM's server did not start:\n{log.read_text()}")
            time.sleep(0.2)
        yield server.pid, f"http://127.0.0.1:{port}/v1"
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == HTTPStatus.OK
    except httpx.TransportError:
        return False
