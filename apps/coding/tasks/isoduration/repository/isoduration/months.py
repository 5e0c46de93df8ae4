"""Calendar arithmetic with months."""

from calendar import monthrange


def add_months(day, months):
    """The same day of another month, or that month's last day."""
    total = day.year * 12 + day.month + months
    year, month = divmod(total, 12)
    return day.replace(year=year, month=month, day=min(day.day, monthrange(year, month)[1]))
