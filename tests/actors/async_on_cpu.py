"""vLLM's asynchronous scheduling without a GPU.

vLLM's scheduler, its queue of launched steps and its model runner are the ones that run on GPUs. Only streams and
events do nothing here: a step is computed when it is launched, and still read after the next one is launched.
"""

import contextlib
from pathlib import Path
from typing import Any

import torch

from tests.actors import engines_in_child


class NoStream:
    """A stream and an event, of work that is done at once."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def record(self, *_: Any) -> None:
        """Nothing to note."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait_stream(self, _: Any) -> None:
        """Nothing to wait for."""


def allow_async_scheduling() -> None:
    """Let engines of this process schedule asynchronously that are asked to, which vLLM's CPU platform forbids."""
    from vllm.platforms.cpu import CpuPlatform

    check: Any = CpuPlatform.check_and_update_config

    def check_and_keep(platform: Any, config: Any) -> None:
        asked = config.scheduler_config.async_scheduling
        check.__func__(platform, config)
        config.scheduler_config.async_scheduling = asked

    replaced: Any = torch.cuda
    CpuPlatform.check_and_update_config = classmethod(check_and_keep)  # ty: ignore
    replaced.Event = replaced.Stream = replaced.current_stream = NoStream
    replaced.stream = lambda _: contextlib.nullcontext()


def start_async_engines(folders: list[Path]) -> None:
    """Start the engines of `engines_in_child`, of which the one with torchtitan's definition schedules so."""
    allow_async_scheduling()
    engines_in_child.start_engines(folders, async_scheduling=True)
    assert engines_in_child.engines.torchtitan._core.engine_core.batch_queue_size == 2
