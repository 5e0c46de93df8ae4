"""The machine that a benchmark ran on, and how busy it was: absolute times mean little without it."""

import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PROBE_SECONDS = 0.3
PROBE_SIDE = 192


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The state of the machine at one moment."""

    cores: int
    """Cores that this process may use."""
    load_1m: float
    """The kernel's load average over the last minute."""
    busy_cores: float
    """Cores that others used while the probe below ran."""
    gflops: float
    """Speed of one core on small float32 matrix products: half of the usual number means a shared or throttled core."""

    _at: float = field(default_factory=time.monotonic, repr=False)
    _stolen: float = field(default_factory=lambda: _stolen_seconds(), repr=False)

    @classmethod
    def now(cls) -> "Machine":
        """Measure for a third of a second; call it while the benchmark itself does nothing."""
        busy_before, own_before, began = _busy_seconds(), time.process_time(), time.monotonic()
        gflops = _gflops(PROBE_SECONDS)
        busy = _busy_seconds() - busy_before - (time.process_time() - own_before)
        return cls(
            cores=len(os.sched_getaffinity(0)),
            load_1m=os.getloadavg()[0],
            busy_cores=max(0.0, busy / (time.monotonic() - began)),
            gflops=gflops,
        )

    def __str__(self) -> str:
        return (
            f"{self.cores} cores, load {self.load_1m:.2f}, {self.busy_cores:.2f} of them busy with other work, "
            f"{self.gflops:.1f} GFLOP/s a core"
        )

    def record(self) -> dict[str, Any]:
        """Its numbers for a result file, with the cores that its host gave to others from that moment on."""
        seconds = max(time.monotonic() - self._at, 1e-9)
        numbers = {key: value for key, value in asdict(self).items() if not key.startswith("_")}
        return {**numbers, "stolen_cores": round((_stolen_seconds() - self._stolen) / seconds, 3)}


def _busy_seconds() -> float:
    """Seconds that all cores together have worked since the boot, time stolen by the host included."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = _times()
    return user + nice + system + irq + softirq + steal


def _stolen_seconds() -> float:
    """Seconds of all cores since the boot in which there was work and the host ran something else."""
    return _times()[7]


def _times() -> list[float]:
    ticks = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    return [int(count) / os.sysconf("SC_CLK_TCK") for count in ticks]


def _gflops(seconds: float) -> float:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a, b = torch.ones(2, PROBE_SIDE, PROBE_SIDE).unbind()
        a @ b  # the first product prepares the library
        products, began = 0, time.monotonic()
        while (spent := time.monotonic() - began) < seconds:
            a @ b
            products += 1
        return products * 2 * PROBE_SIDE**3 / spent / 1e9
    finally:
        torch.set_num_threads(threads)


def exit_on_terminate() -> None:
    """Turn SIGTERM into an ordinary exit, so that a benchmark that is stopped also stops the processes it started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
