"""A program that tests run as forks: it says what it was given, and ends as its environment says."""

import json
import os
import signal
import sys
import threading

ENDS = {
    "normally": lambda: None,
    "with a code": lambda: sys.exit(3),
    "with a message": lambda: sys.exit("it failed"),
    "with an error": lambda: {}[0],
    "by a signal": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "never": threading.Event().wait,
}

if __name__ == "__main__":
    found = {
        "pid": os.getpid(),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "cores": sorted(os.sched_getaffinity(0)),
        "imported": sorted(sys.modules),
        "signals": [signal.getsignal(number) == signal.SIG_DFL for number in (signal.SIGINT, signal.SIGTERM)],
        "files": sorted(map(int, os.listdir("/proc/self/fd"))),
    }
    print(json.dumps(found), flush=True)
    ENDS[os.environ["ENDS"]]()
