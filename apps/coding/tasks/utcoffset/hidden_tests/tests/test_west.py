from datetime import timedelta

from utcoffset import convert, format_offset, parse_offset, to_utc


def test_west_with_minutes_in_every_form():
    for text in ("-02:15", "-0215", "-2:15", "UTC-2:15", "GMT-02:15", "\u221202:15"):
        assert parse_offset(text) == -timedelta(hours=2, minutes=15), text


def test_less_than_an_hour_west():
    assert parse_offset("-00:45") == -timedelta(minutes=45)
    assert parse_offset("-00:00") == timedelta(0)


def test_seconds_west():
    assert parse_offset("-04:56:02") == -timedelta(hours=4, minutes=56, seconds=2)
    assert parse_offset("-00:00:25") == -timedelta(seconds=25)


def test_every_offset_is_read_back():
    for seconds in range(-86_399, 86_400, 97):
        offset = timedelta(seconds=seconds)
        assert parse_offset(format_offset(offset)) == offset


def test_times_in_the_west():
    assert to_utc("2024-06-01T20:40-09:30").isoformat() == "2024-06-02T06:10:00+00:00"
    assert convert("2024-06-01T12:00Z", "-0330").isoformat() == "2024-06-01T08:30:00-03:30"


def test_east_and_whole_hours_are_as_before():
    assert parse_offset("+12:45") == timedelta(hours=12, minutes=45)
    assert parse_offset("-11") == -timedelta(hours=11)
