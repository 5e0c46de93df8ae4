"""Fixtures that more than one stage's tests use."""

import atexit
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read where it is imported, once for all programs
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "500ms")  # where no run watches processes

import gc
import logging
import multiprocessing
import shlex
import signal
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import monarch.actor
import pytest
from monarch._src.actor import config as monarch_config
from random_model import write_random_model

from goaly.run.fork_server import LAUNCHER, SHARED, ForkServer

monarch_config.prefix_python_logs_with_actor = False  # once Monarch is up, it would prefix this process's records

# A death that a test causes may be told once more half a minute later, when another test runs: by default that ends
# pytest. Who waits for a dead actor gets a SupervisionError all the same.
monarch.actor.unhandled_fault_hook = lambda failure: None

multiprocessing.set_forkserver_preload(["imported_once"])
forkserver.set_forkserver_preload = lambda modules: None  # a dry run and goaly.parity ask for fewer
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
"""That server does not get `sys.path`."""
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
LAST_WORDS = "GOALY_TESTS_LAST_WORDS"
"""The file in which a worker says why it ends itself: what it prints is captured, and lost with it."""
FIRST = (
    "test_parity",
    "test_bitwise_run",
    "test_eval_agents",
    "test_experts",
    "test_traced_memory",
    "test_parallel",
    "test_chaos",
    "test_torn_reads",
    "test_stop",
    "test_resume",
    "test_four_ranks",
)
"""Files that take longest: at the end, one of them would keep one worker busy while the others have nothing to do."""


def pytest_configure(config: pytest.Config) -> None:
    """Let the workers, and the processes of all tests, be forks of one that imports each library once."""
    if not IS_WORKER:  # a worker uses that of the process that started it
        folder = tempfile.TemporaryDirectory(prefix="fork-server-")
        server = ForkServer(1, Path(folder.name) / "fork_server.log")
        config.add_cleanup(folder.cleanup)
        config.add_cleanup(server.close)
        # Ends what a Ctrl-C left, but for the trackers of semaphores, which remove these and end.
        config.add_cleanup(lambda: os.killpg(server.pid, signal.SIGTERM))
        os.environ[SHARED] = server.name
        os.environ[LAST_WORDS] = str(Path(folder.name) / "last_words")
        if set(getattr(config.option, "tx", None) or ()) == {"popen"}:
            launcher = [sys.executable, *LAUNCHER, server.name, str(os.getpid()), "1", "worker", "worker_imports"]
            command = shlex.join(["sh", "-c", f"exec {shlex.join(launcher)}"])  # execnet adds arguments for a Python
            config.option.tx = [f"popen//python={command}"] * len(config.option.tx)


if IS_WORKER:
    atexit.register(os._exit, 0)  # the last to run; what would follow, the end of each module, takes seconds
gc.disable()  # while all test files and their libraries are imported: it takes a quarter less time


class LastWords(logging.FileHandler):
    """Writes the reason, and the test during which the worker ended."""

    def format(self, record: logging.LogRecord) -> str:
        """The test, and the record."""
        return f"{os.environ.get('PYTEST_CURRENT_TEST')}: {super().format(record)}"


if IS_WORKER:
    last_words = LastWords(os.environ[LAST_WORDS], delay=True)
    last_words.setLevel(logging.CRITICAL)
    logging.getLogger("goaly.base.process").addHandler(last_words)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show why workers ended themselves. Where all tests passed, a test has only asked what would be said."""
    if not IS_WORKER and terminalreporter.stats.get("failed") and (file := Path(os.environ[LAST_WORDS])).exists():
        terminalreporter.section("why workers ended")
        terminalreporter.write(file.read_text())


def pytest_collection_finish() -> None:
    """Let the collector look at what tests make, and never again at a million imported objects."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Free them all at the end: triton reports what it finds left as leaked."""
    if not IS_WORKER:
        gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest."""
    items.sort(key=lambda item: item.path.stem not in FIRST)


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a tiny random Qwen3 and its character tokenizer. Read only."""
    return write_random_model(tmp_path_factory.mktemp("tiny_model"))
