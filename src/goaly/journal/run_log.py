"""The log of a run: records appended as they happen, and the state of the run that they lead to."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from goaly.backlog.batch import BatchHandle
from goaly.backlog.events import Annotated, Dropped, Formed, Trained
from goaly.backlog.group_queue import GroupQueue
from goaly.base.errors import CorruptLog, RunFailed
from goaly.journal.log_reader import Frame, Position, begin_at, frames, segment_starts
from goaly.journal.log_writer import LogWriter
from goaly.journal.records import (
    Drawn,
    Published,
    Record,
    Resumed,
    Snapshot,
    decode,
    encode,
    kind_of,
    snapshot_version,
)
from goaly.prompts.curriculum import Passes
from goaly.prompts.prompt import Prompt
from goaly.trajectory import Group

LOG_FOLDER = "log"
"""The folder of the log in that of the run."""


class RunLog(LogWriter):
    """Appends the records of a run."""

    def record(self, record: Record) -> None:
        """Append a record, which must not change any more. It is encoded and written on the log's thread. A snapshot
        begins a segment."""
        self.append(partial(encode, record), begins_segment=isinstance(record, Snapshot))


def records(folder: Path, of: type | None = None, after: Position | None = None) -> Iterator[Record]:
    """The records of a log, or those of one kind; a CorruptLog names the file and the offset of one that is damaged."""
    for frame in frames(folder, after):
        with _named(folder, frame):
            record = decode(frame.payload) if of is None or kind_of(frame.payload) is of else None
        if record is not None:
            yield record


def first_version(folder: Path) -> int:
    """The policy version at which a log begins: 0, unless its beginning was deleted."""
    for frame in frames(folder):
        with _named(folder, frame):
            return snapshot_version(frame.payload) or 0
    return 0


def trainers(folder: Path) -> list[Resumed]:
    """The trainers of a run in order, from that at the log's beginning on."""
    first = next(records(folder), None)
    earlier = first.records if isinstance(first, Snapshot) else ()
    return [one for one in (*earlier, *records(folder, of=Resumed)) if isinstance(one, Resumed)]


def needed_records(folder: Path, policy_version: int) -> Iterator[Record]:
    """The records that lead to the state of a run whose trainer is at this version: all, or those from the newest
    snapshot of at most this version on."""
    place = _newest_snapshot(folder, policy_version)
    if place is None and (begins := first_version(folder)):
        raise RunFailed(
            f"{folder}: begins at policy version {begins}, because older records were deleted "
            f"(checkpoint.keep_log=false); nothing can go on from version {policy_version}"
        )
    return records(folder, after=place)


def delete_before(folder: Path, policy_version: int) -> None:
    """Delete the records that are not needed to go on from this version or a later one."""
    if (place := _newest_snapshot(folder, policy_version)) is not None:
        begin_at(folder, place.segment)


def _newest_snapshot(folder: Path, policy_version: int) -> Position | None:
    """The place of the newest snapshot of at most this version; None if there is none."""
    for place in reversed(segment_starts(folder)):
        frame = next(frames(folder, place), None)
        if frame is None or frame.start.segment != place.segment:
            continue  # it is empty, or all of it is torn
        with _named(folder, frame):
            version = snapshot_version(frame.payload)
        if version is not None and version <= policy_version:
            return place
    return None


