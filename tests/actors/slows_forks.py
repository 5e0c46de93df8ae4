"""A module that makes each later fork of its process wait, before it runs, while another process locks a file."""

import fcntl
import os


def _wait() -> None:
    with open(os.environ["HOLDS_FORKS"], "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)


os.register_at_fork(after_in_child=_wait)
