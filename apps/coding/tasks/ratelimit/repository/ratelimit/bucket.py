"""One token bucket. It starts full."""


class Bucket:
    """Holds tokens, of which `rate` a second are added."""

    def __init__(self, rate, burst, now):
        if rate <= 0 or burst < 1:
            raise ValueError(f"rate must be above 0 and burst at least 1, not {rate} and {burst}")
        self.rate = rate
        self.burst = burst
        self.tokens = float(burst)
        self.filled_at = now

    def refill(self, now):
        """Add the tokens of the time since the last call."""
        passed = max(0.0, now - self.filled_at)
        self.tokens = self.tokens + passed * self.rate
        self.filled_at = now

    def take(self, now, count=1):
        """Take `count` tokens if there are enough, and say whether."""
        self.refill(now)
        if self.tokens < count:
            return False
        self.tokens -= count
        return True

    def wait(self, now, count=1):
        """Seconds until `count` tokens are there."""
        if count > self.burst:
            raise ValueError(f"{count} tokens never fit in a bucket of {self.burst}")
        self.refill(now)
        return max(0.0, (count - self.tokens) / self.rate)

    def is_full(self, now):
        """Whether nothing would be lost by starting anew."""
        self.refill(now)
        return self.tokens >= self.burst
