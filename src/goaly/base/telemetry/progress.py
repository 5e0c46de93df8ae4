"""The progress of a run: a live display on a terminal, a line a step elsewhere.

Every step and note redraws the display, without a thread or timer. If drawing fails (the terminal is gone), the display
ends with one log record, and the run continues.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from goaly.base.telemetry.settings import TelemetrySettings

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

logger = logging.getLogger(__name__)

LINE_SECONDS = 1.0
"""Minimum time between plain lines; of fast steps only some are shown."""
RECENT_STEPS = 20
"""The ETA is computed from this many last steps."""
CURVE_STEPS = 48
"""The curve shows the pass rate of this many last steps."""
BLOCKS = "▁▂▃▄▅▆▇█"
OURS = ("goaly", "apps", "__main__")


class Terminal(Console):
    """A console that raises BrokenPipeError; rich's own ends the process with SystemExit."""

    def on_broken_pipe(self) -> None:
        """Raise the current BrokenPipeError to the caller of `print`."""
        raise


@cache
def console() -> Terminal:
    """This process's console."""
    return Terminal(stderr=True, highlight=False)


class TerminalHandler(logging.Handler):
    """Prints records above the live display; of an error only one line, the traceback is in the log file."""

    def __init__(self, console: Terminal):
        super().__init__(logging.WARNING)
        self._console = console
        self.addFilter(lambda record: record.levelno >= logging.ERROR or record.name.split(".")[0] in OURS)

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        try:
            style = "red" if record.levelno >= logging.ERROR else "yellow"
            text = f"{record.levelname.lower()}: {record.getMessage()}"
            if record.exc_info and record.exc_info[1] is not None:
                error = record.exc_info[1]
                text += f" ({type(error).__name__}: {error})"
            self._console.print(Text(text, style=style), soft_wrap=True)
        except Exception:
            self.handleError(record)


class Progress:
    """Shows a run's steps, out of `steps`, and its notes."""

    def __init__(
        self,
        steps: int,
        settings: TelemetrySettings,
        *,
        terminal: Terminal | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._steps = steps
        self._clock = clock
        self._console = terminal or console()
        self._shown = settings.progress != "off"
        on_terminal = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live: Live | None = None
        if settings.progress == "live" or (settings.progress == "auto" and on_terminal):
            from rich import live

            self._live = live.Live(console=self._console, auto_refresh=False, transient=False)
        self._started = clock()
        self._finished: deque[tuple[float, int]] = deque([(self._started, 0)], maxlen=RECENT_STEPS + 1)
        self._curve: deque[float] = deque(maxlen=CURVE_STEPS)
        self._last_line = float("-inf")

    def begin(self, policy_version: int) -> None:
        """Start the clock of the ETA at this version."""
        self._finished = deque([(self._clock(), policy_version)], maxlen=RECENT_STEPS + 1)

    def step(self, policy_version: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step."""
        now = self._clock()
        self._finished.append((now, policy_version))
        if "reward/pass_rate" in metrics:
            self._curve.append(metrics["reward/pass_rate"])
        if not self._shown:
            return
        if self._live is not None:
            self._safely(self._draw, policy_version, metrics)
        elif now - self._last_line >= LINE_SECONDS or policy_version >= self._steps:
            self._last_line = now
            line = "  ".join([f"step {policy_version}/{self._steps}", *_phrases(policy_version, metrics), self._eta()])
            self._safely(self._print, line)

    def note(self, text: str) -> None:
        """Print a line once, above the display."""
        if self._shown:
            self._safely(self._print, text)

    def close(self) -> None:
        """Leave the last state on the screen and stop drawing."""
        if self._live is not None:
            live, self._live = self._live, None
            self._safely(live.stop)

    def _draw(self, policy_version: int, metrics: Mapping[str, float]) -> None:
        assert self._live is not None
        if not self._live.is_started:
            self._live.start()
            self._console.show_cursor(True)  # a hidden cursor would stay hidden after a run that is killed
        self._live.update(self._display(policy_version, metrics), refresh=True)

    def _display(self, policy_version: int, metrics: Mapping[str, float]) -> "RenderableType":
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(f"step {policy_version}/{self._steps}", style="bold"),
            ProgressBar(total=self._steps, completed=policy_version, width=32),
            Text(f"{duration(self._clock() - self._started)} passed", style="dim"),
            Text(self._eta(), style="cyan"),
        )
        facts = Table.grid(padding=(0, 3))
        phrases = _phrases(policy_version, metrics)
        columns = (len(phrases) + 1) // 2
        for row in (phrases[:columns], phrases[columns:]):
            facts.add_row(*row, *[""] * (columns - len(row)))
        curve = Text.assemble(("pass rate ", "dim"), (sparkline(self._curve), "green"))
        return Group(head, facts, *([curve] if self._curve else []))

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def _eta(self) -> str:
        (first, first_version), (last, last_version) = self._finished[0], self._finished[-1]
        done = last_version - first_version
        left = max(self._steps - last_version, 0)
        return f"ETA {duration((last - first) / done * left)}" if done > 0 else "ETA ?"

    def _safely(self, show: Callable[..., object], *args: Any) -> None:
        try:
            show(*args)
        except Exception as error:
            live, self._live, self._shown = self._live, None, False
            with suppress(Exception):
                if live is not None:
                    live.stop()  # gives stdout and stderr back
            logger.warning("progress is not shown any more: %s: %s", type(error).__name__, error)


def _phrases(policy_version: int, metrics: Mapping[str, float]) -> list[str]:
    """A step's metrics as short texts, in the order of the display; missing metrics are left out."""
    number = metrics.get
    phrases = [
        f"reward {number('reward/mean', 0):.3f}" if "reward/mean" in metrics else "",
        f"pass {number('reward/pass_rate', 0):.1%}" if "reward/pass_rate" in metrics else "",
        f"loss {number('loss', 0):.4f}" if "loss" in metrics else "",
        f"{number('step/seconds', 0):.2f} s/step" if "step/seconds" in metrics else "",
        f"{short(number('step/tokens_per_second', 0))} tokens/s" if "step/tokens_per_second" in metrics else "",
        f"staleness {number('age/mean', 0):.1f} (max {number('age/max', 0):.0f})" if "age/mean" in metrics else "",
        f"queue {number('backlog/queued', 0):.0f}" if "backlog/queued" in metrics else "",
        f"running {number('backlog/running', 0):.0f}" if "backlog/running" in metrics else "",
    ]
    if "generator/version" in metrics:
        phrases += [f"trainer v{policy_version}", f"generators v{metrics['generator/version']:.0f}"]
    return [phrase for phrase in phrases if phrase]


def duration(seconds: float) -> str:
    """`m:ss`, or `h:mm:ss`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def short(number: float) -> str:
    """A count in at most five characters, such as `812`, `12.3k`, `4.56M`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def sparkline(rates: "deque[float] | list[float]") -> str:
    """Rates between 0 and 1 as a row of blocks."""
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[min(max(round(rate * top), 0), top)] if rate == rate else " " for rate in rates)
