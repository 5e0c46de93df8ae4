"""The path of a training step, from the script's call to `backward()`, is one that a reader can follow."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

import goaly
from goaly.backlog.batch import BatchHandle
from goaly.losses.settings import LossSettings
from goaly.models.settings import ModelSettings
from goaly.run.replaceable_actors import ReplaceableActors
from goaly.run.trainer_stage import TrainerStage
from goaly.train.settings import TrainerSettings
from goaly.train.trainer import PolicyTrainer
from goaly.weights.settings import WeightSettings
from tests.unit.run.keeping import keep
from tests.unit.train.batches import documents, pack
from tests.virtual_time import turns

FRAMES, FILES = 10, 5
HOUSE = Path(goaly.__file__).parent

Call = tuple[str, str]
"""A file of goaly's and a function in it."""


def own(frames: Iterator[FrameType]) -> list[Call]:
    """The frames of goaly's own code."""
    code = [frame.f_code for frame in frames]
    house = str(Path(goaly.__file__).parent)
    return [
        (each.co_filename.removeprefix(house), each.co_qualname) for each in code if each.co_filename.startswith(house)
    ]


def up_from(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def waiting_in(task: asyncio.Task[Any]) -> Iterator[FrameType]:
    """The frames of the coroutines that wait for each other in this task."""
    coroutine: Any = task.get_coro()
    while coroutine is not None and getattr(coroutine, "cr_frame", None) is not None:
        yield coroutine.cr_frame
        coroutine = coroutine.cr_await


async def test_backward_is_at_most_ten_frames_in_five_files_below_the_scripts_step(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the ranks watched and replaceable as in a run. Monarch's frames between the processes are left out: the
    call of an endpoint is awaited directly."""
    packed = pack(documents(2), rows=2, row_length=128)
    queue: Any = SimpleNamespace(rows=SimpleNamespace(call_one=lambda batch, rank: answer(packed)))
    actor = PolicyTrainer(
        TrainerSettings(), ModelSettings(path=str(tiny_model_folder)), LossSettings(), WeightSettings(), None, queue
    )
    from goaly.losses.objective import PolicyObjective

    actor._objective = PolicyObjective(LossSettings())
    await actor._thread.build(actor._settings, actor._make_engine)
    endpoint = vars(PolicyTrainer)["step"]._method.__wrapped__
    ranks = ReplaceableActors[Any](
        "trainer", SimpleNamespace(step=SimpleNamespace(stream=lambda batch: [endpoint(actor, batch)]))
    )
    keeping = keep(ranks, never)
    await turns()
    others = asyncio.all_tasks()
    stage = TrainerStage(ranks, steps=9, folder=tmp_path)
    loop = asyncio.get_running_loop()
    found: list[list[Call]] = []
    backward = torch.Tensor.backward

    def watched(loss: torch.Tensor, *arguments: Any) -> None:
        frames = own(up_from(sys._getframe(1)))
        if not found:
            asyncio.run_coroutine_threadsafe(waiting(frames), loop).result()
        backward(loss, *arguments)

    async def waiting(frames: list[Call]) -> None:
        beside = {asyncio.current_task(), *(task for task in asyncio.all_tasks() if task.get_name() == "report a wait")}
        tasks = asyncio.all_tasks() - others - beside
        found.append([*(call for task in tasks for call in own(waiting_in(task))), *reversed(frames)])

    monkeypatch.setattr(torch.Tensor, "backward", watched)
    batch = BatchHandle(id=0, sequences=2, trained_tokens=9, tokens=9, metrics={})
    assert "loss" in await asyncio.create_task(stage.step(batch))
    (path,) = found
    print(*path, sep="\n")
    assert len(path) <= FRAMES
    assert len({file for file, _ in path}) <= FILES
    keeping.cancel()
    actor._thread.close()


async def answer(value: Any) -> Any:
    return value


async def never(*_: Any) -> Any:
    await asyncio.Future()
