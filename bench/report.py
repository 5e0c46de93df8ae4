"""The parts that benchmarks share: options, the machine, the file of finished runs, intervals, and result files."""

import argparse
import json
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from goaly.base.atomic_files import open_lines
from goaly.base.json_text import read_lines

T = TypeVar("T")

PROBE_SECONDS = 0.3
PROBE_SIDE = 192
T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Student's 97.5 % quantile for 1, 2, ... degrees of freedom; the last one serves all above."""


def options(doc: str | None, *files: str, **defaults: float | str | Path) -> argparse.ArgumentParser:
    """A parser of these files to write, and of options by their defaults, whose types they take."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    for name in files:
        parser.add_argument(f"--{name}", type=Path, help="write this file of the results")
    return parser


def write(file: Path | None, content: Any, *, indent: int | None = 1) -> None:
    """Write a page of text, or anything else as JSON, where a file was asked for."""
    if file is not None:
        file.write_text(content if isinstance(content, str) else json.dumps(content, indent=indent) + "\n")


def page(name: str, title: str, *parts: str) -> str:
    """The page of a benchmark's results: its title, its command, and these paragraphs and tables."""
    files = f"--json docs/results/{name}.json --markdown docs/results/{name}.md"
    return "\n\n".join([f"# {title}", f"    python -m bench.{name} {files}", *parts]) + "\n"


def markdown_table(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown."""
    lines = ["|" + "".join(f" {cell} |" if cell != "" else " |" for cell in row) for row in (columns, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(columns)}", *lines[1:]])


def show(numbers: Mapping[str, object], title: str = "") -> None:
    """Print the numbers, a line each."""
    shown = Table("", "value", title=title)
    for name, value in numbers.items():
        shown.add_row(name, f"{value:,.3f}" if isinstance(value, float) else f"{value:,}")
    Console().print(shown)


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


def digest(described: Mapping[str, Any]) -> str:
    """A name of these settings: other settings have another one."""
    return sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def finished(file: Path, kind: type[T]) -> list[T]:
    """The runs that the file holds, in the order in which they finished."""
    return [kind(**record) for record in read_lines(file)] if file.exists() else []


def append(file: Path, run: Any) -> None:
    """Add a finished run."""
    with os.fdopen(open_lines(file), "ab") as out:
        out.write(json.dumps(asdict(run)).encode() + b"\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean, and how far to either side its 95 % interval reaches."""

    mean: float
    half_width: float | None
    """None where there is one value only: it says nothing about the spread."""
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        """The interval of the mean that these independent values are draws around."""
        mean = statistics.fmean(values)
        if len(values) < 2:
            return cls(mean=mean, half_width=None, count=len(values))
        quantile = T_975[min(len(values) - 1, len(T_975)) - 1]
        half_width = quantile * statistics.stdev(values) / math.sqrt(len(values))
        return cls(mean=mean, half_width=half_width, count=len(values))

    @property
    def holds_zero(self) -> bool:
        """Whether 0 lies within; one value alone excludes nothing."""
        return self.half_width is None or abs(self.mean) <= self.half_width

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if self.half_width is None else f"{self.mean:.3f} ± {self.half_width:.3f}"
