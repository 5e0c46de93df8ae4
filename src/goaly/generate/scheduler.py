"""The commands to a replica's engines, and the order in which they are carried out.

`Scheduler` starts requests in the order in which they came, up to a limit, and only under the version that each asks
for. The others wait outside of the engine, where a weight update would cost time for each of them. In one round weights
are applied before requests are added; in mode `drain` only when no request is running, and none starts before.
"""

from dataclasses import dataclass
from itertools import islice

from goaly.generate.request import Request


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


Command = Request | Cancel | Apply | Stop


class Scheduler:
    """Collects commands, and gives out those of each round."""

    def __init__(self, on_update: str, *, max_running: int, version: int = 0):
        """`on_update` is `generator.on_update`; `version` is that of the engine's weights at the beginning."""
        self._drains = on_update == "drain"
        self.max_running = max_running
        """How many requests may be in the engine."""
        self._version = version
        self._update: Apply | None = None
        self._waiting: dict[str, Request] = {}
        """In the order in which they came."""
        self._to_cancel: list[str] = []
        self._stopping = False

    @property
    def waiting(self) -> int:
        """How many requests have not started."""
        return len(self._waiting)

    @property
    def queued(self) -> int:
        """How many of them wait for room, and not for newer weights. May be called from any thread."""
        return sum(map(self._is_ready, tuple(self._waiting.values())))

    @property
    def holds_back(self) -> bool:
        """Whether a request waits for room."""
        return any(map(self._is_ready, self._waiting.values()))

    def submit(self, command: Command) -> None:
        """Take a command for a later round. An update replaces an older one that was not applied yet."""
        match command:
            case Request(name):
                self._waiting[name] = command
            case Cancel(names):
                self._to_cancel.extend(names)
            case Apply():
                self._update = command
            case Stop():
                self._stopping = True

    def has_work(self, running: int) -> bool:
        """Whether a round now would do anything, given the number of running requests."""
        if running > 0 or self._stopping or self._to_cancel:
            return True
        return self._update is not None or bool(self._startable(running))

    def next(self, running: int) -> tuple[list[Command], list[str]]:
        """This round's commands for the engine, and the requests that were cancelled before they started."""
        if self._stopping:
            return [Stop()], []
        commands: list[Command] = []
        cancelled, self._to_cancel = list(dict.fromkeys(self._to_cancel)), []  # two callers may cancel a request
        never_started = [name for name in cancelled if self._waiting.pop(name, None) is not None]
        if len(never_started) < len(cancelled):
            commands.append(Cancel(tuple(name for name in cancelled if name not in never_started)))
        if self._update is not None and not (self._drains and running):
            commands.append(self._update)
            self._version = self._update.version
            self._update = None
        for request in self._startable(running):
            del self._waiting[request.request_id]
            commands.append(request)
        return commands, never_started

    def _startable(self, running: int) -> list[Request]:
        if self._drains and self._update is not None:
            return []
        ready = filter(self._is_ready, self._waiting.values())
        return list(islice(ready, max(0, self.max_running - running)))

    def _is_ready(self, request: Request) -> bool:
        return request.min_version <= self._version
