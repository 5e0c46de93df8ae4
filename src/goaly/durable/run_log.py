"""The log of a run: records appended as they happen, and the state of the run that they lead to."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from goaly.backlog.batch import BatchHandle
from goaly.backlog.events import Formed, Trained
from goaly.backlog.group_queue import GroupQueue
from goaly.backlog.ledger import Dropped
from goaly.durable.log import LogWriter, frames
from goaly.durable.records import Drawn, Published, Record, Resumed, decode, encode, kind_of
from goaly.errors import CorruptLog
from goaly.prompts.curriculum import Passes
from goaly.prompts.prompt import Prompt
from goaly.trajectory import Group


class RunLog:
    """Appends the records of a run."""

    def __init__(self, folder: Path):
        self._writer = LogWriter(folder)

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the log's thread so far."""
        return self._writer.cpu_seconds

    def append(self, record: Record) -> None:
        """Append a record, which must not change any more. It is encoded and written on the log's thread."""
        self._writer.append(partial(encode, record))

    async def durable(self) -> None:
        """Return once all records appended so far are on disk; RunFailed if they could not be written."""
        await self._writer.durable()

    def close(self) -> None:
        """Write and sync what was appended."""
        self._writer.close()


def records(folder: Path, of: type | None = None) -> Iterator[Record]:
    """The records of a log, or those of one kind; a CorruptLog names the file and the offset of one that is damaged."""
    for frame in frames(folder):
        try:
            if of is None or kind_of(frame.payload) is of:
                yield decode(frame.payload)
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptLog(
                f"{folder}, segment {frame.start.segment}, offset {frame.start.offset}: {error}"
            ) from error


def replayed(folder: Path, queue: GroupQueue, *, keep: int) -> Iterator[Record]:
    """Make the transitions of a log in this queue, and yield each record after its own. Batches from `keep` on stay in
    the queue when they are trained."""
    for record in records(folder):
        if not isinstance(record, Drawn | Published | Resumed):
            queue.replay(record, keep=keep)
        yield record


def trained_batches(folder: Path, queue: GroupQueue, *, first: int) -> Iterator[tuple[BatchHandle, str | None]]:
    """The batches from this one on that a log has as trained, in order, each with the digest of the version that it
    made. Each is in the queue, annotated as it was, until the next one is asked for."""
    digests: dict[int, str] = {}
    for record in replayed(folder, queue, keep=first):
        match record:
            case Published():
                digests[record.version] = record.digest
            case Trained() if record.batch >= first:
                yield queue.handle(record.batch), digests.pop(record.batch + 1, None)
                if record.batch in queue.open_batches(record.batch):
                    queue.trained(record.batch, record.batch + 1)


@dataclass(slots=True, kw_only=True)
class Recovered:
    """The content of a log beside the queue's state."""

    policy_version: int = 0
    """The newest version of the run; a trainer of an older one trains the batches up to it again."""
    prompts: dict[int, Prompt] = field(default_factory=dict)
    """The prompts drawn for tickets that have not ended, by ticket."""
    mixture: dict[str, Any] | None = None
    """The state of the prompt mixture after the last draw; None if there was none."""
    passes: list[Mapping[str, Passes]] = field(default_factory=list)
    """The passes of each trained batch from which the mixture had not learned yet."""
    digests: dict[int, str] = field(default_factory=dict)
    """The digests of the versions from the trainer's on."""


def recover(folder: Path, queue: GroupQueue, policy_version: int) -> Recovered:
    """Bring the queue to the state that the log leads to, and let it go on with a trainer of this version."""
    found = Recovered()
    passes: dict[int, Mapping[str, Passes]] = {}
    learned = 0
    for record in replayed(folder, queue, keep=policy_version):
        match record:
            case Drawn():
                learned, found.mixture = record.learned, record.mixture
                if queue.is_running(record.ticket):
                    found.prompts[record.ticket] = record.prompt
            case Group() | Dropped():
                found.prompts.pop(record.ticket, None)
            case Formed():
                passes[record.batch] = queue.handle(record.batch).passes
            case Published() if record.version >= policy_version:
                found.digests[record.version] = record.digest
    queue.restart(policy_version)
    found.policy_version = queue.counts()["policy_version"]
    found.passes = [passes[batch] for batch in range(learned, found.policy_version)]
    return found
