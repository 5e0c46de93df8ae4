"""What processes of tests have in common: multiprocessing's fork server imports it once, and they are its forks."""

import os

from goaly.base.process import import_ahead
from goaly.run.fork_server import FORKED

_before = dict(os.environ)
import_ahead(module for modules in FORKED.values() for module in modules)
SET = dict(os.environ.items() - _before.items())
"""The environment variables that imports have set."""
