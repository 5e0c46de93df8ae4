"""The choice of a replica for a session that has none: the least loaded one, and in turn among equals. Pure."""

from collections.abc import Sequence


def least_loaded(loads: Sequence[int], turn: int) -> int:
    """The index of the replica with the fewest requests; of several, the first from number `turn` on."""
    count = len(loads)
    return min(range(count), key=lambda index: (loads[index], (index - turn) % count))
