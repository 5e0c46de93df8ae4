"""Copies in threads: they are complete and cast, and have ended when `run` returns (weights-10)."""

import asyncio
import threading

import pytest
import torch

from goaly.base.config.check import check
from goaly.weights.copier import Copier
from goaly.weights.dtensor_layout import layout_of
from goaly.weights.layout import in_dtype, region
from goaly.weights.settings import WeightSettings
from goaly.weights.shared_memory import Segment


def test_every_pair_is_copied_and_cast() -> None:
    sources = [torch.randn(size, 3) for size in (5, 1, 40, 7, 2)]
    targets = [torch.zeros(source.shape, dtype=torch.bfloat16) for source in sources]
    copier = Copier()
    copier.copy(list(zip(targets, sources, strict=True)))
    copier.close()
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.bfloat16())


def test_a_strided_source_arrives_in_order() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    target = torch.zeros(4, 2)
    copier = Copier()
    copier.copy([(target, region(whole, (0, 3), (4, 2)))])
    copier.close()
    assert torch.equal(target, whole[:, 3:5])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies from and to a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_a_gpu_copies_to_a_segment_and_from_it_after_its_own_work(dtype: torch.dtype) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    source, target = torch.zeros(1 << 20, device=device), torch.zeros(1 << 20, device=device)
    segment = Segment.create(source.nbytes)
    written = segment.tensor(dtype, (1 << 20,), 0)
    assert written.is_pinned()
    read = Segment.open(segment.handle).tensor(dtype, (1 << 20,), 0)
    copier = Copier(device)
    for version in (1.0, 2.0):
        torch.cuda._sleep(10**8)
        source.fill_(version)
        await copier.run(lambda: copier.copy([(written, source)]))
        assert bool((written == version).all())
        await copier.run(lambda: copier.copy([(target, read)]))
        assert bool((target == version).all())
    copier.close()
    segment.close()


async def test_a_cancelled_copy_is_over_before_its_caller_goes_on() -> None:
    started, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        may_end.wait(10)
        ended.set()

    copier = Copier()
    running = asyncio.create_task(copier.run(work))
    await asyncio.to_thread(started.wait, 10)
    for _ in range(2):
        running.cancel()
        await asyncio.sleep(0)
        assert not running.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()
    copier.close()


async def test_what_failed_in_the_thread_is_raised() -> None:
    def work() -> None:
        raise RuntimeError("no memory")

    copier = Copier()
    with pytest.raises(RuntimeError, match="no memory"):
        await copier.run(work)
    copier.close()


def test_only_floating_point_matrices_change_type() -> None:
    layout = layout_of({"w": torch.zeros(2, 2), "bias": torch.zeros(2), "steps": torch.zeros(2, 2, dtype=torch.int64)})
    changed = {shard.name: shard.dtype for shard in in_dtype(layout, torch.bfloat16)}
    assert changed == {"w": torch.bfloat16, "bias": torch.float32, "steps": torch.int64}
    assert in_dtype(layout, None) == layout


def test_torchstore_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = WeightSettings(transport="torchstore")
    monkeypatch.setattr("goaly.weights.settings.find_spec", lambda package: None)
    (problem,) = chosen.problems("weights.")
    assert problem.startswith("weights.transport=torchstore: the package torchstore is not installed; install it")
    monkeypatch.setattr("goaly.weights.settings.find_spec", lambda package: package)
    assert chosen.problems("weights.") == []


def test_settings_that_cannot_work_are_named() -> None:
    assert WeightSettings().problems("weights.") == []
    assert check(WeightSettings, {"slots": 1, "bucket_mib": 0}, "weights")[1] == [
        "weights.slots=1: must be at least 2",
        "weights.bucket_mib=0: must be above 0",
    ]
