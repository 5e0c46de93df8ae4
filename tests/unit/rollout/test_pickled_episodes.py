"""Episodes of scripts, as their workers get them."""

import pickle
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

import pytest

from goaly.base import registry as dotted_path
from goaly.rollout.rollout_worker import pickled


def in_main(name: str, like: Any = None) -> FunctionType:
    """A function of `__main__`, with the code of another one."""
    function = FunctionType((like or dotted_path.function_at).__code__, {"__name__": "__main__"}, name)
    function.__module__, function.__qualname__ = "__main__", name
    return function


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script that was started as `python -m goaly.base.registry`."""
    module = ModuleType("__main__")
    module.__spec__ = ModuleSpec("goaly.base.registry", None)
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def test_a_worker_imports_the_script_that_was_started_as_a_module(main: ModuleType):
    main.function_at = episode = in_main("function_at")
    assert pickle.loads(pickled(episode)) is dotted_path.function_at
    assert pickle.loads(pickled(partial(episode, "a"))).func is dotted_path.function_at


def test_an_episode_that_the_script_does_not_name_is_pickled_by_value(main: ModuleType):
    episode = in_main("other")
    found = pickle.loads(pickled(episode))
    assert found is not episode
    assert found.__code__ == episode.__code__


def test_an_episode_of_a_script_file_is_pickled_by_value(main: ModuleType):
    main.__spec__ = None
    main.function_at = episode = in_main("function_at")
    found = pickle.loads(pickled(episode))
    assert found is not dotted_path.function_at
    assert found.__code__ == episode.__code__
