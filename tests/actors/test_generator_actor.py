"""Generator actors over a real weight store: versions arrive, requests see them, ranks stay in step."""

import asyncio
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loop.launched import descendants, held_memory
from random_model import VOCABULARY, native_tensors, write_random_model
from spawned import spawn

from goaly.base.errors import ReplicaLost
from goaly.generate.request import InvalidRequest, Sample, Sampling
from goaly.generate.settings import GeneratorSettings
from goaly.generate.versioned_tokens import VersionedTokens
from goaly.models.settings import ModelSettings
from goaly.weights.settings import WeightSettings

PROMPT = [(3 * j) % 30 + 2 for j in range(40)]
GREEDY = Sampling(max_tokens=24, temperature=0.0)

pytestmark = pytest.mark.timeout(240)


def breakable() -> type:
    """A generator whose pulls can be made to fail. Made here, because importing it imports Monarch."""
    from monarch.actor import concurrent_endpoint

    from goaly.base.errors import WeightsError
    from goaly.generate.generator import Generator
    from goaly.weights.subscriber import Subscriber

    class Breakable(Generator):
        @concurrent_endpoint
        async def break_pulls(self) -> None:
            async def prefetch(self: Subscriber, version: int, lent: Any = None) -> bool:
                raise WeightsError("written over")

            Subscriber.prefetch = prefetch

    return Breakable


async def ended(mesh: Any) -> list[asyncio.Event]:
    """An event for each process of the mesh, set once it has ended."""
    from goaly.base.process import ExitWatch
    from goaly.run.process_watch import ProcessAgent

    marks = await mesh.spawn("agent", ProcessAgent).mark.call()
    events = [asyncio.Event() for _ in marks.values()]
    for (_, mark), event in zip(marks.items(), events, strict=True):
        ExitWatch(mark, event.set)
    return events


async def procs(count: int, role: str) -> Any:
    from goaly.run.rendezvous import rendezvous

    mesh = spawn(role, count)
    if count > 1:
        await rendezvous(mesh, "ranks")
    return mesh


def greedy_of_transformers(folder: Path) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    out = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=GREEDY.max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return out[0, len(PROMPT) :].tolist()


