"""Fixtures of tests with vLLM's engines in a child process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from random_model import write_random_model

from tests.actors.engines_in_child import in_child, start_engines
from tests.actors.expected import Expected


@pytest.fixture(scope="module")
def folders(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape."""
    return [tiny_model_folder, write_random_model(tmp_path_factory.mktemp("other"), seed=1)]


@pytest.fixture(scope="module")
def there(folders: list[Path]) -> Iterator[Callable[..., Any]]:
    """Runs a function where the engines are."""
    with in_child(start_engines, folders) as run:
        yield run


@pytest.fixture(scope="module")
def expected(folders: list[Path]) -> Expected:
    """What transformers makes of the two models."""
    return Expected(folders)
