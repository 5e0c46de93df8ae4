import random
from datetime import datetime, timedelta

from cron import Schedule

START = datetime(2023, 12, 20, 23, 59)
SUNDAYS = [datetime(2023, 12, 24), datetime(2023, 12, 31), datetime(2024, 1, 7)]


def days(line, count):
    return [(moment - START).days for moment in Schedule(f"0 0 {line}").upcoming(START, count)]


def expected(allowed, count):
    """Offsets of the first days for which `allowed` says yes."""
    found, offset = [], 0
    while len(found) < count:
        if allowed(START + timedelta(minutes=1, days=offset)):
            found.append(offset)
        offset += 1
    return found


def test_sunday_has_three_names():
    for name in ("0", "7", "sun", "SUN", "0,7"):
        assert Schedule(f"0 0 * * {name}").upcoming(START, 3) == SUNDAYS


def test_ranges_with_sunday():
    assert days("* * 5-7", 6) == expected(lambda day: day.isoweekday() >= 5, 6)
    assert days("* * 0-2", 6) == expected(lambda day: day.isoweekday() in (7, 1, 2), 6)
    assert days("* * fri-7", 6) == expected(lambda day: day.isoweekday() >= 5, 6)
    assert days("* * 1-7/2", 6) == expected(lambda day: day.isoweekday() % 2 == 1, 6)


def test_either_of_two_restricted_day_fields():
    assert days("10 * 2", 9) == expected(lambda day: day.day == 10 or day.isoweekday() == 2, 9)
    assert days("1-3 * sat,0", 12) == expected(lambda day: day.day <= 3 or day.isoweekday() >= 6, 12)


def test_the_month_is_still_needed():
    allowed = lambda day: day.month == 2 and (day.day == 29 or day.isoweekday() == 1)
    assert days("29 2 1", 7) == expected(allowed, 7)
    assert Schedule("0 0 31 6 *").next(START) is None


def test_a_star_leaves_it_to_the_other_field():
    assert days("13 * *", 4) == expected(lambda day: day.day == 13, 4)
    assert days("* * 3", 4) == expected(lambda day: day.isoweekday() == 3, 4)
    assert days("* 3 *", 4) == expected(lambda day: day.month == 3, 4)


def test_restricted_fields_that_allow_every_day():
    assert days("1-31 * 4", 9) == list(range(9))
    assert days("13 * 0-6", 9) == list(range(9))


def test_random_lines_as_day_by_day():
    source = random.Random(6)
    for _ in range(40):
        monthdays, weekdays = source.sample(range(1, 29), 2), source.sample(range(8), 2)
        month = source.choice(["*", source.randint(1, 12)])
        found = days(f"{','.join(map(str, monthdays))} {month} {','.join(map(str, weekdays))}", 4)
        assert found == expected(
            lambda day: month in ("*", day.month)
            and (day.day in monthdays or day.isoweekday() % 7 in {weekday % 7 for weekday in weekdays}),
            4,
        )
