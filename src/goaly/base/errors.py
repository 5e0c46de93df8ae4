"""The errors that goaly raises on purpose.

They cross actor boundaries, so all of them pickle. Errors of other libraries need not: `portable` makes text of them.
"""

from contextlib import suppress


class GoalyError(Exception):
    """Base of every error that goaly raises on purpose."""


class ConfigError(GoalyError, ValueError):
    """Settings that cannot work. `problems` has a line for each problem."""

    def __init__(self, problems: list[str]):
        self.problems = list(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(self.problems)


class SchemaError(GoalyError, ValueError):
    """Token data violates the trajectory schema; names the key."""


class EpisodeError(GoalyError):
    """A script's episode failed; names the prompt and the cause."""


class WeightsError(GoalyError):
    """The weight store's protocol was violated, or its data is unavailable."""


class WritersGone(WeightsError):
    """The writers have left or died: no newer version will come."""


class CorruptLog(GoalyError):
    """A run's log is damaged where it was known to be on disk; names the file and the offset."""


class ReplicaLost(GoalyError):
    """A replica died or was closed while it ran this request, which may be retried elsewhere."""


class PoisonRequest(GoalyError):
    """Replicas keep dying while they run this request. It is not retried."""


class AnswerBroken(GoalyError):
    """A replica died after a caller had the beginning of its answer, which cannot go on elsewhere."""


class ParityError(GoalyError):
    """Trainer and sampler gave a token different log-probs in a run with bitwise numerics; names the token and both."""


class RunFailed(GoalyError):
    """A failure ended the run; names the actor, the endpoint and the cause."""


class ForeignError(GoalyError):
    """An error of another library or of a script: its type and its message."""


KNOWN_EVERYWHERE = ("builtins", "goaly", "monarch")
"""Packages whose errors cross to other processes as they are."""


def portable(error: Exception) -> Exception:
    """The error if another process can build it again, which may lack its module or not know how; else its text."""
    if type(error).__module__.partition(".")[0] in KNOWN_EVERYWHERE:
        import cloudpickle  # not every process that imports this file has an error to send

        with suppress(Exception):  # whatever an error's own code raises
            cloudpickle.loads(cloudpickle.dumps(error))
            return error
    return ForeignError(cause_of(first_error(error)))


def root_cause(error: BaseException) -> BaseException:
    """The original error, without the reports of the actor calls that it came through."""
    while isinstance(cause := getattr(error, "exception", None), BaseException):  # Monarch's ActorError keeps it there
        error = cause
    return error


def first_error(group: BaseException) -> BaseException:
    """The first error of a group that is not itself a group."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


def os_error(error: Exception) -> OSError | None:
    """The OSError that caused this error, here or in an actor; None if another error did."""
    cause = root_cause(error.__cause__ or error)
    return cause if isinstance(cause, OSError) else None


def cause_of(error: BaseException) -> str:
    """The type and the message of the original error."""
    cause = root_cause(error)
    return str(cause) if isinstance(cause, ForeignError) else f"{type(cause).__name__}: {cause}"
