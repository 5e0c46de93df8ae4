"""The records of sessions under way, on disk: a worker that takes over a group goes on with its sessions.

`RUN/sessions/TICKET.SAMPLE.jsonl` has the records of one session, from its beginning to the end of its group;
`TICKET.SAMPLE.retry1.jsonl` takes its place if the episode begins again.

Sessions of a controller that ended are not continued: the policy may be an older one now.

Invariants
    agents-7: A session that goes on in another worker has all turns, rewards and keys of the first that came by HTTP.
        The same requests, sent again, get the same answers (agents-6). The episode's own code repeats its requests,
        unless it is `resumable`: then it has its turns, notes and marks, too, and `say` returns these turns first.
        Otherwise requests that continued these, or came after one at the same turn, are sampled again, as are those
        after a record that could not be written.
"""

import json
import logging
import os
import secrets
import shutil
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from goaly.agents.turn import Record
from goaly.base.atomic_files import open_lines, whole_lines

logger = logging.getLogger(__name__)

SESSIONS_FOLDER = "sessions"
SECRET = "secret"


class SessionFiles:
    """The files of a run's sessions."""

    def __init__(self, folder: Path):
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._secret = _secret(folder / SECRET)
        self._cut: set[str] = set()
        """The sessions of which a record could not be written: their files have all records before, and get no more."""

    def api_key(self, name: str) -> str:
        """The API key of the session with this name, the same in each worker."""
        return blake2b(name.encode(), key=self._secret, digest_size=24).hexdigest()

    def begun(self) -> dict[str, str]:
        """The names of the sessions that have begun, and whose groups have not ended, by their API keys."""
        return {self.api_key(path.stem): path.stem for path in self._folder.glob("*.jsonl")}

    def goes_on(self, name: str) -> bool:
        """Whether the group of the session with this name has not ended."""
        return (self._folder / f"{name}.jsonl").exists()

    def begin(self, name: str, *, own: bool = False) -> list[Record]:
        """Begin the session with this name, and return its records of an earlier worker; `own`: also those of what the
        episode's own code did."""
        (self._folder / f"{name}.jsonl").touch()
        return self.records(name, own=own)

    def attempt(self, name: str) -> int:
        """The attempt at the episode with this name that an earlier worker was at; 0 if it had not begun again."""
        later = self._folder.glob(f"{name}.retry*.jsonl")
        return max((int(path.stem.rpartition("retry")[2]) for path in later), default=0)

    def records(self, name: str, *, own: bool = False) -> list[Record]:
        """The records of an earlier worker for the session with this name, as `begin` has them."""
        path = self._folder / f"{name}.jsonl"
        if not path.exists():
            return []
        records = _kept([json.loads(line) for line in whole_lines(path)], own)
        kept = path.with_suffix(".kept")
        kept.write_text("".join(json.dumps(record) + "\n" for record in records))
        kept.replace(path)
        return records

    def write(self, name: str, record: Record) -> None:
        """Add a record of this session. If that fails, such as on a full disk, the file gets no more records."""
        path = self._folder / f"{name}.jsonl"
        if name in self._cut:
            return
        try:
            with os.fdopen(open_lines(path), "ab") as file:  # a worker has more sessions than it may open files
                file.write(json.dumps(record).encode() + b"\n")
        except OSError as error:
            self._cut.add(name)
            logger.warning("%s: a worker that takes over will not know the records from here on: %s", path, error)

    def discard(self, name: str) -> None:
        """Delete the file of a session whose group has ended."""
        self._cut.discard(name)
        (self._folder / f"{name}.jsonl").unlink(missing_ok=True)


def _kept(records: list[Record], own: bool) -> list[Record]:
    """The records of what came by HTTP and depends on nothing else, or of all turns, with new numbers of turns."""
    kept: list[Record] = []
    numbers: list[int | None] = []
    """The new number of each turn; None: it is dropped."""
    left: set[int] = set()
    """Turns that a dropped one continued: those that continue them later are recorded as not the first."""
    for record in records:
        match record["kind"]:
            case "turn":
                before = record["parent"]
                parent = None if before is None else numbers[before]
                if (record["key"] is None and not own) or before in left or (parent is None) != (before is None):
                    numbers.append(None)
                    left |= set() if before is None else {before}
                    continue
                numbers.append(sum(number is not None for number in numbers))
                kept.append({**record, "parent": parent})
            case "credit":
                turns = [numbers[turn] for turn in record["turns"]]
                if record["key"] is not None and None not in turns:
                    kept.append({**record, "turns": turns})
            case "reward" if record["key"] is not None:
                kept.append(record)
            case "refused" if None not in numbers:
                kept.append(record)
            case "note" | "mark" if own:
                kept.append(record)
    return kept


def forget_group(folder: Path, ticket: int) -> None:
    """Delete the files of the sessions of a group that no worker will end."""
    for path in folder.glob(f"{ticket}.*.jsonl"):
        path.unlink(missing_ok=True)


def forget_sessions(folder: Path) -> None:
    """Delete the files of all sessions."""
    shutil.rmtree(folder, ignore_errors=True)


def _secret(path: Path) -> bytes:
    """The secret of the run's API keys, made by the first worker."""
    made = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(32))
    with suppress(FileExistsError):
        os.link(made, path)
    made.unlink()
    return path.read_bytes()
