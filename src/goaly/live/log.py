"""The records of live traffic on disk: a file for each session until it is over, and one with the ends of all turns.

    RUN/live/sessions/ID.jsonl    the session, its turns, outcomes, judgements and tickets
    RUN/live/ends.jsonl           one line for each turn that has ended: how, in which ticket, for which key and user

A session's file is deleted when the session has ended and so have all its turns. Before a group goes to the queue,
`durable` has put its records on disk, so a restart gives the same turns to the same ticket.
"""

import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from goaly.base.atomic_files import append, open_lines, sync, whole_lines
from goaly.live.collection import Record

logger = logging.getLogger(__name__)

SESSIONS, ENDS = "sessions", "ends.jsonl"


class LiveLog:
    """Writes and reads the records of one run."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._sessions = folder / SESSIONS
        self._sessions.mkdir(parents=True, exist_ok=True)
        self._ends = open_lines(folder / ENDS)

    def write(self, record: Record) -> None:
        """Append a record; OSError if the disk is full."""
        line = json.dumps(record).encode() + b"\n"
        if record["kind"] == "end":
            append(self._ends, line)
            return
        file = open_lines(self._file(record["session"]))
        try:
            append(file, line)
        finally:
            os.close(file)

    def records(self) -> Iterator[Record]:
        """All records, without half a line that a crash left."""
        for path in (*self._sessions.glob("*.jsonl"), self.folder / ENDS):
            yield from map(json.loads, whole_lines(path))

    def durable(self, sessions: Iterable[str]) -> None:
        """Return when the records of these sessions are on disk."""
        for session in sessions:
            sync(self._file(session))
        sync(self._sessions)

    def drop(self, session: str) -> None:
        """Delete the file of a session that is over."""
        self._file(session).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file of ends."""
        os.close(self._ends)

    def _file(self, session: str) -> Path:
        return self._sessions / f"{session}.jsonl"
