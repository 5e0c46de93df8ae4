"""An event loop that stalls on request, for tests of those that count silence in the loop's own ticks."""

import asyncio

import pytest


class Stalls:
    """Makes the running event loop find, at its next turn, that so many seconds have passed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        loop = asyncio.get_running_loop()
        real_time = loop.time
        self._passed = 0.0
        monkeypatch.setattr(loop, "time", lambda: real_time() + self._passed)

    def stall(self, seconds: float) -> None:
        """Every timer within this time is due, but no callback has run meanwhile."""
        self._passed += seconds

    async def tick(self, seconds: float) -> None:
        """Let one tick of this length pass, and run what is ready then."""
        self.stall(seconds)
        for _ in range(20):
            await asyncio.sleep(0)
