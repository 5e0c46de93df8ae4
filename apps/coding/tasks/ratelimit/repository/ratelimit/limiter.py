"""A bucket for each client."""

import time

from ratelimit.bucket import Bucket


class Limiter:
    """Limits each client to `rate` requests a second, and `burst` at once."""

    def __init__(self, rate, burst, clock=time.monotonic):
        self.rate = rate
        self.burst = burst
        self.clock = clock
        self.buckets = {}

    def _bucket(self, client):
        if client not in self.buckets:
            self.buckets[client] = Bucket(self.rate, self.burst, self.clock())
        return self.buckets[client]

    def allow(self, client, cost=1):
        """Whether the client may send a request of this cost now; if so, it is counted."""
        return self._bucket(client).take(self.clock(), cost)

    def wait(self, client, cost=1):
        """Seconds until `allow` would say yes."""
        return self._bucket(client).wait(self.clock(), cost)

    def remaining(self, client):
        """How many requests of cost 1 the client may send now."""
        bucket = self._bucket(client)
        bucket.refill(self.clock())
        return int(bucket.tokens)

    def sweep(self):
        """Forget the clients whose buckets are full; return how many."""
        full = [client for client, bucket in self.buckets.items() if bucket.is_full(self.clock())]
        for client in full:
            del self.buckets[client]
        return len(full)
