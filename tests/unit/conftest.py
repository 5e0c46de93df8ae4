"""A tiny tokenizer, for the tests of every stage."""

from pathlib import Path

import pytest
from hypothesis import settings

from goaly.models.tiny import TinyModel, write_tiny_model
from goaly.prompts.tokenizer import ChatTokenizer

settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a very small tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), TinyModel(dim=16, layers=1, head_dim=8, hidden_dim=16))


@pytest.fixture(scope="session")
def tokenizer(tiny_folder: Path) -> ChatTokenizer:
    """Its tokenizer."""
    return ChatTokenizer(tiny_folder)
