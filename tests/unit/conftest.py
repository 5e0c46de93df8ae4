"""A tiny tokenizer, for the tests of every stage."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist
from hypothesis import settings

from goaly.models.tiny_model import TinyModel, write_tiny_model
from goaly.prompts.tokenizer import ChatTokenizer

settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")

if find_spec("pycosat") is None:  # reasoning-gym imports it for one data set, and a C compiler has to build it
    sys.modules["pycosat"] = ModuleType("pycosat")


@pytest.fixture(scope="module", autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """An engine in bfloat16 makes one for itself."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a very small tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), TinyModel(dim=16, layers=1, head_dim=8, hidden_dim=16))


@pytest.fixture(scope="session")
def tokenizer(tiny_folder: Path) -> ChatTokenizer:
    """Its tokenizer."""
    return ChatTokenizer(tiny_folder)
