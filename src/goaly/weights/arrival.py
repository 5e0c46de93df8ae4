"""How the staging of a version ends, told by an event loop to a thread that copies what is there of it already."""

import threading


class Arrival:
    """A version that is being fetched."""

    def __init__(self, *, whole: bool | None):
        self.whole = whole
        """True once it is committed, False once it was given up; None before."""
        self._over = threading.Event()
        if whole is not None:
            self._over.set()

    def tell(self, whole: bool) -> None:
        """It is committed, or it never will be."""
        self.whole = whole
        self._over.set()

    def stop(self) -> None:
        """Whoever waits for it shall not; without effect on a version that is known to be whole."""
        if self.whole is None:
            self.tell(False)

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until told; False if it was given up."""
        self._over.wait(seconds)
        return self.whole is not False

    def until_told(self) -> bool:
        """Wait until told; whether it is whole."""
        self._over.wait()  # `tell` by the store's answer, `stop` by a cancelled caller
        return self.whole is True
