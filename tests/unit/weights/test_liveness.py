"""Processes on other hosts: their pulses, and when their silence is their end."""

import asyncio

import pytest
import torch
from local_store import LocalStore, within

from goaly.base import process as liveness
from goaly.base.process import PULSE_SECONDS, SILENT_SECONDS, SilenceWatch
from goaly.weights.publisher import Publisher
from goaly.weights.settings import WeightSettings
from goaly.weights.subscriber import Subscriber
from tests.unit.stalled import Stalls

SETTINGS = WeightSettings()
TICKS = round(SILENT_SECONDS / PULSE_SECONDS)
ELSEWHERE = "another host"


async def test_a_process_elsewhere_counts_as_ended_once_it_is_silent_and_not_while_its_pulse_beats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stalls = Stalls(monkeypatch)
    ended: list[bool] = []
    watch = SilenceWatch(lambda: ended.append(True))
    for _ in range(3 * TICKS):
        watch.beat()
        await stalls.tick(PULSE_SECONDS)
    for _ in range(TICKS - 1):
        assert not ended
        await stalls.tick(PULSE_SECONDS)
    assert ended == [True]
    watch.close()


async def test_a_watcher_that_stalled_longer_than_the_limit_ends_nobody_whose_pulses_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stalls = Stalls(monkeypatch)
    ended: list[bool] = []
    watch = SilenceWatch(lambda: ended.append(True))
    for _ in range(3):
        stalls.stall(10 * SILENT_SECONDS)
        await stalls.tick(PULSE_SECONDS)  # the timers come before the messages that waited
        assert not ended
        watch.beat()
    watch.close()


async def test_members_on_other_hosts_live_for_as_long_as_they_send_pulses(monkeypatch: pytest.MonkeyPatch) -> None:
    stalls = Stalls(monkeypatch)
    store = LocalStore(SETTINGS)
    writer = Publisher(store, {"a": torch.zeros(4)}, SETTINGS, rank=0, world=1, host=ELSEWHERE)
    reader = Subscriber(store, {"a": torch.zeros(4)}, "reader", SETTINGS, host=ELSEWHERE)
    await within(asyncio.gather(writer.publish(0), reader.newest()))
    for _ in range(3 * TICKS):
        await stalls.tick(PULSE_SECONDS)
    assert (await store.state.call_one()).leased == {"reader": 0}

    reader._background.end()
    for _ in range(TICKS + 1):
        await stalls.tick(PULSE_SECONDS)
    assert (await store.state.call_one()).readers == 0
    assert await within(writer.publish(1))  # its own pulses went on

    writer._background.end()
    for _ in range(TICKS + 1):
        await stalls.tick(PULSE_SECONDS)
    state = await store.state.call_one()
    assert state.newest == 1
    assert "writer rank 0" in store.actor._versions.ended
    store.actor._writers[0].watch.close()
    writer._slots.close()


def test_the_limit_leaves_room_for_lost_pulses() -> None:
    assert liveness.SILENT_SECONDS >= 4 * liveness.PULSE_SECONDS
