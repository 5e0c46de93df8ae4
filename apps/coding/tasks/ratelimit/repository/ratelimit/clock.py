"""A clock that tests move by hand. Any callable that returns seconds is a clock."""


class ManualClock:
    """Seconds that pass only in `advance`."""

    def __init__(self, now=0.0):
        self.now = now

    def __call__(self):
        return self.now

    def advance(self, seconds):
        """Let time pass."""
        if seconds < 0:
            raise ValueError("time does not go backwards")
        self.now += seconds
