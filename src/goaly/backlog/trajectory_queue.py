"""The actor of the queue between the collecting and the training loop: `GroupQueue` behind endpoints.

Workers report groups, the controller asks for tickets and batch handles, and each trainer rank pulls its own rows. All
endpoints are concurrent, so one that waits delays no other. This queue is in memory; a run has a `LoggedQueue`
(`journal/logged_queue.py`), which is on disk too.
"""

from collections.abc import Awaitable, Callable
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from monarch._src.actor.endpoint import EndpointProperty
from monarch.actor import Actor

from goaly.backlog.events import Event
from goaly.backlog.group_queue import GroupQueue
from goaly.backlog.lessons import Taught
from goaly.backlog.settings import BacklogSettings
from goaly.base.actors import concurrent_endpoint
from goaly.reward.settings import AdvantageSettings

P = ParamSpec("P")
R = TypeVar("R")


def _waiting(method: Callable[Concatenate[GroupQueue, P], Awaitable[R]]) -> EndpointProperty[P, R]:
    """The endpoint of a method that waits."""

    @wraps(method)
    async def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        return await method(self.queue, *args, **kwargs)

    return concurrent_endpoint(call)


def _immediate(method: Callable[Concatenate[GroupQueue, P], R]) -> EndpointProperty[P, R]:
    """The endpoint of a method that returns at once."""

    @wraps(method)
    async def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(self.queue, *args, **kwargs)

    return concurrent_endpoint(call)


class TrajectoryQueue(Actor):
    """Admission, order, batches and accounting of one run; each endpoint is the `GroupQueue` method of its name."""

    def __init__(
        self,
        settings: BacklogSettings,
        advantages: AdvantageSettings,
        dp_ranks: int,
        pad_token: int,
        steps: int | None = None,
        minibatches: int = 1,
        taught: Taught | None = None,
    ):
        self._new_queue = partial(
            GroupQueue,
            settings,
            advantages,
            dp_ranks=dp_ranks,
            pad_token=pad_token,
            steps=steps,
            minibatches=minibatches,
            taught=taught,
        )
        self.queue = self._new_queue(record=self._record)

    admit = _waiting(GroupQueue.admit)
    next_batch = _waiting(GroupQueue.next_batch)
    wait = _immediate(GroupQueue.wait)
    report = _immediate(GroupQueue.report)
    tighten = _immediate(GroupQueue.tighten)
    rows = _immediate(GroupQueue.rows)
    lessons = _immediate(GroupQueue.lessons)
    annotate = _immediate(GroupQueue.annotate)
    trained = _immediate(GroupQueue.trained)
    is_running = _immediate(GroupQueue.is_running)
    states = _immediate(GroupQueue.states)
    counts = _immediate(GroupQueue.counts)
    reasons = _immediate(GroupQueue.reasons)
    close = _immediate(GroupQueue.close)
    settle = _immediate(GroupQueue.settle)

    @concurrent_endpoint
    async def went_back(self, served: int, newest: int) -> None:
        """Tokens of version `served` count as those of the trainer's, `newest`, which has its weights again. A queue
        that replaces this one must hear it, too."""
        self.queue.same_weights = {served: newest}

    def _record(self, event: Event) -> None:
        """Gets each event of the queue before any caller does."""
