"""What the engines of a replica are told, and the order in which rank 0 tells it. Pure.

Invariants
    CO-1  A request reaches the engine only when its weights are at least of the version that the request asks for.
    CO-2  In mode `drain`, weights are applied when no request is under way, and nothing is taken up before that.
    CO-3  Requests that may start do so in the order in which they came.
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

    def __init__(self, apply_mode: str):
        self._drains = apply_mode == "drain"
        self._version = 0
        self._update: Apply | None = None
        self._waiting: deque[Add] = deque()
        self._to_cancel: list[str] = []
        self._stopping = False

    @property
    def waiting(self) -> int:
        """How many requests are held back."""
        return len(self._waiting)

    def ask(self, command: Command) -> None:
        """Take note of a command; a newer version's update replaces an older one's."""
        match command:
            case Add():
                self._waiting.append(command)
            case Cancel(names):
                self._to_cancel.extend(names)
            case Apply():
                self._update = command
            case Stop():
                self._stopping = True

    def ready(self, busy: bool) -> bool:
        """Whether a round now would do anything: a thread with nothing ready sleeps."""
        return busy or self._stopping or bool(self._to_cancel) or self._may_apply(busy) or self._may_add()

    def next(self, busy: bool) -> tuple[list[Command], list[str]]:
        """This round's commands for the engine, and the requests that were cancelled before it saw them."""
        if self._stopping:
            return [Stop()], []
        commands: list[Command] = []
        never_begun = self._withdraw()
        if self._to_cancel:
            commands.append(Cancel(tuple(self._to_cancel)))
            self._to_cancel = []
        if self._update is not None and self._may_apply(busy):  # CO-2
            commands.append(self._update)  # CO-4
            self._version = self._update.version
            self._update = None
        if self._may_add():
            commands.extend(add for add in self._waiting if add.min_version <= self._version)  # CO-1, CO-3
            self._waiting = deque(add for add in self._waiting if add.min_version > self._version)
        return commands, never_begun

    def _may_apply(self, busy: bool) -> bool:
        return self._update is not None and not (self._drains and busy)

    def _may_add(self) -> bool:
        draining = self._drains and self._update is not None
        return not draining and any(add.min_version <= self._version for add in self._waiting)

    def _withdraw(self) -> list[str]:
        cancelled = set(self._to_cancel)
        never_begun = [add.name for add in self._waiting if add.name in cancelled]
        if never_begun:
            self._waiting = deque(add for add in self._waiting if add.name not in cancelled)
            self._to_cancel = [name for name in self._to_cancel if name not in never_begun]
        return never_begun
