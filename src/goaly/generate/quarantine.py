"""What happens to a request whose replica died: it moves to another, and it becomes a suspect.

A request that kills engines (a poison request) must not kill one replica after another, and the requests beside it must
not fail with it. Nobody can tell from a dead process which of its requests was to blame, so each request counts the
deaths of replicas that it was under way at:

    0, 1 deaths  It runs like any other request: most deaths have nothing to do with a request, and they cost no speed.
    2 deaths     It is a suspect. A replica lets suspects in one at a time (`Quarantine`), so its next death counts for
                 one of them only: a suspect that waits for its turn is not under way.
    3 deaths     It fails alone with a `PoisonRequest`. Two of the deaths may be chance or another request's fault; the
                 third happened while it was the only suspect there.

An innocent request fails only if three replicas die under it for other reasons, the third of them during its turn.
"""

from collections.abc import Callable

SUSPECT_DEATHS = 2
POISON_DEATHS = 3


class Quarantine:
    """A replica's end: lets suspects in one at a time, in the order in which they came."""

    def __init__(self) -> None:
        self._suspects: dict[str, Callable[[], None]] = {}

    def enter(self, request_id: str, begin: Callable[[], None]) -> None:
        """Call `begin` when it is this request's turn, at once if no other suspect is here."""
        self._suspects[request_id] = begin
        if len(self._suspects) == 1:
            begin()

    def leave(self, request_id: str) -> None:
        """The request ended or was cancelled; the next one begins. Requests that are not here are ignored."""
        had_its_turn = next(iter(self._suspects), None) == request_id
        self._suspects.pop(request_id, None)
        if had_its_turn and self._suspects:
            next(iter(self._suspects.values()))()
