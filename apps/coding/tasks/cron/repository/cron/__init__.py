"""When a cron line fires next."""

from cron.fields import CronError
from cron.schedule import Schedule

__all__ = ["CronError", "Schedule"]
