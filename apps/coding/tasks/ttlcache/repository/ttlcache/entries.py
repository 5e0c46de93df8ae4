"""The entries in the order of their last use."""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass
class Entry:
    """A value, and when it expires."""

    value: object
    expires_at: float


class Entries:
    """Entries by key; the least recently used one is first."""

    def __init__(self):
        self._by_key = OrderedDict()

    def __len__(self):
        return len(self._by_key)

    def put(self, key, entry):
        """Add or replace an entry, as the most recently used one."""
        self._by_key[key] = entry
        self._by_key.move_to_end(key)

    def live(self, key, now):
        """The entry of a key; None if there is none, or none that has not expired."""
        entry = self._by_key.get(key)
        if entry is not None and entry.expires_at <= now:
            del self._by_key[key]
            return None
        return entry

    def use(self, key):
        """Make the key the most recently used one."""
        self._by_key.move_to_end(key)

    def drop(self, key):
        """Remove a key if it is there."""
        self._by_key.pop(key, None)

    def make_room(self, now):
        """Remove one entry."""
        self._by_key.popitem(last=False)

    def keys(self, now):
        """The keys of entries that have not expired."""
        return [key for key, entry in self._by_key.items() if entry.expires_at > now]