async def test_replicas_of_one_and_two_ranks_follow_the_store(tiny_model_folder, tmp_path):
    """A life in one go, for each start costs seconds: catch up, hold back, update midway, cancel, close."""
    from goaly.generate.connection import Connection
    from goaly.generate.generator import Generator
    from goaly.models.definition import model_spec
    from goaly.weights.publisher import Publisher
    from goaly.weights.store import WeightStore

    folders = [tiny_model_folder, write_random_model(tmp_path / "other", seed=1)]
    weights = [native_tensors(model_spec(folder), folder) for folder in folders]
    greedy = [greedy_of_transformers(folder) for folder in folders]
    live = {name: tensor.clone() for name, tensor in weights[1].items()}
    first, second, hub = await asyncio.gather(procs(1, "generator"), procs(2, "generator"), procs(1, "hub"))
    moved = WeightSettings(bucket_mib=0.05)
    store = hub.spawn("store", WeightStore, moved)
    publisher = Publisher(store, live, moved, rank=0, world=1)

    async def publish(which: int, version: int) -> None:
        for name, tensor in live.items():
            tensor.copy_(weights[which][name])
        await publisher.publish(version)

    await publish(1, 1)
    model = ModelSettings(path=str(tiny_model_folder))
    size = {"max_running": 32, "max_context": 512, "kv_cache_gib": 0.02}
    one = first.spawn("one", Generator, GeneratorSettings(**size), model, store, 0, moved)
    two = second.spawn("two", breakable(), GeneratorSettings(tp=2, **size), model, store, 1, moved)
    leader = two.slice(procs=0)

    connections = {id(replica): Connection(replica) for replica in (one, leader)}

    async def ask(replica: Any, name: str, sampling: Sampling = GREEDY, min_version: int = 0) -> Sample:
        return await connections[id(replica)].submit(name, PROMPT, sampling, min_version)

    versions = await asyncio.gather(one.start.call(), two.start.call())
    assert [version.item(procs=0) for version in versions] == [1, 1]  # generate-8
    assert (await store.state.call_one()).readers == 3
    assert held_memory(descendants(os.getpid())) == set()
    samples = await asyncio.gather(*(ask(replica, f"{n}") for replica in (one, leader) for n in range(8)))
    assert [sample.tokens.tolist() for sample in samples] == [greedy[1]] * 16
    assert {int(version) for sample in samples for version in sample.versions} == {1}

    formed = Sampling(max_tokens=8, structured_outputs={"choice": ["cab"]}, stop_token_ids=(1,))
    broken = {"structured_outputs": {"json": {"type": "unknown"}}}
    for replica in (one, leader):
        assert VOCABULARY[(await ask(replica, "formed", formed)).tokens[0]] == "c"
        with pytest.raises(InvalidRequest, match="structured_outputs"):
            await ask(replica, "of no form", replace(formed, **broken))
    with pytest.raises(InvalidRequest, match=r"regex: .* generator.tp > 1"):
        await ask(leader, "slow", replace(formed, structured_outputs={"regex": "c"}))

    held = [asyncio.ensure_future(ask(replica, "held back", min_version=3)) for replica in (one, leader)]
    await publish(0, 2)
    assert await one.version_at_least.call_one(2) == 2
    assert (await ask(one, "version 2")).tokens.tolist() == greedy[0]
    assert not any(request.done() for request in held)
    await publish(1, 3)
    for sample in await asyncio.gather(*held):
        assert (sample.tokens.tolist(), set(sample.versions.tolist())) == (greedy[1], {3})

    for replica in (one, leader):  # of two ranks, the first one sends
        parts: list[VersionedTokens] = []
        beside = asyncio.ensure_future(ask(replica, "not streamed"))
        streamed = await connections[id(replica)].submit("streamed", PROMPT, GREEDY, 0, parts.append)
        assert [token for part in parts for token in part.tokens] == streamed.tokens[:-1].tolist() == greedy[1][:-1]
        assert (await beside).tokens.tolist() == greedy[1]

    for version in range(4, 9):  # an answer ends before the update if other work takes the publisher's core
        midway = asyncio.ensure_future(ask(one, f"midway {version}", Sampling(max_tokens=400)))
        endless = asyncio.ensure_future(ask(one, f"endless {version}", Sampling(max_tokens=10**6)))
        await ask(one, f"meanwhile {version}", Sampling(max_tokens=3))
        await publish(0, version)
        await one.version_at_least.call_one(version)
        connections[id(one)].cancel(f"endless {version}")
        with pytest.raises(asyncio.CancelledError):
            await endless
        sample = await midway
        if sample.versions[-1] == version:
            break
    assert sample.versions.unique_consecutive().tolist() == [version - 1, version]
    assert len(sample.tokens) == 400
    assert (await ask(leader, "the ranks agree", min_version=version)).tokens.tolist() == greedy[0]  # generate-6
    stats = await leader.stats.call_one()
    assert (stats.version, stats.running, stats.waiting) == (version, 0, 0)

    for replica in (one, leader):
        connection = connections[id(replica)]
        for prompt, why in (([3] * 512, "max_context=512"), ([3, 32], "token id 32 .* not in the model's vocabulary")):
            with pytest.raises(ValueError, match=why):
                await connection.submit("no engine could continue it", prompt, GREEDY)
        await connection.wait_turn("a suspect")
        turns = [connection.wait_turn(f"suspect {n}") for n in range(2)]
        assert (await ask(replica, "meanwhile")).tokens.tolist() == greedy[0]
        assert not any(turn.done() for turn in turns)
        connection.cancel("suspect 0")  # waiting for its turn
        assert (await ask(replica, "a suspect")).tokens.tolist() == greedy[0]
        await turns[1]
        connection.cancel("suspect 1")  # before it is asked
        await connection.wait_turn("the last suspect")

    await publisher.close()  # no newer weights will come, so nothing follows any more (generate-9)
    for replica in (one, leader):
        assert (await ask(replica, "the last version")).tokens.tolist() == greedy[0]
    successor = hub.spawn("store-1", WeightStore, moved)
    await asyncio.gather(one.follow.call(successor), two.follow.call(successor))
    publisher = Publisher(successor, live, moved, rank=0, world=1)
    for which, later in ((0, 0), (1, 1), (0, 2)):  # it begins with the version that they have
        await publish(which, version + later)
    for replica in (one, leader):
        sample = await ask(replica, "the next store's", min_version=version + 2)
        assert (sample.tokens.tolist(), set(sample.versions.tolist())) == (greedy[0], {version + 2})
    assert (await successor.state.call_one()).readers == 3

    await one.close.call()
    with pytest.raises(ReplicaLost, match="closed"):
        await ask(one, "after the end")
    held = asyncio.ensure_future(ask(leader, "held back for ever", min_version=99))
    await two.slice(procs=1).break_pulls.call_one()
    ranks = await ended(second)
    await publish(1, 7)
    for rank in ranks:  # generate-9: the follower can't pull, and the leader can't go on without it
        await asyncio.wait_for(rank.wait(), 20)
    with pytest.raises(ReplicaLost):
        await held
    await asyncio.gather(*(mesh.stop() for mesh in (first, hub)))


