"""The cache."""

import time
from dataclasses import dataclass

from ttlcache.entries import Entries, Entry


@dataclass
class Stats:
    """What happened so far."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0


class Cache:
    """Holds at most `size` values, each for `ttl` seconds."""

    def __init__(self, size, ttl, clock=time.monotonic):
        if size < 1 or ttl <= 0:
            raise ValueError(f"size must be at least 1 and ttl above 0, not {size} and {ttl}")
        self.size = size
        self.ttl = ttl
        self.clock = clock
        self.stats = Stats()
        self._entries = Entries()

    def set(self, key, value, ttl=None):
        """Keep a value; its time to live starts now."""
        now = self.clock()
        if len(self._entries) >= self.size:
            self._entries.make_room(now)
            self.stats.evictions += 1
        self._entries.put(key, Entry(value, now + (self.ttl if ttl is None else ttl)))

    def get(self, key, default=None):
        """The value of a key, or the default."""
        entry = self._entries.live(key, self.clock())
        if entry is None:
            self.stats.misses += 1
            return default
        self.stats.hits += 1
        self._entries.use(key)
        return entry.value

    def get_many(self, keys):
        """The values of those keys that are there, by key."""
        now = self.clock()
        found = {}
        for key in keys:
            if (entry := self._entries.live(key, now)) is not None:
                found[key] = entry.value
        return found

    def delete(self, key):
        """Forget a key."""
        self._entries.drop(key)

    def __contains__(self, key):
        """Whether the key is there; this is no use of it."""
        return self._entries.live(key, self.clock()) is not None

    def keys(self):
        """The keys that have not expired, the least recently used one first."""
        return self._entries.keys(self.clock())
