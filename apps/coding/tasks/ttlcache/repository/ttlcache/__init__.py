"""A cache with a size and a time to live."""

from ttlcache.cache import Cache
from ttlcache.functions import cached

__all__ = ["Cache", "cached"]
