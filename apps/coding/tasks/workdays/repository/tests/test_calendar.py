from datetime import date

import pytest

from workdays import Calendar, Fixed, NthWeekday


@pytest.fixture
def office():
    return Calendar(
        [
            Fixed("New Year", 1, 1, observed=True),
            Fixed("Leap", 2, 29),
            NthWeekday("Thanks", 11, 3, 4),
            NthWeekday("May", 5, 0, -1),
        ]
    )


def test_holidays_of_a_year(office):
    assert office.holidays(2024) == {
        date(2024, 1, 1): "New Year",
        date(2024, 2, 29): "Leap",
        date(2024, 11, 28): "Thanks",
        date(2024, 5, 27): "May",
    }
    assert date(2023, 1, 2) in office.holidays(2023)


def test_days_on_and_off(office):
    assert office.is_workday(date(2024, 5, 3))
    assert not office.is_workday(date(2024, 5, 4))
    assert not office.is_workday(date(2024, 11, 28))


def test_adding(office):
    assert office.add(date(2024, 5, 3), 1) == date(2024, 5, 6)
    assert office.add(date(2024, 11, 27), 2) == date(2024, 12, 2)
    assert office.add(date(2024, 5, 4), 0) == date(2024, 5, 6)
    assert office.add(date(2024, 5, 8), -2) == date(2024, 5, 6)


def test_counting(office):
    assert office.count(date(2024, 5, 3), date(2024, 5, 7)) == 2
    assert office.count(date(2024, 5, 3), date(2024, 5, 3)) == 0
