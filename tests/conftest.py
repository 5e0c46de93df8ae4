"""Fixtures that more than one stage's tests use."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "500ms")  # where no run watches processes

import gc
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import monarch.actor
import pytest
from monarch._src.actor import config as monarch_config
from random_model import write_random_model

from goaly.run.fork_server import SHARED, ForkServer

monarch_config.prefix_python_logs_with_actor = False  # once Monarch is up, it would prefix this process's records

# A death that a test causes may be told once more half a minute later, when another test runs: by default that ends
# pytest. Who waits for a dead actor gets a SupervisionError all the same.
monarch.actor.unhandled_fault_hook = lambda failure: None

multiprocessing.set_forkserver_preload(["imported_once"])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
"""That server does not get `sys.path`."""
FORKING = {
    "tests/actors/test_expert_choices.py",
    "tests/actors/test_generator_engine.py",
    "tests/actors/test_generator_experts.py",
    "tests/actors/test_generator_lora.py",
    "tests/actors/test_lagged.py",
    "tests/actors/test_parity.py",
    "tests/characterization/test_vllm_engine.py",
    "tests/characterization/test_vllm_loader.py",
    "tests/loop/test_sft.py",
    "tests/unit/plan/test_traced_memory.py",
    "tests/unit/test_large_recipes.py",
    "tests/unit/train/test_parallel.py",
    "tests/unit/train/test_saved_state.py",
}
"""Files with such tests."""


def pytest_configure(config: pytest.Config) -> None:
    """Let the processes of all tests be forks of one that imports each library once."""
    if not hasattr(config, "workerinput"):  # a worker uses that of the process that started it
        folder = tempfile.TemporaryDirectory(prefix="fork-server-")
        server = ForkServer(1, Path(folder.name) / "fork_server.log")
        config.add_cleanup(folder.cleanup)
        config.add_cleanup(server.close)
        os.environ[SHARED] = server.name


gc.disable()  # while all test files and their libraries are imported: it takes a quarter less time


def pytest_collection_finish() -> None:
    """Let the collector look at what tests make, and never again at a million imported objects."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Free them all at the end: triton reports what it finds left as leaked."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, give all files in `FORKING` to one worker: each worker would do these imports anew."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "forking" if file in FORKING else file

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a tiny random Qwen3 and its character tokenizer. Read only."""
    return write_random_model(tmp_path_factory.mktemp("tiny_model"))
