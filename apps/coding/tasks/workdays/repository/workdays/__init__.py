"""Working days with weekends and public holidays."""

from workdays.calendar import Calendar
from workdays.rules import Fixed, NthWeekday

__all__ = ["Calendar", "Fixed", "NthWeekday"]
