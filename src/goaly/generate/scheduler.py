"""Decides what a replica's engines do in each round, and in which order. Pure.

Invariants
    CO-1  A request reaches the engine only when the weights are at least of the version that the request asks for.
    CO-2  In mode `drain`, weights are applied when no request is running, and no request starts before that.
    CO-3  Requests start in the order in which they came, as many as there is room for. The others wait here and not in
          the engine, where a weight update would cost time for each of them.
    CO-4  In one round, weights are applied before the requests that waited for them are added.
"""

from collections import deque
from dataclasses import dataclass

from goaly.generate.request import Sampling


@dataclass(frozen=True, slots=True)
class Add:
    """Start a request."""

    name: str
    prompt: list[int]
    sampling: Sampling
    min_version: int = 0


@dataclass(frozen=True, slots=True)
class Cancel:
    """End these requests."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Apply:
    """Decode with the weights of this version, which every rank has prefetched."""

    version: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End the engine's thread."""


Command = Add | Cancel | Apply | Stop


class Scheduler:
    """Collects commands, and gives out those of each round."""

    def __init__(self, on_update: str, *, max_running: int):
        """`on_update` is `generator.on_update`."""
        self._drains = on_update == "drain"
        self._max_running = max_running
        self._version = 0
        self._update: Apply | None = None
        self._ready: deque[tuple[int, Add]] = deque()
        self._early: list[tuple[int, Add]] = []
        """Requests that wait for newer weights."""
        self._count = 0
        self._to_cancel: list[str] = []
        self._stopping = False

    @property
    def waiting(self) -> int:
        """How many requests have not started."""
        return len(self._ready) + len(self._early)

    def submit(self, command: Command) -> None:
        """Take a command for a later round. An update replaces an older one that was not applied yet."""
        match command:
            case Add():
                waiting = self._ready if command.min_version <= self._version else self._early  # CO-1
                waiting.append((self._count, command))
                self._count += 1
            case Cancel(names):
                self._to_cancel.extend(names)
            case Apply():
                self._update = command
            case Stop():
                self._stopping = True

    def has_work(self, running: int) -> bool:
        """Whether a round now would do anything, with so many requests running."""
        if running > 0 or self._stopping or self._to_cancel:
            return True
        return self._may_apply(running) or self._room(running) > 0

    def next(self, running: int) -> tuple[list[Command], list[str]]:
        """This round's commands for the engine, and the requests that were cancelled before they started."""
        if self._stopping:
            return [Stop()], []
        commands: list[Command] = []
        never_started = self._cancel_waiting()
        if self._to_cancel:
            commands.append(Cancel(tuple(self._to_cancel)))
            self._to_cancel = []
        if self._update is not None and self._may_apply(running):  # CO-2
            commands.append(self._update)  # CO-4
            self._set_version(self._update.version)
            self._update = None
        commands.extend(self._ready.popleft()[1] for _ in range(self._room(running)))  # CO-3
        return commands, never_started

    def _set_version(self, version: int) -> None:
        self._version = version
        ready = [waiting for waiting in self._early if waiting[1].min_version <= version]
        if ready:
            self._early = [waiting for waiting in self._early if waiting[1].min_version > version]
            self._ready = deque(sorted([*self._ready, *ready], key=lambda waiting: waiting[0]))  # CO-3

    def _may_apply(self, running: int) -> bool:
        return self._update is not None and not (self._drains and running)

    def _room(self, running: int) -> int:
        if self._drains and self._update is not None:  # CO-2
            return 0
        return max(0, min(len(self._ready), self._max_running - running))

    def _cancel_waiting(self) -> list[str]:
        cancelled = set(self._to_cancel)
        if not cancelled:
            return []
        never_started = [add.name for _, add in (*self._ready, *self._early) if add.name in cancelled]
        if never_started:
            self._ready = deque(waiting for waiting in self._ready if waiting[1].name not in cancelled)
            self._early = [waiting for waiting in self._early if waiting[1].name not in cancelled]
            self._to_cancel = [name for name in self._to_cancel if name not in never_started]
        return never_started
