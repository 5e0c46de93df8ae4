from datetime import datetime

import pytest

from cron import CronError, Schedule

FRIDAY = datetime(2024, 5, 3, 9, 40)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("* * * * *", datetime(2024, 5, 3, 9, 41)),
        ("*/20 8-9 * * mon-fri", datetime(2024, 5, 6, 8, 0)),
        ("40 9 * * *", datetime(2024, 5, 4, 9, 40)),
        ("0 0 1 jan *", datetime(2025, 1, 1)),
        ("0 0 29 2 *", datetime(2028, 2, 29)),
        ("10-30/10,45 9 * * 6", datetime(2024, 5, 4, 9, 10)),
    ],
)
def test_next(line, expected):
    assert Schedule(line).next(FRIDAY) == expected


def test_what_never_comes():
    assert Schedule("0 0 30 2 *").next(FRIDAY) is None


def test_upcoming():
    assert [moment.day for moment in Schedule("0 12 */10 * *").upcoming(FRIDAY, 3)] == [11, 21, 31]


@pytest.mark.parametrize(
    "line",
    ["* * * *", "60 * * * *", "* * 0 * *", "5-1 * * * *", "*/0 * * * *", "3/2 * * * *", "* * * foo *", "* * * * 8"],
)
def test_errors(line):
    with pytest.raises(CronError):
        Schedule(line)
