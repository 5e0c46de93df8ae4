"""Receipts: what arrives wrong is named, however the tensors are divided, and nothing else is."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
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
from goaly.weights.member import Copier
from goaly.weights.placement import layout_of, one_of
from goaly.weights.placement import same as same_name
from goaly.weights.publisher import Publisher
from goaly.weights.receipts import Verified, combined, receipt, same
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
    for first in (0, 2 * spread):
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
    size = sum(tensor.nbytes for tensor in given.values())
    assert subscriber.verified == Verified(tensors=len(given), bytes=size)
    await subscriber.verify_applied()


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
        verified.append(subscriber.verified)
        assert verified[-1].bytes + verified[-1].unverified_bytes == len(verified) * size
        assert (subscriber.never_verified_tensors == 0) == (version == versions - 1)
    assert (verified[-1].tensors, verified[-1].bytes) == (len(given), size)
    assert 0 < verified[0].bytes < size


@pytest.mark.parametrize("stride", [2, 3, 6])
def test_a_reader_that_applies_every_nth_version_verifies_all_tensors_in_time(stride: int) -> None:  # VS-3
    layout = layout_of({f"layers.{number}": torch.zeros(1) for number in range(30)})
    elements = [torch.zeros(1)] * len(layout)
    read = range(0, stride * 60, stride)
    assert len({name for version in read for name in receipt(layout, elements, version, 6)}) == len(layout)


def together(readers: list[Subscriber]) -> list[Callable[[], None]]:
    """The verification on each rank of a replica, with the parts of all."""
    parts = [reader._parts.open() for reader in readers if reader._parts is not None]
    return [lambda reader=reader: reader.verify_together(lambda _: parts) for reader in readers]


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


async def test_parts_that_several_ranks_hold_are_verified_on_each_and_those_that_overlap_count_as_unverified() -> None:
    """VS-4: each of four ranks has a head, and two of them each key head, as with more ranks than key heads."""
    given = {"heads": torch.randn(6, 3), "odd": torch.randn(3, 4)}
    store = LocalStore(SETTINGS)
    publisher = await published(store, given)
    readers, whole = [], {name: same_name(name, tuple(tensor.shape))[0] for name, tensor in given.items()}
    for rank in range(4):
        head, key = (replace(whole["heads"], offset=(row, 0), shape=(1, 3)) for row in (rank, 4 + rank // 2))
        odd = replace(whole["odd"], offset=(rank // 2, 0), shape=(2, 4))
        naming = {"heads": (head, replace(key, start=(1, 0))), "odd": (odd,)}
        live = {"heads": torch.zeros(2, 3), "odd": torch.zeros(2, 4)}
        readers.append(Subscriber(store, live, f"rank {rank}", SETTINGS, naming=naming))
    for reader in readers:
        assert await reader.prefetch(1)
    for verify in together(readers):
        verify()
    for reader in readers:
        reader.apply()
        assert reader.verified == Verified(tensors=1, bytes=24, unverified_tensors=1, unverified_bytes=32)
        assert reader.never_verified_tensors == 1
    for reader in readers[:3]:
        assert await reader.prefetch(1)
    flip(publisher, "heads", 71)  # of the key head of the last two, after one of them has read it
    assert await readers[3].prefetch(1)
    for verify in together(readers):
        with pytest.raises(WeightsError, match="`heads` differs in two places that have the same part of it"):
            verify()


async def test_without_the_other_ranks_a_part_of_a_tensor_counts_as_unverified() -> None:  # VS-4
    store, given = LocalStore(SETTINGS), tensors()
    await published(store, given)
    naming = {"expert": one_of("experts", index=2, count=4, shape=(6, 4))}
    subscriber = Subscriber(
        store, {"expert": torch.zeros(6, 4), "norm": torch.zeros(7)}, "reader", SETTINGS, naming=naming
    )
    assert await subscriber.prefetch(1)
    subscriber.apply()
    assert subscriber.verified == Verified(tensors=1, bytes=28, unverified_tensors=1, unverified_bytes=96)


def casting(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Zeros in other types than the published, one of a part of a stack, and one that is made of columns."""
    live = {name: torch.zeros(tensor.shape, dtype=torch.bfloat16) for name, tensor in given.items()}
    return live | {"embedding": torch.zeros(6, 12, dtype=torch.float64).T}


@pytest.mark.parametrize(("name", "byte"), [("embedding", 0), ("experts", 200), ("norm", 24), ("scale", 0)])
async def test_a_flipped_byte_that_a_cast_would_hide_is_named(name: str, byte: int) -> None:  # WU-6
    store, given = LocalStore(SETTINGS), tensors()
    live = casting(given)
    publisher, subscriber = await published(store, given), Subscriber(store, live, "reader", SETTINGS)
    flip(publisher, name, byte)
    with pytest.raises(WeightsError, match=f"version 1 at reader reader: `{name}` has the sum .* published with"):
        await subscriber.prefetch(1)
    flip(publisher, name, byte)
    assert await subscriber.prefetch(1)
    subscriber.apply()
    await subscriber.verify_applied()
    assert all(torch.equal(tensor, given[key].to(tensor.dtype)) for key, tensor in live.items())
    assert subscriber.verified == Verified(tensors=len(given), bytes=sum(tensor.nbytes for tensor in live.values()))


@pytest.mark.parametrize("name", ["embedding", "experts", "norm", "scale"])
async def test_a_wrong_cast_is_named_and_not_applied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:  # WU-6
    store, given = LocalStore(SETTINGS), tensors()
    live, copy = casting(given), Copier.copy
    await published(store, given)
    subscriber = Subscriber(store, live, "reader", SETTINGS)

    def damaged(self: Copier, pairs: list[Any]) -> None:
        copy(self, pairs)
        target = next(target for target, _ in pairs if target.shape == given[name].shape)
        target.view(receipts.INTEGERS[target.itemsize])[(-1,) * target.dim()] ^= 1

    monkeypatch.setattr(Copier, "copy", damaged)
    with pytest.raises(WeightsError, match=f"`{name}` is not what was fetched, cast to this reader's type"):
        await subscriber.prefetch(1)
    assert all(not tensor.any() for tensor in live.values())
    with pytest.raises(WeightsError, match="nothing to apply"):
        subscriber.apply()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_an_applied_parameter_that_differs_is_named(dtype: torch.dtype) -> None:  # WU-6
    store, given = LocalStore(SETTINGS), tensors()
    live = {name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in given.items()}
    await published(store, given)
    subscriber = Subscriber(store, live, "reader", SETTINGS)
    await subscriber.verify_applied()  # of nothing
    assert await subscriber.prefetch(1)
    subscriber.apply()
    await subscriber.verify_applied()
    live["experts"].view(-1).view(torch.uint8)[100] ^= 1
    with pytest.raises(WeightsError, match="version 1 at reader reader: parameter `experts` differs from what was"):
        await subscriber.verify_applied()


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_bits_are_compared_and_any_nan_is_one(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts, "CHUNK", 5 * rows)
    one = torch.randn(9, 5)
    one[4, 2], one[0, 0] = float("nan"), 0.0
    for other in (one.clone(), one.T.contiguous().T):
        assert same(one, other)
        other[4, 2] = -other[4, 2]
        assert same(one, other)
        other[0, 0] = -0.0
        assert not same(one, other)
