from datetime import timedelta

import pytest

from utcoffset import OffsetError, convert, format_offset, parse_offset, to_utc


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("Z", 0), ("utc", 0), ("+05:30", 330), ("+0545", 345), ("UTC+5:30", 330), ("-08", -480), ("GMT-3", -180)],
)
def test_offsets(text, minutes):
    assert parse_offset(text) == timedelta(minutes=minutes)


def test_a_unicode_minus_sign():
    assert parse_offset("\u22123:00") == timedelta(hours=-3)


@pytest.mark.parametrize("text", ["", "5", "+24:00", "+05:60", "+1:2", "EST"])
def test_what_is_no_offset(text):
    with pytest.raises(OffsetError):
        parse_offset(text)


def test_format():
    assert format_offset(timedelta(hours=-3, minutes=-30)) == "-03:30"
    assert format_offset(timedelta(hours=1, seconds=5)) == "+01:00:05"
    with pytest.raises(OffsetError):
        format_offset(timedelta(days=1))


def test_times():
    assert to_utc("2024-01-15T09:00+01:00").isoformat() == "2024-01-15T08:00:00+00:00"
    assert to_utc("2024-01-15 09:00", default="-05:00").hour == 14
    assert convert("2024-01-15T09:00Z", "+0900").isoformat() == "2024-01-15T18:00:00+09:00"
    with pytest.raises(OffsetError):
        to_utc("2024-01-15 09:00")
