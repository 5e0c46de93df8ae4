"""Copies of versions that did not last: a slot that was written over meanwhile, a version that was given up."""

import asyncio
import threading
from typing import Any

import pytest
import torch
from local_store import LocalStore, within

from goaly.base.errors import WeightsError
from goaly.weights.publisher import Publisher
from goaly.weights.settings import WeightSettings
from goaly.weights.subscriber import Subscriber, pull_into

SETTINGS = WeightSettings(bucket_mib=1e-5)


class HeldUp:
    """A copier's `copy` that, once it has copied, waits for `go_on`, and then does what it is told."""

    def __init__(self, member: Any, *, failing: bool = False):
        self._copy = member._copier.copy
        member._copier.copy = self
        self._failing = failing
        self._copied, self._go_on = threading.Event(), threading.Event()

    def __call__(self, pairs: Any) -> None:
        self._copy(pairs)
        self._copied.set()
        assert self._go_on.wait(30)
        if self._failing:
            raise RuntimeError("the copy failed")

    async def has_copied(self) -> None:
        assert await asyncio.to_thread(self._copied.wait, 30)

    def go_on(self) -> None:
        self._go_on.set()

    def succeed(self) -> None:
        """Fail no more."""
        self._failing = False


def tensors(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(8) for name in names}


async def test_a_copy_whose_lease_was_revoked_meanwhile_is_discarded_and_a_newer_version_is_had() -> None:  # weights-1
    settings = WeightSettings(slots=2)
    store = LocalStore(settings)
    weights, slow_weights = tensors("a"), tensors("a")
    writer = Publisher(store, weights, settings, rank=0, world=1)
    slow, other = (Subscriber(store, held, "reader", settings) for held in (slow_weights, tensors("a")))

    async def publish(version: int) -> None:
        weights["a"].fill_(version)
        await within(writer.publish(version))

    await publish(1)
    assert await within(slow.newest()) == 1
    copy = HeldUp(slow)
    pulling = asyncio.ensure_future(slow.prefetch(1))
    await copy.has_copied()
    await publish(2)
    assert await within(other.newest()) == 2
    await publish(3)  # both slots were held: the slow reader loses its own
    copy.go_on()
    assert not await within(pulling)
    with pytest.raises(WeightsError, match="nothing to apply"):
        slow.apply()
    assert await within(slow.newest()) == 3
    assert await within(slow.prefetch(3))
    assert slow.apply() == 3
    assert slow_weights["a"].tolist() == [3.0] * 8
    with pytest.raises(WeightsError, match="nothing to apply"):
        slow.apply()
    for member in (slow, other, writer):
        await member.close()


async def test_a_reader_never_gets_a_version_that_one_rank_abandoned() -> None:  # weights-1, weights-3
    store = LocalStore(SETTINGS)
    writers = [Publisher(store, tensors(name), SETTINGS, rank=rank, world=2) for rank, name in enumerate("ab")]
    reader = Subscriber(store, tensors("a"), "reader", SETTINGS)
    await within(asyncio.gather(*(writer.publish(0) for writer in writers)))
    failing = HeldUp(writers[1], failing=True)
    late = asyncio.ensure_future(writers[1].publish(1))
    assert await within(writers[0].publish(1)) is False
    waiting = asyncio.ensure_future(reader.newest(0))
    await failing.has_copied()  # the version is in both ranks' memory
    failing.go_on()
    with pytest.raises(RuntimeError, match="the copy failed"):
        await within(late)
    with pytest.raises(WeightsError, match="version 1 is not committed"):
        await within(Subscriber(store, tensors("a"), "other", SETTINGS).prefetch(1))
    failing.succeed()
    await within(asyncio.gather(*(writer.publish(2) for writer in writers)))
    assert await within(waiting) == 2
    assert await within(reader.prefetch(2))
    assert reader.apply() == 2
    for member in (reader, *writers):
        await member.close()


async def test_pulling_once_goes_on_to_a_newer_version_where_the_first_was_revoked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = LocalStore(SETTINGS)
    writer = Publisher(store, tensors("a"), SETTINGS, rank=0, world=1)
    await within(writer.publish(0))
    prefetch, asked = Subscriber.prefetch, []

    async def revoked_at_first(self: Subscriber, version: int) -> bool:
        asked.append(version)
        if len(asked) == 1:
            await writer.publish(1)
            return False
        return await prefetch(self, version)

    monkeypatch.setattr(Subscriber, "prefetch", revoked_at_first)
    assert await within(pull_into(store, tensors("a"))) == 1
    assert asked == [0, 1]
    await writer.close()
