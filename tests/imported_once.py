"""What processes of tests have in common: multiprocessing's fork server imports it once, and they are its forks."""

from goaly.process import import_ahead
from goaly.run.fork_server import FORKED

import_ahead(module for modules in FORKED.values() for module in modules)
