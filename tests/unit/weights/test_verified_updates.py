"""A version with a digest is applied only as it was published, however the tensors are divided."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from local_store import LocalStore, meshes, sharded

from goaly.base.errors import WeightsError
from goaly.weights import digest
from goaly.weights.copier import Copier
from goaly.weights.digest import same
from goaly.weights.naming import one_of
from goaly.weights.naming import same as same_name
from goaly.weights.publisher import Publisher
from goaly.weights.settings import WeightSettings
from goaly.weights.subscriber import Subscriber

SETTINGS = WeightSettings(verify_every=1)
DIFFERS = "the weights have the digest .* published with"


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


@pytest.mark.parametrize(("name", "byte"), [("embedding", 0), ("experts", 200), ("norm", 27), ("scale", 3)])
async def test_a_version_with_a_flipped_byte_is_not_applied(name: str, byte: int) -> None:  # weights-8
    store, given = LocalStore(SETTINGS), tensors()
    live = like(given)
    publisher, subscriber = await published(store, given), Subscriber(store, live, "generator-0", SETTINGS)
    version = await subscriber.newest()
    flip(publisher, name, byte)
    with pytest.raises(WeightsError, match=f"version 1 at reader generator-0: {DIFFERS}"):
        await subscriber.prefetch(version)
    assert all(not tensor.any() for tensor in live.values())
    with pytest.raises(WeightsError, match="nothing to apply"):
        subscriber.apply()
    flip(publisher, name, byte)
    assert await subscriber.prefetch(version)
    subscriber.apply()
    assert all(torch.equal(tensor, given[key]) for key, tensor in live.items())
    assert subscriber.verified_updates == 1
    await subscriber.verify_applied()


async def followed(store: LocalStore, publisher: Publisher, versions: range, *, every: int) -> list[int]:
    """The versions that a new reader verifies, which applies each `every`-th of these as it is published."""
    subscriber, verified = Subscriber(store, like(tensors()), "reader", SETTINGS), []
    for version in versions:
        await publisher.publish(version)
        if version % every == 0:
            before = subscriber.verified_updates
            assert await subscriber.prefetch(await subscriber.newest(version - 1))
            assert subscriber.apply() == version
            verified += [version] * (subscriber.verified_updates - before)
    await subscriber.close()
    return verified


async def test_a_reader_verifies_its_first_version_and_every_nth_and_one_that_joins_later_the_next() -> None:
    store = LocalStore(WeightSettings(verify_every=4))
    publisher = Publisher(store, tensors(), SETTINGS, rank=0, world=1)
    assert await followed(store, publisher, range(10), every=1) == [0, 4, 8]
    assert await followed(store, publisher, range(10, 20), every=1) == [12, 16]  # asked for at 10, known with 11


@pytest.mark.parametrize("every", [2, 3, 5])
async def test_a_reader_that_passes_over_the_versions_with_a_digest_gets_another(every: int) -> None:
    store = LocalStore(WeightSettings(verify_every=2))
    publisher = Publisher(store, tensors(), SETTINGS, rank=0, world=1)
    assert len(await followed(store, publisher, range(1, 60), every=every)) >= 3


async def test_all_ranks_of_a_trainer_add_to_the_digest_of_the_same_versions() -> None:
    store = LocalStore(WeightSettings(verify_every=3))
    with meshes(2) as ranks:
        held = [{"w": sharded(mesh, 0, torch.randn(3, 4))} for mesh in ranks]
    publishers = [Publisher(store, part, SETTINGS, rank=rank, world=2) for rank, part in enumerate(held)]
    subscriber = Subscriber(store, {"w": torch.zeros(6, 4)}, "reader", SETTINGS)
    for version in range(7):
        await asyncio.gather(*(one.publish(version) for one in publishers))
        assert await subscriber.prefetch(await subscriber.newest(version - 1))
        subscriber.apply()
        assert subscriber.verified_updates == version // 3 + 1


def together(readers: list[Subscriber]) -> list[Callable[[], None]]:
    """The verification on each rank of a replica, with the parts of all."""
    parts = [reader._parts for reader in readers]
    return [lambda reader=reader: reader.verify_together(lambda _: parts) for reader in readers]


async def test_a_rank_gathers_also_what_has_no_digest_for_another_rank_may_wait_for_it() -> None:
    store, asked = LocalStore(WeightSettings()), []
    publisher, subscriber = await published(store, tensors(), 0), Subscriber(store, like(tensors()), "reader", SETTINGS)
    await publisher.publish(1)
    assert await subscriber.prefetch(1)
    subscriber.verify_together(lambda parts: asked.append(parts) or [parts])
    assert asked == [[]]
    subscriber.apply()
    assert subscriber.verified_updates == 0


@pytest.mark.parametrize("dim", [0, 1])
async def test_a_version_that_ranks_have_together_is_verified_by_all_of_them(dim: int) -> None:  # weights-8
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
        with pytest.raises(WeightsError, match=DIFFERS):
            verify()
    await asyncio.gather(*(reader.close() for reader in readers))


async def test_parts_that_several_ranks_hold_are_verified_on_each() -> None:  # weights-8
    """Each of four ranks has a head, and two of them each key head, as with more ranks than key heads."""
    given = {"heads": torch.randn(6, 3)}
    store = LocalStore(SETTINGS)
    publisher = await published(store, given)
    readers, whole = [], {name: same_name(name, tuple(tensor.shape))[0] for name, tensor in given.items()}
    for rank in range(4):
        head, key = (replace(whole["heads"], offset=(row, 0), shape=(1, 3)) for row in (rank, 4 + rank // 2))
        naming = {"heads": (head, replace(key, start=(1, 0)))}
        readers.append(Subscriber(store, {"heads": torch.zeros(2, 3)}, f"rank {rank}", SETTINGS, naming=naming))
    for reader in readers:
        assert await reader.prefetch(1)
    for verify in together(readers):
        verify()
    for reader in readers:
        reader.apply()
        assert reader.verified_updates == 1
    for reader in readers[:3]:
        assert await reader.prefetch(1)
    flip(publisher, "heads", 71)  # of the key head of the last two, after one of them has read it
    assert await readers[3].prefetch(1)
    for verify in together(readers):
        with pytest.raises(WeightsError, match="`heads` differs in two places that have the same part of it"):
            verify()


@pytest.mark.parametrize("overlap", [False, True])
async def test_ranks_that_do_not_have_all_weights_once_do_not_count_as_verified_and_say_so(
    overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:  # weights-8
    store, given = LocalStore(SETTINGS), tensors()
    await published(store, given)
    part = one_of("experts", index=2, count=4, shape=(6, 4))
    live, naming = {"expert": torch.zeros(6, 4), "norm": torch.zeros(7)}, {"expert": part}
    if overlap:
        live |= like(given)
    subscriber = Subscriber(store, live, "reader", SETTINGS, naming=naming)
    assert await subscriber.prefetch(1)
    subscriber.verify_together(lambda parts: [parts])
    subscriber.apply()
    assert subscriber.verified_updates == 0
    assert "version 1 at reader reader could not be verified" in caplog.text
    await subscriber.verify_applied()


def casting(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Zeros in other types than the published, one of a part of a stack, and one that is made of columns."""
    live = {name: torch.zeros(tensor.shape, dtype=torch.bfloat16) for name, tensor in given.items()}
    return live | {"embedding": torch.zeros(6, 12, dtype=torch.float64).T}


