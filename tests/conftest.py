"""Fixtures that more than one stage's tests use."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "500ms")  # where no run watches processes

import multiprocessing
from pathlib import Path

import monarch.actor
import pytest
from monarch._src.actor import config as monarch_config
from random_model import write_random_model

monarch_config.prefix_python_logs_with_actor = False  # once Monarch is up, it would prefix this process's records

# A death that a test causes may be told once more half a minute later, when another test runs: by default that ends
# pytest. Who waits for a dead actor gets a SupervisionError all the same.
monarch.actor.unhandled_fault_hook = lambda failure: None

# vLLM and torchtitan are imported once, for all tests that need a process of their own and fork it there.
multiprocessing.set_forkserver_preload(["goaly.generate.engine", "goaly.train.parallel"])


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a tiny random Qwen3 and its character tokenizer. Read only."""
    return write_random_model(tmp_path_factory.mktemp("tiny_model"))
