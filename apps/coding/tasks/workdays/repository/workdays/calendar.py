"""The calendar."""

from datetime import timedelta

from workdays.rules import SATURDAY

DAY = timedelta(days=1)


class Calendar:
    """Days on and off, by the rules of its holidays."""

    def __init__(self, rules=()):
        self.rules = tuple(rules)
        self._years = {}

    def holidays(self, year):
        """The names of the days off in this year, by date."""
        if year not in self._years:
            days = ((rule.in_year(year), rule.name) for rule in self.rules)
            self._years[year] = {day: name for day, name in days if day is not None}
        return self._years[year]

    def is_workday(self, day):
        """Whether people work on this day."""
        return day.weekday() < SATURDAY and day not in self.holidays(day.year)

    def next_workday(self, day):
        """The day itself if it is a working day, else the first one after it."""
        while not self.is_workday(day):
            day += DAY
        return day

    def add(self, day, n):
        """The n-th working day after the day, before it for a negative n."""
        day = self.next_workday(day)
        for _ in range(n):
            day = self.next_workday(day + DAY)
        for _ in range(-n):
            day = day - DAY
        return day

    def count(self, start, end):
        """How many working days there are from start up to, and not including, end."""
        return sum(self.is_workday(start + offset * DAY) for offset in range((end - start).days))
