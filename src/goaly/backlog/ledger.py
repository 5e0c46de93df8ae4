"""The state of every admitted ticket, and the reason of each end. Pure.

    running ──▶ queued ──▶ trained
       └───────────┴─────▶ rejected(why) | failed(why)

Invariant
    backlog-5: A ticket ends exactly once, and admitted == running + queued + trained + rejected + failed after every
        transition.
"""

from collections import Counter
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """The state of a ticket."""

    RUNNING = "running"
    """Admitted; its episodes run or are about to."""
    QUEUED = "queued"
    """Its group is complete, in the queue or in a batch that is being trained."""
    TRAINED = "trained"
    """A training step consumed it."""
    REJECTED = "rejected"
    """It is left out on purpose."""
    FAILED = "failed"
    """Something broke."""

    @property
    def ended(self) -> bool:
        """Whether this state is final."""
        return self in (State.TRAINED, State.REJECTED, State.FAILED)


_NEXT = {
    State.RUNNING: {State.QUEUED, State.REJECTED, State.FAILED},
    State.QUEUED: {State.TRAINED, State.REJECTED, State.FAILED},
}
_CODES = dict(zip(State, b"RQTXF", strict=True))
_STATES = {code: state for state, code in _CODES.items()}


class Ledger:
    """The states of all tickets of a run."""

    def __init__(self) -> None:
        self._states = bytearray()
        """The code of each ticket's state."""
        self._counts: Counter[State] = Counter()
        self.reasons: Counter[str] = Counter()

    @property
    def admitted(self) -> int:
        """The number of tickets admitted so far, which is the index of the next one."""
        return len(self._states)

    @property
    def live(self) -> int:
        """The number of tickets that were not dropped, which is the position of the next one."""
        return self.admitted - self._counts[State.REJECTED] - self._counts[State.FAILED]

    def admit(self) -> int:
        """Admit a ticket, and return its index."""
        index = self.admitted
        self._states.append(_CODES[State.RUNNING])
        self._counts[State.RUNNING] += 1
        self._check()
        return index

    def state(self, index: int) -> State:
        """The state of this ticket."""
        if not 0 <= index < self.admitted:
            raise ValueError(f"ticket {index} was never admitted; {self.admitted} were")
        return _STATES[self._states[index]]

    def move(self, index: int, to: State, why: str | None = None) -> None:
        """Move a ticket to its next state; a rejection or failure, and only these, needs a reason."""
        before = self.state(index)
        if to not in _NEXT.get(before, ()):
            raise ValueError(f"ticket {index} is {before}, and can't become {to}")  # backlog-5
        if (why is not None) != (to in (State.REJECTED, State.FAILED)):
            raise ValueError(f"ticket {index}: a reason belongs to a rejection or a failure only, got {why!r} for {to}")
        self._states[index] = _CODES[to]
        self._counts[before] -= 1
        self._counts[to] += 1
        if why is not None:
            self.reasons[f"{to}: {why}"] += 1
        self._check()

    def open(self) -> list[int]:
        """Tickets that have not ended."""
        return [index for index, code in enumerate(self._states) if not _STATES[code].ended]

    def counts(self) -> dict[str, int]:
        """The number of tickets admitted and in each state."""
        return {"admitted": self.admitted, **{str(state): self._counts[state] for state in State}}

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        return {"states": self._states.decode(), "reasons": dict(self.reasons)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self._states = bytearray(state["states"].encode())
        self._counts = Counter({_STATES[code]: count for code, count in Counter(self._states).items()})
        self.reasons = Counter(state["reasons"])

    def _check(self) -> None:
        assert self.admitted == sum(self._counts.values()), self.counts()  # backlog-5
        assert min(self._counts.values()) >= 0, self.counts()
