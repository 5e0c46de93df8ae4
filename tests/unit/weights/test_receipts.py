"""Receipts: what arrives wrong is named, however the tensors are divided, and nothing else is."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from local_store import LocalStore, meshes, sharded

from goaly.errors import WeightsError
from goaly.weights import receipts
from goaly.weights.buckets import cut
from goaly.weights.layout import view
from goaly.weights.placement import layout_of
from goaly.weights.publisher import Publisher
from goaly.weights.receipts import combined, receipt
from goaly.weights.settings import WeightSettings
from goaly.weights.subscriber import Subscriber

SETTINGS = WeightSettings()


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embedding": (12, 6), "norm": (7,), "experts": (4, 6, 4), "scale": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def like(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in given.items()}


async def published(store: LocalStore, given: dict[str, torch.Tensor], version: int = 1) -> Publisher:
    publisher = Publisher(store, given, SETTINGS, rank=0, world=1)
    await publisher.publish(version)
    return publisher


def flip(publisher: Publisher, name: str, byte: int) -> None:
    """Flip a bit of a staged tensor, as a broken link or memory would."""
    slots = publisher._slots
    assert slots is not None
    for slot in range(SETTINGS.slots):
        for shard, elements in zip(slots.layout, slots.views(slot), strict=True):
            if shard.name == name:
                elements.view(-1).view(torch.uint8)[byte] ^= 16


@given(seed=st.integers(0, 99), limit=st.integers(1, 200), spread=st.integers(1, 3))
def test_the_parts_of_a_tensor_add_up_to_its_sum_however_it_is_cut(seed: int, limit: int, spread: int) -> None:  # VS-2
    given = tensors(seed)
    layout = layout_of(given)
    pieces, _ = cut(layout, limit)
    for version in range(spread):
        whole = receipt(layout, [view(given, shard) for shard in layout], version, spread)
        halves = [
            receipt(part, [view(given, piece) for piece in part], version, spread)
            for part in (pieces[::2], pieces[1::2])
        ]
        assert combined(*halves) == whole


@pytest.mark.parametrize("spread", [1, 2, 5])
def test_every_tensor_has_its_turn_once_in_so_many_versions(spread: int) -> None:  # VS-3
    given = tensors()
    layout = layout_of(given)
    elements = [view(given, shard) for shard in layout]
    for first in (0, 7):
        turns = [
            name for version in range(first, first + spread) for name in receipt(layout, elements, version, spread)
        ]
        assert sorted(turns) == sorted(given)


@pytest.mark.parametrize(("name", "byte"), [("embedding", 0), ("experts", 200), ("norm", 27), ("scale", 3)])
async def test_one_flipped_byte_is_named_and_not_applied(name: str, byte: int) -> None:  # VS-1, WU-6
    store, given = LocalStore(SETTINGS), tensors()
    live = like(given)
    publisher, subscriber = await published(store, given), Subscriber(store, live, "generator-0", SETTINGS)
    version = await subscriber.newest()
    flip(publisher, name, byte)
    with pytest.raises(WeightsError, match=f"version 1 at reader generator-0: `{name}` has the sum .* published with"):
        await subscriber.prefetch(version)
    assert all(not tensor.any() for tensor in live.values())
    with pytest.raises(WeightsError, match="nothing to apply"):
        subscriber.apply()
    flip(publisher, name, byte)
    assert await subscriber.prefetch(version)
    subscriber.apply()
    assert all(torch.equal(tensor, given[key]) for key, tensor in live.items())
    assert subscriber.verified_bytes == sum(tensor.nbytes for tensor in given.values())


async def test_large_models_are_verified_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors()
    monkeypatch.setattr(receipts, "VERIFIED_BYTES", 200)
    store, size = LocalStore(SETTINGS), sum(tensor.nbytes for tensor in given.values())
    versions = -(-size // 200)
    publisher, subscriber = await published(store, given, 0), Subscriber(store, like(given), "reader", SETTINGS)
    verified = []
    for version in range(versions):
        if version:
            await publisher.publish(version)
        assert await subscriber.prefetch(await subscriber.newest(version - 1))
        subscriber.apply()
        verified.append(subscriber.verified_bytes)
    assert verified[-1] == size
    assert 0 < verified[0] < size


def together(readers: list[Subscriber]) -> list[Callable[[], None]]:
    """The verification on each rank of a replica, with the total of all."""
    parts = [reader._parts for reader in readers]
    total: Any = sum(part.tensor() for part in parts if part is not None)
    return [lambda reader=reader: reader.verify_together(lambda _: total) for reader in readers]


@pytest.mark.parametrize("dim", [0, 1])
async def test_a_tensor_that_ranks_have_together_is_verified_by_all_of_them(dim: int) -> None:  # WU-6
    store, given = LocalStore(SETTINGS), tensors()
    publisher = await published(store, given)
    with meshes(2) as (first, second):
        readers = []
        for number, mesh in enumerate((first, second)):
            live: dict[str, torch.Tensor] = like(given)
            for name in ("embedding", "experts"):
                live[name] = sharded(mesh, dim, torch.zeros_like(given[name].chunk(2, dim)[number]))
            readers.append(Subscriber(store, live, f"rank {number}", SETTINGS))

    async def prefetched() -> None:
        lease = None
        for reader in readers:
            version = await reader.newest() if lease is None else lease.version
            assert await reader.prefetch(version, lease)
            lease = lease or reader.held

    await prefetched()
    for verify in together(readers):
        verify()
    flip(publisher, "experts", 380)  # of the last expert's last row: the second rank's in either case
    await prefetched()
    for verify in together(readers):
        with pytest.raises(WeightsError, match="`experts` has the sum"):
            verify()
    flip(publisher, "norm", 0)  # which each has wholly
    with pytest.raises(WeightsError, match="rank 0: `norm`"):
        await prefetched()
    await asyncio.gather(*(reader.close() for reader in readers))


async def test_what_a_reader_casts_is_not_verified() -> None:
    store, given = LocalStore(SETTINGS), tensors()
    publisher = await published(store, given)
    live = {name: torch.zeros_like(tensor, dtype=torch.bfloat16) for name, tensor in given.items()}
    subscriber = Subscriber(store, live, "reader", SETTINGS)
    flip(publisher, "norm", 0)
    assert await subscriber.prefetch(await subscriber.newest())
    assert subscriber.verified_bytes == 0