@pytest.mark.parametrize(("name", "byte"), [("embedding", 0), ("experts", 200), ("norm", 24), ("scale", 0)])
async def test_a_flipped_byte_that_a_cast_would_hide_is_found(name: str, byte: int) -> None:  # weights-8
    store, given = LocalStore(SETTINGS), tensors()
    live = casting(given)
    publisher, subscriber = await published(store, given), Subscriber(store, live, "reader", SETTINGS)
    flip(publisher, name, byte)
    with pytest.raises(WeightsError, match=f"version 1 at reader reader: {DIFFERS}"):
        await subscriber.prefetch(1)
    flip(publisher, name, byte)
    assert await subscriber.prefetch(1)
    subscriber.apply()
    await subscriber.verify_applied()
    assert all(torch.equal(tensor, given[key].to(tensor.dtype)) for key, tensor in live.items())
    assert subscriber.verified_updates == 1


@pytest.mark.parametrize("name", ["embedding", "experts", "norm", "scale"])
async def test_a_wrong_cast_is_named_and_not_applied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:  # weights-8
    store, given = LocalStore(SETTINGS), tensors()
    live, copy = casting(given), Copier.copy
    await published(store, given)
    subscriber = Subscriber(store, live, "reader", SETTINGS)

    def damaged(self: Copier, pairs: list[Any]) -> None:
        copy(self, pairs)
        target = next(target for target, _ in pairs if target.shape == given[name].shape)
        target.view(digest.INTEGERS[target.itemsize])[(-1,) * target.dim()] ^= 1

    monkeypatch.setattr(Copier, "copy", damaged)
    with pytest.raises(WeightsError, match=f"`{name}` is not what was fetched, cast to this reader's type"):
        await subscriber.prefetch(1)
    assert all(not tensor.any() for tensor in live.values())
    with pytest.raises(WeightsError, match="nothing to apply"):
        subscriber.apply()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_an_applied_parameter_that_differs_is_named(dtype: torch.dtype) -> None:  # weights-8
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
    monkeypatch.setattr(digest, "CHUNK", 5 * rows)
    one = torch.randn(9, 5)
    one[4, 2], one[0, 0] = float("nan"), 0.0
    for other in (one.clone(), one.T.contiguous().T):
        assert same(one, other)
        other[4, 2] = -other[4, 2]
        assert same(one, other)
        other[0, 0] = -0.0
        assert not same(one, other)
