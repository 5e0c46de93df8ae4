import random
from datetime import date, timedelta

from workdays import Calendar, Fixed, NthWeekday

DAY = timedelta(days=1)
OFFICE = Calendar(
    [Fixed("New Year", 1, 1, observed=True), Fixed("Eve", 12, 31, observed=True), NthWeekday("Thanks", 11, 3, 4)]
)


def one_by_one(calendar, day, n):
    """Walk day by day and count the working days."""
    step = DAY if n > 0 else -DAY
    while n:
        day += step
        if calendar.is_workday(day):
            n -= 1 if n > 0 else -1
    return day


def test_going_back():
    assert OFFICE.add(date(2024, 6, 10), -1) == date(2024, 6, 7)
    assert OFFICE.add(date(2024, 11, 29), -1) == date(2024, 11, 27)
    assert OFFICE.add(date(2024, 6, 10), -6) == date(2024, 5, 31)


def test_from_a_day_off():
    assert OFFICE.add(date(2024, 6, 8), 1) == date(2024, 6, 10)
    assert OFFICE.add(date(2024, 6, 9), -1) == date(2024, 6, 7)
    assert OFFICE.add(date(2024, 11, 28), 1) == date(2024, 11, 29)
    assert OFFICE.add(date(2024, 11, 28), -1) == date(2024, 11, 27)
    assert OFFICE.add(date(2024, 6, 8), 0) == date(2024, 6, 10)


def test_days_that_are_observed_in_another_year():
    assert not OFFICE.is_workday(date(2010, 12, 31))
    first = Calendar([Fixed("First", 1, 1, observed=True)])
    assert not first.is_workday(date(2010, 12, 31))
    assert first.holidays(2010) == {date(2010, 1, 1): "First", date(2010, 12, 31): "First"}
    assert first.holidays(2011) == {}
    last = Calendar([Fixed("Last", 12, 31, observed=True)])
    assert not last.is_workday(date(2018, 1, 1))
    assert last.holidays(2017) == {}
    assert last.is_workday(date(2017, 12, 29))


def test_only_if_observed():
    plain = Calendar([Fixed("First", 1, 1)])
    assert plain.is_workday(date(2010, 12, 31))
    assert plain.holidays(2011) == {date(2011, 1, 1): "First"}


def test_random_days_as_one_by_one():
    source = random.Random(10)
    for _ in range(400):
        day, n = date(2009, 12, 1) + source.randrange(5000) * DAY, source.choice([-7, -3, -2, -1, 1, 2, 3, 7])
        assert OFFICE.add(day, n) == one_by_one(OFFICE, day, n), (day, n)


def test_counting_backwards():
    assert OFFICE.count(date(2024, 6, 10), date(2024, 6, 7)) == -1
    assert OFFICE.count(date(2024, 6, 9), date(2024, 6, 8)) == 0
    source = random.Random(3)
    for _ in range(100):
        first, last = (date(2020, 11, 1) + source.randrange(500) * DAY for _ in range(2))
        assert OFFICE.count(first, last) == -OFFICE.count(last, first)
        if first <= last:
            assert OFFICE.count(first, last) == sum(
                OFFICE.is_workday(first + n * DAY) for n in range((last - first).days)
            )


def test_counting_agrees_with_adding():
    day = date(2021, 12, 29)
    for n in range(1, 12):
        assert OFFICE.count(day + DAY, OFFICE.add(day, n) + DAY) == n
