"""The errors that goaly raises on purpose.

    GoalyError
    ├── ConfigError        the user's settings are wrong: every problem, one message
    ├── SchemaError        token data broke the trajectory schema (names the key)
    ├── EpisodeError       a script's episode failed; carries prompt and cause
    ├── WeightsError       the weight store's protocol was broken
    │   └── WritersGone    no newer weights will come
    ├── ReplicaLost        a replica died or was closed; its requests may go elsewhere
    ├── PoisonRequest      replicas keep dying with this request under way; it is not retried
    └── RunFailed          an actor's failure ended the run (names actor, endpoint, cause)

All of them pickle: they cross actor boundaries.
"""


class GoalyError(Exception):
    """Base of every error that goaly raises on purpose."""


class ConfigError(GoalyError, ValueError):
    """Settings that can't work. `problems` holds a line for each."""

    def __init__(self, problems: list[str]):
        self.problems = list(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(self.problems)


class SchemaError(GoalyError, ValueError):
    """Token data that broke the trajectory schema."""


class EpisodeError(GoalyError):
    """A script's episode coroutine failed."""


class WeightsError(GoalyError):
    """The weight store's protocol was broken, or its data can't be had."""


class WritersGone(WeightsError):
    """Who published weights has left or died: no newer version will come."""


class ReplicaLost(GoalyError):
    """A replica died or was closed with this request under way; the request may be made elsewhere."""


class PoisonRequest(GoalyError):
    """Replicas keep dying with this request under way; it is not retried."""


class RunFailed(GoalyError):
    """An actor's failure ended the run."""


def root_cause(error: BaseException) -> BaseException:
    """The error that started it, without the reports of the actor calls that it came through."""
    while isinstance(cause := getattr(error, "exception", None), BaseException):  # Monarch's ActorError has it there
        error = cause
    return error


def first_error(group: BaseException) -> BaseException:
    """The error that a user should read: the first of a group that is not itself a group."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


def cause_of(error: BaseException) -> str:
    """The type and the message of the error that started it."""
    cause = root_cause(error)
    return f"{type(cause).__name__}: {cause}"
