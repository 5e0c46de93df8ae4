"""What the engines of a replica are told, and the order in which rank 0 tells it. Pure.

Invariants
    CO-1  A request reaches the engine only when its weights are at least of the version that the request asks for.
    CO-2  In mode `drain`, weights are applied when no request is under way, and nothing is taken up before that.
    CO-3  Requests that may start do so in the order in which they came, as many as there is room for: what waits, waits
          here, where a weight update costs it nothing.
    CO-4  Weights are applied before the requests that wait for them are added, in the same round.
"""

from collections import deque
from dataclasses import dataclass

from goaly.generate.request import Sampling


@dataclass(frozen=True, slots=True)
class Add:
    """Take a request up."""

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
    """Decode with these weights from here on; every rank holds them ready."""

    version: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End the engine's thread."""


Command = Add | Cancel | Apply | Stop


class Sequencer:
    """Decides round by round what the engine does next, out of what was asked."""

    def __init__(self, apply_mode: str, *, max_running: int):
        self._drains = apply_mode == "drain"
        self._max_running = max_running
        self._version = 0
        self._update: Apply | None = None
        self._may_start: deque[tuple[int, Add]] = deque()
        self._too_early: list[tuple[int, Add]] = []
        self._asked = 0
        self._to_cancel: list[str] = []
        self._stopping = False

    @property
    def waiting(self) -> int:
        """How many requests are held back."""
        return len(self._may_start) + len(self._too_early)

    def ask(self, command: Command) -> None:
        """Take note of a command; a newer version's update replaces an older one's."""
        match command:
            case Add():
                waiting = self._may_start if command.min_version <= self._version else self._too_early  # CO-1
                waiting.append((self._asked, command))
                self._asked += 1
            case Cancel(names):
                self._to_cancel.extend(names)
            case Apply():
                self._update = command
            case Stop():
                self._stopping = True

    def ready(self, under_way: int) -> bool:
        """Whether a round now would do anything: a thread with nothing ready sleeps."""
        acts = under_way > 0 or self._stopping or bool(self._to_cancel)
        return acts or self._may_apply(under_way) or self._room(under_way) > 0

    def next(self, under_way: int) -> tuple[list[Command], list[str]]:
        """This round's commands for the engine, and the requests that were cancelled before it saw them."""
        if self._stopping:
            return [Stop()], []
        commands: list[Command] = []
        never_begun = self._withdraw()
        if self._to_cancel:
            commands.append(Cancel(tuple(self._to_cancel)))
            self._to_cancel = []
        if self._update is not None and self._may_apply(under_way):  # CO-2
            commands.append(self._update)  # CO-4
            self._turn(self._update.version)
            self._update = None
        commands.extend(self._may_start.popleft()[1] for _ in range(self._room(under_way)))  # CO-3
        return commands, never_begun

    def _turn(self, version: int) -> None:
        self._version = version
        started = [held for held in self._too_early if held[1].min_version <= version]
        if started:
            self._too_early = [held for held in self._too_early if held[1].min_version > version]
            self._may_start = deque(sorted([*self._may_start, *started], key=lambda held: held[0]))  # CO-3

    def _may_apply(self, under_way: int) -> bool:
        return self._update is not None and not (self._drains and under_way)

    def _room(self, under_way: int) -> int:
        if self._drains and self._update is not None:  # CO-2
            return 0
        return max(0, min(len(self._may_start), self._max_running - under_way))

    def _withdraw(self) -> list[str]:
        cancelled = set(self._to_cancel)
        if not cancelled:
            return []
        never_begun = [add.name for _, add in (*self._may_start, *self._too_early) if add.name in cancelled]
        if never_begun:
            self._may_start = deque(held for held in self._may_start if held[1].name not in cancelled)
            self._too_early = [held for held in self._too_early if held[1].name not in cancelled]
            self._to_cancel = [name for name in self._to_cancel if name not in never_begun]
        return never_begun