@contextmanager
def _named(folder: Path, frame: Frame) -> Iterator[None]:
    """Name the place of a record that cannot be understood."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        place = f"segment {frame.start.segment}, offset {frame.start.offset}"
        raise CorruptLog(f"{folder}, {place}: {error}") from error


class RunState:
    """The state of a run: its queue, and what its records say beside it. It follows them live, and when they are read
    again."""

    def __init__(self, queue: GroupQueue):
        self.queue = queue
        self._draws: dict[int, Drawn] = {}
        """Those for tickets that have not ended."""
        self._last_draw: Drawn | None = None
        self._passes: dict[int, Mapping[str, Passes]] = {}
        """Those of batches from which the mixture had not learned before the last draw."""
        self._published: dict[int, Published] = {}
        self._trainer: Resumed | None = None

    def follow(self, record: Record) -> None:
        """Take in a record. A transition of the queue has been made before, or, if it is the end of a ticket, is made
        next."""
        match record:
            case Drawn():
                self._last_draw = record
                self._passes = {batch: found for batch, found in self._passes.items() if batch >= record.learned}
                if self.queue.is_running(record.ticket):
                    self._draws[record.ticket] = record
            case Group() | Dropped():
                self._draws.pop(record.ticket, None)
            case Formed():
                self._passes[record.batch] = self.queue.handle(record.batch).passes
            case Published():
                self._published[record.version] = record
            case Resumed():
                self._trainer = record

    def replay(self, records: Iterable[Record], *, keep: int) -> Iterator[Record]:
        """Make the transitions of these records, and yield each after its own. Batches from `keep` on stay in the queue
        when they are trained. If the first record is a snapshot, it is the state before them; later ones are skipped.
        """
        for number, record in enumerate(records):
            match record:
                case Snapshot():
                    if number == 0:
                        self._load(record)
                case Resumed():
                    self.queue.forget_signals()
                case Drawn() | Published():
                    pass
                case _:
                    self.queue.replay(record, keep=keep)
            self.follow(record)
            yield record

    def digest(self, version: int) -> str | None:
        """The digest with which this version was last published, if it is known."""
        return self._published[version].digest if version in self._published else None

    def snapshot(self) -> Snapshot | None:
        """The state now; None while the queue has none that can be saved."""
        state = self.queue.state_dict()
        if state is None:
            return None
        version = state["policy_version"]
        self._published = {one: published for one, published in self._published.items() if one >= version}
        draws = [one for one in self._draws.values() if one is not self._last_draw]
        kept = (*state.pop("groups"), *state.pop("annotated"), *self._published.values(), *draws)
        last = tuple(one for one in (self._trainer, self._last_draw) if one is not None)
        return Snapshot(policy_version=version, queue=state, passes=dict(self._passes), records=kept + last)

    def _load(self, snapshot: Snapshot) -> None:
        groups = [one for one in snapshot.records if isinstance(one, Group)]
        annotated = [one for one in snapshot.records if isinstance(one, Annotated)]
        self.queue.load_state_dict({**snapshot.queue, "groups": groups, "annotated": annotated})
        self._passes = dict(snapshot.passes)
        for record in snapshot.records:
            self.follow(record)

    def restart(self, policy_version: int, given: int | None = None) -> "Recovered":
        """Go on with a trainer of this version, and a training loop that has the batches before `given`."""
        self.queue.restart(policy_version, given)
        newest = self.queue.counts()["policy_version"]
        learned = 0 if self._last_draw is None else self._last_draw.learned
        return Recovered(
            policy_version=newest,
            prompts={ticket: drawn.prompt for ticket, drawn in self._draws.items()},
            mixture=None if self._last_draw is None else self._last_draw.mixture,
            passes=[self._passes[batch] for batch in range(learned, newest)],
            digests={one: found.digest for one, found in self._published.items() if one >= policy_version},
        )


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


def recover(folder: Path, state: RunState, policy_version: int, given: int | None = None) -> Recovered:
    """Bring the queue to the state that the log leads to, and let it go on with a trainer of this version, and a
    training loop that has the batches before `given`."""
    for _ in state.replay(needed_records(folder, policy_version), keep=policy_version):
        pass
    return state.restart(policy_version, given)


def trained_batches(folder: Path, queue: GroupQueue, *, first: int) -> Iterator[tuple[BatchHandle, str | None]]:
    """The batches from this one on that a log has as trained, in order, each with the digest of the version that it
    made. Each is in the queue, annotated as it was, until the next one is asked for."""
    state = RunState(queue)
    for record in state.replay(needed_records(folder, first), keep=first):
        if isinstance(record, Trained) and record.batch >= first:
            yield queue.handle(record.batch), state.digest(record.batch + 1)
            if record.batch in queue.open_batches(record.batch):
                queue.trained(record.batch, record.batch + 1)
