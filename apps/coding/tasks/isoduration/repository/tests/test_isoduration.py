from datetime import date, datetime
from fractions import Fraction

import pytest

from isoduration import Duration, DurationError, parse


def test_parsing():
    assert parse("P1Y2M3DT4H") == Duration(14, 3 * 86_400 + 4 * 3600)
    assert parse("P2W") == Duration(0, 14 * 86_400)
    assert parse("-P1M") == Duration(-1)
    assert parse("PT0.25S") == Duration(0, Fraction(1, 4))


@pytest.mark.parametrize("text", ["", "P", "PT", "P1DT", "1D", "P1H", "P1.5D", "PT1.S", "P1M1Y", "PT1.1234567S"])
def test_what_is_no_duration(text):
    with pytest.raises(DurationError):
        parse(text)


def test_writing():
    assert str(Duration(14, 90)) == "P1Y2MT1M30S"
    assert str(Duration()) == "PT0S"
    assert str(parse("P1W")) == "P7D"


def test_adding():
    assert parse("P1M").add_to(date(2024, 1, 31)) == date(2024, 2, 29)
    assert parse("P1Y1DT1H").add_to(datetime(2024, 2, 29, 23)) == datetime(2025, 3, 2)
    assert parse("-P1D").add_to(date(2024, 3, 1)) == date(2024, 2, 29)
    with pytest.raises(ValueError, match="parts of a day"):
        parse("PT1H").add_to(date(2024, 1, 1))


def test_signs_do_not_differ():
    with pytest.raises(ValueError, match="same sign"):
        Duration(1, -1)
