"""The schedule of a line."""

from datetime import datetime, time, timedelta

from cron.fields import FIELDS, CronError

YEARS = 8
"""Two leap days can be so far apart, around a year such as 2100."""


class Schedule:
    """Fires at each minute whose fields are all allowed."""

    def __init__(self, line):
        parts = line.split()
        if len(parts) != len(FIELDS):
            raise CronError(f"{len(FIELDS)} fields are needed, not {len(parts)}: {line!r}")
        values = [field.values(part) for field, part in zip(FIELDS, parts)]
        self.minutes, self.hours, self.days, self.months, self.weekdays = values

    def fires_on(self, day):
        """Whether there is a time on this date."""
        return day.month in self.months and day.day in self.days and day.weekday() + 1 in self.weekdays

    def times(self):
        """The times of a day on which it fires."""
        return [time(hour, minute) for hour in sorted(self.hours) for minute in sorted(self.minutes)]

    def next(self, after):
        """The first time later than `after`, or None if there is none within years."""
        day, times = after.date(), self.times()
        for _ in range(366 * YEARS):
            if self.fires_on(day):
                for moment in times:
                    if (found := datetime.combine(day, moment)) > after:
                        return found
            day += timedelta(days=1)
        return None

    def upcoming(self, after, count):
        """The next `count` times, fewer if there are no more."""
        found = []
        while len(found) < count and (after := self.next(after)):
            found.append(after)
        return found
