"""The version protocol through real publishers and subscribers, any of them cancelled at any await or killed.

Hypothesis orders the calls and says how many turns of the event loop each of them gets before its caller is cancelled.
Whatever came before: no lease is left without its reader, nobody waits for a reader (weights-2), and once all is quiet
a new version reaches everyone.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from local_store import Gone, Life, LocalStore, as_process

from goaly.base.errors import WeightsError
from goaly.weights.publisher import Publisher
from goaly.weights.settings import WeightSettings
from goaly.weights.subscriber import Subscriber

READERS = 3
reader_numbers = st.integers(0, READERS - 1)
turns = st.one_of(st.none(), st.integers(0, 14))


class InTurn:
    """Copies on the event loop, one turn later: hypothesis needs the same order each time."""

    def __init__(self, copier: Any):
        copier.close()
        self.copy = copier.copy
        self._pool = None

    async def run(self, work: Callable[[], Any]) -> Any:
        """Do the work after a turn in which the caller may be cancelled."""
        await asyncio.sleep(0)
        return work()

    def close(self) -> None:
        """Nothing: there is no thread."""


class Protocol(RuleBasedStateMachine):
    """One trainer rank and three readers, each with one call under way at most."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.lives: list[Life] = []

    @initialize(slots=st.integers(2, 3), bucket_mib=st.sampled_from([1e-5, 8.0]))
    def start(self, slots: int, bucket_mib: float) -> None:
        self.settings = WeightSettings(slots=slots, bucket_mib=bucket_mib)  # the small one: a bucket for each row
        self.loop.run_until_complete(self._start())

    async def _start(self) -> None:
        self.store = LocalStore(self.settings)
        self.weights = {"a": torch.zeros(4), "b": torch.zeros(2, 3)}
        self.publisher = Publisher(self.store, self.weights, self.settings, rank=0, world=1)
        self.publisher._copier = InTurn(self.publisher._copier)
        self.next_version, self.committed = 0, -1
        self.readers = [self._reader(number) for number in range(READERS)]

    def _reader(self, number: int) -> Any:
        life = Life()
        self.lives.append(life)
        tensors = {name: torch.full(tuple(tensor.shape), -1.0) for name, tensor in self.weights.items()}
        with as_process(life.mark):
            reader = Subscriber(self.store, tensors, f"reader {number}", self.settings)
        reader._copier = InTurn(reader._copier)
        return reader, tensors, life

    @rule(turns=turns)
    def publish(self, turns: int | None) -> None:
        for tensor in self.weights.values():
            tensor.fill_(self.next_version)
        version, self.next_version = self.next_version, self.next_version + 1
        if self._ended(self.publisher.publish(version), turns):
            self.committed = version
        else:
            newest = self.loop.run_until_complete(self.store.state.call_one()).newest
            self.committed = self.committed if newest is None else newest
        assert turns is not None or self.committed == version  # weights-2: no reader makes the trainer wait

    @rule(number=reader_numbers, turns=turns, pulls=st.booleans())
    def read(self, number: int, turns: int | None, pulls: bool) -> None:
        reader, tensors, _ = self.readers[number]
        if not self.store.actor._versions.versions:
            return

        async def newest_and_pull() -> None:
            version = await reader.newest(-1)
            assert version == max(self.store.actor._versions.versions)  # weights-2
            if pulls:  # nobody publishes meanwhile
                assert await reader.prefetch(version), "what `newest` returned is held"
                reader.apply()
                for tensor in tensors.values():
                    assert bool((tensor == version).all())

        assert self._ended(newest_and_pull(), turns) or turns is not None  # weights-2: nor does a reader

    @rule(number=reader_numbers, turns=turns)
    def release(self, number: int, turns: int | None) -> None:
        self._ended(self.readers[number][0].release(), turns)

    @rule(number=reader_numbers, turns=st.integers(0, 14))
    def kill(self, number: int, turns: int) -> None:
        reader, _, life = self.readers[number]

        async def die() -> None:
            pulling = asyncio.ensure_future(reader.newest(-1))
            for _ in range(turns):
                await asyncio.sleep(0)
            reader._store = Gone()
            life.kill()
            pulling.cancel()
            await asyncio.wait({pulling})

        self.loop.run_until_complete(die())
        self.readers[number] = self._reader(number)

    @invariant()
    def no_lease_is_left_without_its_reader(self) -> None:
        if not hasattr(self, "store"):
            return
        self.loop.run_until_complete(self._quiet())
        actor = self.store.actor
        assert actor._versions.leased.keys() <= actor._readers.keys()
        for reader, *_ in self.readers:
            held = None if reader.held is None else reader.held.version
            leased = actor._versions.leased.get(reader._number)
            assert leased == held or (leased is None and held not in actor._versions.versions)  # weights-3, or revoked
        assert not self.store.failures

    async def _quiet(self) -> None:
        """Until the kernel's news of killed processes have come, and what they were cancelled in has run out."""
        alive = {life.mark.pid for *_, life in self.readers}
        actor = self.store.actor
        await actor._until(lambda: all(one.process.pid in alive for one in actor._readers.values()) or None)
        for _ in range(20):
            await asyncio.sleep(0)

    def _ended(self, call: Any, turns: int | None) -> bool:
        """Run the call for so many turns, then cancel it; whether it ended by itself."""

        async def run() -> bool:
            task = asyncio.ensure_future(call)
            if turns is None:
                await asyncio.wait_for(task, 10)
                return True
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled() and (error := task.exception()) is not None:
                assert isinstance(error, WeightsError), error
            return not task.cancelled() and task.exception() is None

        return self.loop.run_until_complete(run())

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for reader, _, _ in self.readers:
                self._ended(reader.release(), None)
            self.publish(None)
            for number in range(READERS):
                reader = self.readers[number][0]
                version = self.loop.run_until_complete(asyncio.wait_for(reader.newest(self.committed - 1), 10))
                assert self.loop.run_until_complete(reader.prefetch(version))
                assert reader.apply() == self.committed
            self.publisher._background.end()
            self.publisher._slots.close()
        for life in self.lives:
            life.kill()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


Protocol.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestCancelledAnywhere = Protocol.TestCase
