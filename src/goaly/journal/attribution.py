"""The conversations that a served policy version was trained on.

    RUN/gate.jsonl         what the gate decided, and when the trainer went back (docs/gate.md)
    RUN/live/ends.jsonl    how each turn of live traffic ended: its conversation, its ticket
    RUN/log                which tickets each step trained

A step whose version was discarded by a roll back is no ancestor of later versions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from goaly.backlog.events import Trained
from goaly.base.json_text import read_lines
from goaly.journal.run_log import LOG_FOLDER, records

GATE_FILE, ENDS_FILE = "gate.jsonl", "live/ends.jsonl"
TRAINED = "trained"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedConversation:
    """A conversation, and the versions that steps on its turns made."""

    session: str
    key: str
    user: str | None
    """None if the client named none, or it was forgotten."""
    versions: frozenset[int]


class Attribution:
    """Which versions a run has served, and which conversations they saw."""

    def __init__(self, run: Path):
        self._discarded: list[tuple[int, int]] = []
        """The served version that the trainer went back to, and the newest version before."""
        self.served: list[int] = []
        """The versions that were served, in order."""
        for record in _lines(run / GATE_FILE):
            match record["kind"]:
                case "Opened":
                    self.served.append(record["version"])
                case "Decided" if record["decision"] == "promoted":
                    self.served.append(record["candidate"])
                case "RolledBack":
                    self._discarded.append((record["served"], record["newest"]))
        self.conversations = self._read(run)
        """All conversations with a trained turn."""

    def is_ancestor(self, step: int, version: int) -> bool:
        """Whether a version has been trained by the step that made version `step`."""
        gone = any(served < step <= newest < version for served, newest in self._discarded)
        return step <= version and not gone

    def seen_by(self, version: int) -> list[TrainedConversation]:
        """The conversations that this version was trained on."""
        return [one for one in self.conversations if any(self.is_ancestor(step, version) for step in one.versions)]

    def versions_that_saw(self, session: str) -> list[int]:
        """The served versions that were trained on this conversation."""
        found = [one for one in self.conversations if one.session == session]
        return [
            version
            for version in self.served
            if any(self.is_ancestor(step, version) for one in found for step in one.versions)
        ]

    def _read(self, run: Path) -> list[TrainedConversation]:
        of_ticket: dict[int, int] | None = None
        steps: dict[tuple[str, str, str | None], set[int]] = {}
        for end in _lines(run / ENDS_FILE):
            if end["how"] != TRAINED:
                continue
            version = end.get("version")
            if version is None:
                of_ticket = _steps(run) if of_ticket is None else of_ticket
                version = of_ticket.get(end["ticket"])
            found = steps.setdefault((end["session"], end["key"], end.get("user")), set())
            if version is not None:
                found.add(version)
        return [
            TrainedConversation(session=session, key=key, user=user, versions=frozenset(versions))
            for (session, key, user), versions in steps.items()
        ]


def _steps(run: Path) -> dict[int, int]:
    """The version that the step on each ticket made."""
    trained = (one for one in records(run / LOG_FOLDER, of=Trained) if isinstance(one, Trained))
    return {ticket: one.batch + 1 for one in trained for ticket in one.tickets}


def _lines(file: Path) -> Iterator[dict]:
    return read_lines(file) if file.exists() else iter(())
