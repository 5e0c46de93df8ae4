"""The actor that joins the collecting and the training loop: one queue in one direction. A shell around `Backlog`.

Workers report groups, the controller asks for tickets and batch handles, each trainer rank pulls its own rows. Lives in
the hub process. Every endpoint is concurrent: one that waits holds up no other.
"""

from monarch.actor import Actor, concurrent_endpoint
from torch import Tensor

from goaly.backlog.admission import Ticket
from goaly.backlog.backlog import Backlog, Wait
from goaly.backlog.batch import BatchHandle
from goaly.backlog.settings import BacklogSettings
from goaly.reward.settings import AdvantageSettings
from goaly.telemetry import spans
from goaly.trajectory import Group, PackedRows


class TrajectoryQueue(Actor):
    """Admission, order, batches and accounting of one run; the endpoints' meaning stands at `Backlog`'s methods."""

    def __init__(
        self,
        settings: BacklogSettings,
        advantages: AdvantageSettings,
        dp_ranks: int,
        pad_token: int,
        steps: int | None = None,
        minibatches: int = 1,
    ):
        self._backlog = Backlog(
            settings, advantages, dp_ranks=dp_ranks, pad_token=pad_token, steps=steps, minibatches=minibatches
        )

    @concurrent_endpoint
    async def admit(self) -> Ticket | None:
        """The next ticket, as soon as a group may start; None once closed."""
        return await self._backlog.admit()

    @concurrent_endpoint
    async def started(self, ticket: int) -> bool:
        """The ticket's episodes start; False: they should not."""
        return self._backlog.started(ticket)

    @concurrent_endpoint
    async def put(self, group: Group) -> bool:
        """A complete group; False: it is not trained: it came too late, or has no signal."""
        return self._backlog.put(group)

    @concurrent_endpoint
    async def reject(self, ticket: int, why: str) -> bool:
        """Leave a ticket out on purpose."""
        return self._backlog.reject(ticket, why)

    @concurrent_endpoint
    async def fail(self, ticket: int, why: str) -> bool:
        """Something broke."""
        return self._backlog.fail(ticket, why)

    @concurrent_endpoint
    async def next_batch(self) -> BatchHandle | None:
        """The next step's batch, as soon as its groups are there; None once closed."""
        return await self._backlog.next_batch()

    @concurrent_endpoint
    async def wait(self) -> Wait:
        """What the next batch waits for at this moment."""
        return self._backlog.wait()

    @concurrent_endpoint
    async def rows(self, batch_id: int, dp_rank: int) -> PackedRows:
        """A data-parallel rank's rows of a batch that is not trained yet."""
        return self._backlog.rows(batch_id, dp_rank)

    @concurrent_endpoint
    async def annotate(self, batch_id: int, dp_rank: int, key: str, column_RL: Tensor) -> None:
        """Add a column that a later stage computed to a rank's rows."""
        self._backlog.annotate(batch_id, dp_rank, key, column_RL)

    @concurrent_endpoint
    async def trained(self, batch_id: int, policy_version: int) -> None:
        """A training step consumed the batch and made this version."""
        self._backlog.trained(batch_id, policy_version)

    @concurrent_endpoint
    async def close(self) -> None:
        """End admission and batches; all waiters get None."""
        self._backlog.close()

    @concurrent_endpoint
    async def settle(self) -> dict[str, int]:
        """Close, account for every ticket that nobody will report on any more, and give the final counts."""
        spans.flush()
        return self._backlog.settle()

    @concurrent_endpoint
    async def counts(self) -> dict[str, int]:
        """Tickets admitted and in each state, and the policy version that admission knows of."""
        return self._backlog.counts()

    @concurrent_endpoint
    async def reasons(self) -> dict[str, int]:
        """How many tickets were rejected or failed, by `state: why`."""
        return self._backlog.reasons()
