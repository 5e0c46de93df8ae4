"""Bounds and turns of starts, for random sequences of what can happen."""

from __future__ import annotations

import random

import pytest

from goaly.sandboxes.admission import Admission, RoomRequest
from goaly.sandboxes.contract import Limits


class Model:
    """Plays random tasks, and checks after each step what must always hold."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.most = self.random.randint(1, 6)
        self.memory = self.random.choice([None, 1000, 3000])
        self.disk = self.random.choice([None, 500])
        self.admission = Admission(self.most, self.memory, self.disk)
        self.waiting: list[RoomRequest] = []
        self.live: list[RoomRequest] = []
        self.passed: dict[RoomRequest, list[str]] = {}
        """The tasks that were served since a request is the first of its task."""

    def step(self) -> None:
        match self.random.choice(["ask", "ask", "end", "withdraw"]):
            case "ask":
                limits = Limits(memory_mib=self.random.randint(1, 1000), disk_mib=self.random.randint(1, 500))
                request = RoomRequest(self.random.choice("abc"), limits)
                assert self.admission.too_large(limits) is None
                self.admission.ask(request)
                self.waiting.append(request)
            case "end" if self.live:
                self.admission.free(self.live.pop(self.random.randrange(len(self.live))))
            case "withdraw" if self.waiting:
                request = self.waiting.pop(self.random.randrange(len(self.waiting)))
                self.admission.withdraw(request)
        while request := self.admission.admit():
            self.served(request)
        self.check()

    def served(self, request: RoomRequest) -> None:
        assert request is next(one for one in self.waiting if one.task == request.task), "a task's requests in turn"
        self.waiting.remove(request)
        self.live.append(request)
        for first in self.firsts():
            self.passed.setdefault(first, []).append(request.task)
            others = [task for task in self.passed[first] if task != first.task]
            assert len(others) == len(set(others)), f"{first.task} waited while another task had two turns: {others}"

    def firsts(self) -> list[RoomRequest]:
        return [next(one for one in self.waiting if one.task == task) for task in {one.task for one in self.waiting}]

    def check(self) -> None:
        assert len(self.live) <= self.most
        assert self.memory is None or sum(one.limits.memory_mib for one in self.live) <= self.memory
        assert self.disk is None or sum(one.limits.disk_mib for one in self.live) <= self.disk
        assert self.waiting or self.admission.next is None
        if self.waiting:
            assert self.admission.next in self.firsts()
        if not self.live:
            assert not self.waiting, "an empty pool lets nobody wait"


@pytest.mark.parametrize("seed", range(40))
def test_bounds_hold_tasks_take_turns_and_nobody_waits_for_an_empty_pool(seed: int):
    model = Model(seed)
    for _ in range(200):
        model.step()
    for request in list(model.waiting):
        model.admission.withdraw(request)
    model.waiting.clear()
    while model.live:
        model.admission.free(model.live.pop())
    assert model.admission.admit() is None
    assert model.admission.try_hold(RoomRequest("", Limits(memory_mib=1000, disk_mib=500)))


def test_a_request_that_alone_is_above_the_bounds_is_named():
    admission = Admission(10, memory_mib=512, disk_mib=100)
    assert "memory, 513 MiB" in (admission.too_large(Limits(memory_mib=513, disk_mib=1)) or "")
    assert "files, 101 MiB" in (admission.too_large(Limits(memory_mib=1, disk_mib=101)) or "")


def test_what_lives_already_is_counted_beyond_the_bounds():
    admission = Admission(1)
    adopted, waiting = RoomRequest("a", Limits()), RoomRequest("b", Limits())
    assert admission.try_hold(waiting)
    admission.hold(adopted)
    admission.free(waiting)
    admission.free(waiting)
    assert not admission.try_hold(waiting)
    admission.free(adopted)
    assert admission.try_hold(waiting)
