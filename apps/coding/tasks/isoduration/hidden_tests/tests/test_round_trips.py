import random
from calendar import monthrange
from datetime import date, datetime
from fractions import Fraction

import pytest

from isoduration import Duration, DurationError, parse


def test_texts_stay_as_they_are():
    for text in (
        "PT2.25S",
        "PT0.000001S",
        "P1DT0.5S",
        "-PT45M",
        "-P1Y2M3DT4H5M6.7S",
        "-P2M",
        "-PT0.5S",
        "PT59M59.999999S",
        "P11M",
    ):
        assert str(parse(text)) == text


def test_needless_zeros_are_dropped():
    assert str(parse("PT1.500S")) == "PT1.5S"
    assert str(parse("PT7.000000S")) == "PT7S"
    assert str(parse("PT0.000S")) == "PT0S"
    assert str(parse("-PT0S")) == "PT0S"
    assert str(parse("-PT90M")) == "-PT1H30M"
    assert str(parse("PT100.10S")) == "PT1M40.1S"


def test_a_comma_is_a_dot():
    assert parse("PT0,125S") == Duration(0, Fraction(1, 8))
    assert str(parse("-PT10,50S")) == "-PT10.5S"
    for text in ("PT1,S", "PT,5S", "PT1,1234567S", "P1,5D", "PT1.0,5S"):
        with pytest.raises(DurationError):
            parse(text)


def test_random_durations_are_read_back():
    source = random.Random(14)
    for _ in range(1000):
        seconds = Fraction(source.randrange(10 ** source.randint(1, 13)), 1_000_000) * source.randrange(2)
        duration = Duration(source.randrange(40) * source.randrange(2), seconds)
        for one in (duration, -duration):
            assert parse(str(one)) == one
        assert not str(duration).startswith("-")


def test_december():
    assert parse("P1M").add_to(date(2023, 11, 30)) == date(2023, 12, 30)
    assert parse("P1Y").add_to(date(2023, 12, 31)) == date(2024, 12, 31)
    assert parse("P3Y12M").add_to(datetime(2020, 12, 1, 8, 30)) == datetime(2024, 12, 1, 8, 30)
    assert parse("-P1M").add_to(date(2024, 1, 31)) == date(2023, 12, 31)


def test_negative_months_keep_to_the_end_of_the_month():
    assert parse("-P1M").add_to(date(2023, 3, 31)) == date(2023, 2, 28)
    assert parse("-P13M").add_to(date(2024, 1, 30)) == date(2022, 12, 30)


def test_every_month_from_every_month():
    for months in range(-30, 31):
        for month in range(1, 13):
            index = 2020 * 12 + month - 1 + months
            expected = date(index // 12, index % 12 + 1, min(31, monthrange(index // 12, index % 12 + 1)[1]))
            start = date(2020, month, monthrange(2020, month)[1])
            assert Duration(months).add_to(start) == expected.replace(day=min(start.day, expected.day))


def test_fractions_are_added():
    assert parse("-PT0.5S").add_to(datetime(2024, 1, 1)) == datetime(2023, 12, 31, 23, 59, 59, 500_000)
