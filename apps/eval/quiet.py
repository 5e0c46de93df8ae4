"""Keeps an engine's chatter out of sight while it starts."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hushed() -> Iterator[None]:
    """Hold back what is written to stderr, by native code too; show it if the block fails."""
    with tempfile.TemporaryFile() as held:
        sys.stderr.flush()
        terminal = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(terminal, held.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)
