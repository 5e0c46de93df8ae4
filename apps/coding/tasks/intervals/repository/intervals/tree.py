"""The collection of intervals."""

from intervals import node


class IntervalTree:
    """Intervals with values."""

    def __init__(self):
        self._root = None
        self._size = 0

    def add(self, start, end, value=None):
        """Add an interval."""
        if not start < end:
            raise ValueError(f"an interval ends after its start, not {start!r} to {end!r}")
        self._root = node.insert(self._root, start, end, value)
        self._size += 1

    def remove(self, start, end, value=None):
        """Remove an interval with this value."""
        self._root = node.remove(self._root, start, end, value)
        self._size -= 1

    def at(self, point):
        """The intervals that contain a point."""
        return _triples(node.containing(self._root, point))

    def overlapping(self, start, end):
        """The intervals that share a point with the one from start to end."""
        if not start < end:
            raise ValueError(f"an interval ends after its start, not {start!r} to {end!r}")
        return _triples(node.overlapping(self._root, start, end))

    def free(self, start, end):
        """The gaps between intervals from start to end, as pairs."""
        gaps = []
        for busy_start, busy_end, _ in self.overlapping(start, end):
            if start < busy_start:
                gaps.append((start, busy_start))
            if start < busy_end:
                start = busy_end
        return [*gaps, (start, end)] if start < end else gaps

    def __iter__(self):
        return _triples(node.in_order(self._root))

    def __len__(self):
        return self._size


def _triples(nodes):
    for one in nodes:
        for value in one.values:
            yield one.start, one.end, value
