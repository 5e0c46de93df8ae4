"""How a process begins and ends."""

import subprocess
import sys


def test_leaving_runs_exit_handlers_keeps_the_output_and_the_code_and_waits_for_nothing_else() -> None:
    script = (
        "import atexit, threading\n"
        "from goaly.process import leave\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "atexit.register(print, 'handled')\n"
        "print('said', end=' ')\n"
        "leave(3)\n"
    )
    left = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=20, check=False)
    assert (left.returncode, left.stdout) == (3, "said handled\n")


def test_what_is_imported_ahead_is_never_looked_at_by_the_collector_and_what_is_missing_is_left_out() -> None:
    script = (
        "import gc, sys\n"
        "from goaly.process import import_ahead\n"
        "before = gc.get_freeze_count()\n"
        "import_ahead(['goaly.no_such_module', 'fractions'])\n"
        "assert 'fractions' in sys.modules and gc.isenabled() and gc.get_freeze_count() > before\n"
    )
    subprocess.run([sys.executable, "-c", script], timeout=20, check=True)