def damaging() -> type:
    """A generator that damages what it fetches or applies from some moment on. Made here, as `breakable`."""
    from monarch.actor import concurrent_endpoint

    from goaly.generate.generator import Generator
    from goaly.weights.copier import Copier
    from goaly.weights.fetched_weights import FetchedWeights

    class Damaging(Generator):
        @concurrent_endpoint
        async def damage(self, what: str) -> None:
            copy, apply = Copier.copy, FetchedWeights.apply

            def flip(tensor: torch.Tensor) -> None:
                tensor.detach().view(-1).view(torch.uint8)[0] ^= 1  # of an element's lowest bits

            def copied(self: Copier, pairs: Any) -> None:
                copy(self, pairs)
                cast = [target for target, source in pairs if target.dtype != source.dtype and target.is_contiguous()]
                flip(cast[0])

            def applied(self: FetchedWeights) -> None:
                apply(self)
                flip(self._live[next(reversed(self._spares))])

            if what == "a cast":
                Copier.copy = copied
            elif what == "a parameter":
                FetchedWeights.apply = applied

    return Damaging


@pytest.mark.parametrize(
    ("what", "transfer", "error"),
    [
        ("tok_embeddings.weight", "bfloat16", "the weights have the digest .* published with"),
        ("tok_embeddings.weight", "float32", "the weights have the digest .* published with"),
        ("layers.0.attention_norm.weight", "bfloat16", "the weights have the digest .* published with"),
        ("a cast", "float32", "`.+` is not what was fetched, cast to this reader's type"),
        ("a parameter", "float32", "parameter `.+` differs from what was fetched and verified"),
    ],
)
async def test_a_byte_that_is_flipped_anywhere_on_the_way_ends_the_replica(
    tiny_model_folder: Path, capfd: pytest.CaptureFixture[str], what: str, transfer: Any, error: str
):
    """weights-8, generate-9. The generator holds all parameters in bfloat16; norms are published in float32."""
    from goaly.generate.connection import Connection
    from goaly.models.definition import model_spec
    from goaly.weights.publisher import Publisher
    from goaly.weights.store import WeightStore

    class Damaged(Publisher):
        def _stage(self, slots: Any, slot: int, version: int, digests: bool) -> int | None:
            digest = super()._stage(slots, slot, version, digests)
            for shard, elements in zip(slots.layout, slots.views(slot), strict=True):
                if version == 2 and shard.name == what:
                    elements.view(-1).view(torch.uint8)[0] ^= 1  # lost by a cast to bfloat16
            return digest

    weights = native_tensors(model_spec(tiny_model_folder), tiny_model_folder)
    mesh, hub = await asyncio.gather(procs(1, "generator"), procs(1, "hub"))
    settings = WeightSettings(transfer_dtype=transfer, verify_every=1)
    store = hub.spawn("store", WeightStore, settings)
    publisher = Damaged(store, weights, settings, rank=0, world=1)
    await publisher.publish(1)
    size = {"max_running": 8, "max_context": 128, "kv_cache_gib": 0.01}
    model = ModelSettings(path=str(tiny_model_folder), dtype="bfloat16")
    replica = mesh.spawn("replica", damaging(), GeneratorSettings(**size), model, store, 0, settings)
    assert await replica.start.call_one() == 1
    connection = Connection(replica)
    sample = await connection.submit("before", PROMPT, GREEDY)
    assert set(sample.versions.tolist()) == {1}
    stats = await replica.stats.call_one()
    assert stats.verified_updates == 1
    await replica.damage.call_one(what)
    held = asyncio.ensure_future(connection.submit("held back", PROMPT, GREEDY, 2))
    (end,) = await ended(mesh)
    await publisher.publish(2)
    await asyncio.wait_for(end.wait(), 20)
    (outcome,) = await asyncio.gather(held, return_exceptions=True)
    assert isinstance(outcome, ReplicaLost) or what == "a parameter"  # which is found only after it is applied
    assert re.search(f"WeightsError: version 2 at reader generator-0.0: {error}", capfd.readouterr().err)
    await hub.stop()
