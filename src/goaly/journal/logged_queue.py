"""The queue of a run with its log: every event is recorded, and a queue that replaces a lost one goes on from there.

It lives in the hub process, and is the only writer of the run's log. The log gets a snapshot every `snapshot_every`
policy versions, so that a resumed run need not read the records before it.

    journal-5: The records of a batch's groups and tickets are on disk before `next_batch` returns it, and a column
        before `annotate` returns: nobody has used data that the queue lacks after a restart.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from goaly.backlog.batch import Batch, BatchHandle
from goaly.backlog.group_queue import GroupQueue
from goaly.backlog.group_statistics import Wait
from goaly.backlog.trajectory_queue import TrajectoryQueue
from goaly.base.actors import concurrent_endpoint
from goaly.base.telemetry import spans
from goaly.journal.records import Drawn, Published, Record, Resumed
from goaly.journal.run_log import Recovered, RunLog, RunState, recover, trained_batches
from goaly.trajectory import PackedRows

SNAPSHOT_EVERY = 50
"""Policy versions between two snapshots where checkpoints are not regular."""
DISK_SECONDS = 1.0
"""Shorter waits for the disk are not reported."""


class _Replay:
    """The batches of a run again, for one reader: first those in its log, then those whose step is not in it yet."""

    def __init__(self, log: Path, queue: GroupQueue, first: int, untrained: Mapping[int, Batch]):
        """`queue` is new; `untrained` holds the batches that are still in the run's queue."""
        self._queue = queue
        self._logged = trained_batches(log, queue, first=first)
        self._untrained = untrained
        self._next = first
        self.current: int | None = None
        """The batch that `next` returned last; None while another one is being made."""

    async def next(self) -> tuple[BatchHandle, str | None] | None:
        """The next batch, and the recorded digest of the version that it made, if any."""
        self.current = None
        found = await asyncio.to_thread(next, self._logged, None)
        if found is None and self._next in self._untrained:
            found = self._untrained[self._next].handle, None
        if found is not None:
            self.current = found[0].id
            self._next = self.current + 1
        return found

    def rows(self, dp_rank: int) -> PackedRows:
        """The rows of the current batch."""
        assert self.current is not None
        if self.current in self._untrained:
            return self._untrained[self.current].ranks[dp_rank]
        return self._queue.rows(self.current, dp_rank)


class LoggedQueue(TrajectoryQueue):
    """A queue that records its events in a log, once it has opened one."""

    def __init__(self, *queue: Any, snapshot_every: int | None = None, **options: Any):
        """The arguments of a `TrajectoryQueue`, and the policy versions between two snapshots."""
        super().__init__(*queue, **options)
        self._replays: dict[str, _Replay] = {}
        self._state = RunState(self.queue)
        self._snapshot_every = snapshot_every or SNAPSHOT_EVERY
        self._log: RunLog | None = None
        self._cpu_seconds = 0.0

    @concurrent_endpoint
    async def open(
        self,
        log: Path,
        policy_version: int,
        trainer: dict[str, Any],
        given: int | None = None,
        published: Sequence[Published] = (),
    ) -> Recovered:
        """Record events in this log from now on. Its records, if it has any, first restore the queue, for a trainer of
        this version and these settings and a training loop that has the batches before `given`. The log may lack
        records of the `published` versions."""
        began = [Resumed(policy_version=policy_version, trainer=trainer), *published]
        return await asyncio.to_thread(self._open, log, began, policy_version, given)

    def _open(self, log: Path, began: Sequence[Record], policy_version: int, given: int | None) -> Recovered:
        opened = RunLog(log)
        for record in began:
            opened.record(record)
        self._log = opened
        recovered = recover(log, self._state, policy_version, given)
        for record in began:
            self._state.follow(record)  # which it may not have read
        return recovered

    @concurrent_endpoint
    async def replayed(self, reader: str, log: Path, first: int) -> tuple[BatchHandle, str | None] | None:
        """The next batch from `first` on that the log has as trained, and the recorded digest of the version that it
        made; None at the log's end. Its rows, with their added columns, are available until this reader's next call."""
        if reader not in self._replays:
            untrained = self.queue.open_batches(first)  # before the log is read: it has the batches trained meanwhile
            await self._durable()
            self._replays[reader] = _Replay(log, self._new_queue(), first, untrained)
        return await self._replays[reader].next()

    @concurrent_endpoint
    async def end_replay(self, reader: str) -> None:
        """Free the replay of this reader."""
        self._replays.pop(reader, None)

    @concurrent_endpoint
    async def rows(self, batch_id: int, dp_rank: int) -> PackedRows:
        """The rows of a batch for one data-parallel rank; available until the batch is trained."""
        for replay in self._replays.values():
            if replay.current == batch_id:
                return replay.rows(dp_rank)
        return self.queue.rows(batch_id, dp_rank)

    @concurrent_endpoint
    async def next_batch(self) -> BatchHandle | None:
        """The batch of the next step, once its records are on disk (journal-5); None after `close`."""
        batch = await self.queue.next_batch()
        if self._log is not None:
            asked = time.monotonic()
            await self._durable()
            if batch is not None:
                batch.metrics["log/wait_seconds"] = time.monotonic() - asked
                batch.metrics["log/cpu_seconds"] = self._log.cpu_seconds - self._cpu_seconds
                self._cpu_seconds = self._log.cpu_seconds
        return batch

    @concurrent_endpoint
    async def trained(self, batch_id: int, policy_version: int) -> None:
        """Record that a training step consumed the batch and produced this version."""
        self.queue.trained(batch_id, policy_version)
        if self._log is not None and policy_version % self._snapshot_every == 0:
            snapshot = self._state.snapshot()
            if snapshot is not None:
                self._log.record(snapshot)

    @concurrent_endpoint
    async def wait(self) -> Wait:
        """The groups, or the disk, that the next batch waits for now."""
        wait, disk = self.queue.wait(), None if self._log is None else self._log.wait
        if disk is None or disk[0] < DISK_SECONDS:
            return wait
        return replace(wait, disk_seconds=disk[0], disk_file=disk[1])

    @concurrent_endpoint
    async def record(self, record: Drawn | Published) -> None:
        """Write a record of the controller into the log."""
        self._record(record)

    @concurrent_endpoint
    async def annotate(self, batch_id: int, dp_rank: int, key: str, column_RL: Tensor) -> None:
        """Add a column that a later stage computed to the rows of one rank; returns once it is on disk (journal-5)."""
        self.queue.annotate(batch_id, dp_rank, key, column_RL)
        await self._durable()

    @concurrent_endpoint
    async def durable(self) -> None:
        """Return when everything recorded so far is on disk."""
        await self._durable()

    @concurrent_endpoint
    async def settle(self) -> dict[str, int]:
        """Close, reject every ticket that has not ended, and return the final counts."""
        spans.flush()
        counts = self.queue.settle()
        if self._log is not None:
            await asyncio.to_thread(self._log.close)
        return counts

    def _record(self, record: Record) -> None:
        if self._log is not None:
            self._log.record(record)
            self._state.follow(record)

    async def _durable(self) -> None:
        if self._log is not None:
            await self._log.durable()  # unblocked by the log's thread, also if it cannot write
