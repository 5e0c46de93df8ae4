"""Progress: a display where there is a terminal, lines where there is none, nothing that could hurt the run."""

import io
import logging
import sys

import pytest

from goaly.base.telemetry.progress import Progress, Terminal, duration, short, sparkline
from goaly.base.telemetry.settings import TelemetrySettings

METRICS = {
    "reward/mean": 0.5,
    "reward/pass_rate": 0.4375,
    "step/seconds": 0.82,
    "step/tokens_per_second": 12_345.0,
    "age/mean": 1.25,
    "age/max": 3.0,
    "backlog/queued": 12.0,
    "backlog/running": 32.0,
    "generator/version": 9.0,
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def screen(*, terminal: bool) -> Terminal:
    return Terminal(file=io.StringIO(), force_terminal=terminal, width=110, highlight=False, _environ={"TERM": "xterm"})


def shown(console: Terminal) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_plain_line_says_everything_about_a_step():
    clock, console = Clock(), screen(terminal=False)
    progress = Progress(150, TelemetrySettings(), terminal=console, clock=clock)
    clock.now = 8.0
    progress.step(10, METRICS)
    assert shown(console) == (
        "step 10/150  reward 0.500  pass 43.8%  0.82 s/step  12.3k tokens/s  staleness 1.2 (max 3)  "
        "queue 12  running 32  trainer v10  generators v9  ETA 1:52\n"
    )


def test_the_eta_of_a_run_that_goes_on_counts_its_own_steps_only():
    clock, console = Clock(), screen(terminal=False)
    progress = Progress(150, TelemetrySettings(), terminal=console, clock=clock)
    clock.now = 3.0
    progress.begin(100)
    clock.now = 11.0
    progress.step(110, METRICS)
    assert shown(console).endswith("ETA 0:32\n")


def test_plain_lines_keep_a_second_apart_but_the_last_step_is_always_shown():
    clock, console = Clock(), screen(terminal=False)
    progress = Progress(5, TelemetrySettings(), terminal=console, clock=clock)
    for version in range(1, 6):
        clock.now += 0.4
        progress.step(version, {})
    assert [line.split("  ")[0] for line in shown(console).splitlines()] == ["step 1/5", "step 4/5", "step 5/5"]


def test_the_eta_follows_recent_steps_not_the_start():
    clock, console = Clock(), screen(terminal=False)
    progress = Progress(200, TelemetrySettings(), terminal=console, clock=clock)
    clock.now = 60.0
    for version in range(1, 101):
        clock.now += 1.0
        progress.step(version, {})
    assert shown(console).splitlines()[-1].endswith("ETA 1:40")


def test_the_live_display_shows_the_step_with_what_was_measured_and_the_curve():
    clock, console = Clock(), screen(terminal=True)
    progress = Progress(150, TelemetrySettings(), terminal=console, clock=clock)
    clock.now = 8.0
    progress.step(10, METRICS)
    progress.note("held-out pass@1: 0.47")
    progress.close()
    text = shown(console)
    for piece in ("step 10/150", "━", "ETA 1:52", "pass 43.8%", "staleness 1.2 (max 3)", "generators v9", "▄"):
        assert piece in text
    assert "held-out pass@1: 0.47" in text
    assert text.rindex("\x1b[?25h") > text.rfind("\x1b[?25l")  # the cursor is there again


@pytest.mark.parametrize(
    ("choice", "terminal", "live"), [("auto", False, False), ("plain", True, False), ("live", True, True)]
)
def test_the_setting_decides_and_auto_asks_the_terminal(choice, terminal: bool, live: bool):
    console = screen(terminal=terminal)
    progress = Progress(5, TelemetrySettings(progress=choice), terminal=console)
    progress.step(1, METRICS)
    progress.close()
    assert ("━" in shown(console)) == live


def test_off_shows_nothing():
    console = screen(terminal=True)
    progress = Progress(5, TelemetrySettings(progress="off"), terminal=console)
    progress.step(1, METRICS)
    progress.note("x")
    progress.close()
    assert shown(console) == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_that_is_gone_ends_the_display_not_the_run(terminal: bool, caplog: pytest.LogCaptureFixture):
    class Fragile(io.StringIO):
        gone = False

        def write(self, text: str) -> int:
            if self.gone:
                raise BrokenPipeError
            return super().write(text)

    streams = sys.stdout, sys.stderr
    screen_file = Fragile()
    console = Terminal(file=screen_file, force_terminal=terminal, _environ={"TERM": "xterm"})
    progress = Progress(5, TelemetrySettings(), terminal=console)
    progress.step(1, METRICS)
    screen_file.gone = True
    with caplog.at_level(logging.WARNING):
        for version in range(2, 6):
            progress.step(version, METRICS)
            progress.note("x")
        progress.close()
    assert (sys.stdout, sys.stderr) == streams
    assert [record.getMessage() for record in caplog.records] == ["progress is not shown any more: BrokenPipeError: "]


def test_numbers_are_short_and_times_are_clocks():
    assert [short(number) for number in (7, 812, 12_345, 4_560_000)] == ["7", "812", "12.3k", "4.56M"]
    assert [duration(seconds) for seconds in (0, 59.6, 3_725)] == ["0:00", "1:00", "1:02:05"]
    assert sparkline([0.0, 0.5, 1.0, float("nan"), 2.0]) == "▁▅█ █"
