"""Which GPU a process uses, pretended: CUDA's current device is each thread's own."""

import asyncio
import threading

import pytest
import torch

from goaly.base.errors import ConfigError
from goaly.models.device import keep_pinned_sizes, local_device, use_local_device
from goaly.train.rank_thread import RankThread
from goaly.train.settings import TrainerSettings


class Gpus:
    """Takes note of the thread and the device of each `set_device`."""

    def __init__(self) -> None:
        self.count = 0
        self.chosen: list[tuple[str, int]] = []

    def choose(self, device: torch.device) -> None:
        self.chosen.append((threading.current_thread().name, device.index))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    found = Gpus()
    monkeypatch.setattr("torch.cuda.device_count", lambda: found.count)
    monkeypatch.setattr("torch.cuda.set_device", found.choose)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return found


@pytest.mark.parametrize(
    ("count", "local_rank", "device"),
    [
        (0, "3", "cpu"),
        (1, None, "cuda:0"),
        (1, "3", "cuda:0"),  # a launcher that shows each process its own GPU alone
        (4, "3", "cuda:3"),  # one that shows all of them
        (4, None, "cuda:0"),
    ],
)
def test_a_process_uses_the_gpu_of_its_local_rank_or_the_only_one_that_it_sees(
    gpus: Gpus, count: int, local_rank: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.count = count
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert use_local_device() == local_device() == torch.device(device)
    assert [index for _, index in gpus.chosen] == ([] if device == "cpu" else [torch.device(device).index])


def test_a_local_rank_without_a_gpu_is_refused(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.count = 2
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="LOCAL_RANK=2: must be below 2, the number of GPUs that this process sees"):
        local_device()


@pytest.mark.timeout(20)
def test_a_rank_builds_and_runs_its_engine_in_the_thread_whose_device_was_chosen(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.count = 2
    monkeypatch.setenv("LOCAL_RANK", "1")
    worked: list[str] = []

    def work() -> None:
        worked.append(threading.current_thread().name)

    async def use() -> None:
        rank: RankThread = RankThread("train")
        await rank.build(TrainerSettings(threads=1), work)
        await rank.run(work, "work")
        rank.close()

    asyncio.run(use())
    assert [(name, 1) for name in worked] == gpus.chosen * 2


@pytest.mark.parametrize("chosen", ["", "expandable_segments:True,pinned_max_round_threshold_mb:64"])
def test_pinned_memory_is_as_large_as_its_tensor_unless_the_user_chose_otherwise(chosen: str) -> None:
    before = torch._C._accelerator_getAllocatorSettings()
    try:
        torch._C._accelerator_setAllocatorSettings(chosen)
        keep_pinned_sizes()
        settings = torch._C._accelerator_getAllocatorSettings()
        assert settings.split(",") == ["pinned_max_round_threshold_mb:1", *filter(None, chosen.split(","))]
    finally:
        torch._C._accelerator_setAllocatorSettings(before)
