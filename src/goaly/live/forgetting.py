"""Forgets conversations of a live run that is not under way.

    RUN/live/sessions/ID.jsonl   removed, with turns that have not ended
    RUN/live/ends.jsonl          its lines stay, without the user
    RUN/log                      the trajectories lose their tokens (`goaly.journal.redaction`)

The log comes first and the names of users last, so that a command which was interrupted finds the rest again.
"""

import json
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

from goaly.base.atomic_files import put_file
from goaly.base.errors import ConfigError
from goaly.base.json_text import read_lines
from goaly.journal.attribution import ENDS_FILE, Attribution
from goaly.journal.redaction import redact
from goaly.journal.run_log import LOG_FOLDER

SESSIONS_FOLDER = "live/sessions"
EXPORTED = "rollouts.jsonl"


class LiveRecords:
    """The conversations in a run's folder."""

    def __init__(self, run: Path):
        """ConfigError if the folder is not that of a live run."""
        self._run = run
        if not (run / "live").is_dir():
            raise ConfigError([f"{run}: must be the folder of a live run; it has no folder live"])
        self._owners = dict(self._read())
        """Key and user of each conversation."""

    def chosen(self, *, user: str | None = None, session: str | None = None, key: str | None = None) -> frozenset[str]:
        """The conversations of this user, or this one; with `key` only those of this key."""
        return frozenset(
            name
            for name, (of_key, of_user) in self._owners.items()
            if (of_user == user if session is None else name == session) and key in (None, of_key)
        )

    def report(self, sessions: Set[str]) -> str:
        """Which served versions were trained on these conversations, as text."""
        attribution = Attribution(self._run)
        lines = [f"{len(sessions)} conversations"]
        for version in attribution.served:
            saw = sum(one.session in sessions for one in attribution.seen_by(version))
            if saw:
                lines.append(f"version {version} was trained on {saw} of them")
        steps = {step for one in attribution.conversations if one.session in sessions for step in one.versions}
        if not steps:
            lines.append("no version was trained on them")
        elif len(lines) == 1:
            lines.append(f"no served version was trained on them; versions {', '.join(map(str, sorted(steps)))} were")
        return "".join(f"{line}\n" for line in lines)

    def forget(self, sessions: Set[str]) -> str:
        """Remove them; what was removed, as text. RunFailed if the run is under way."""
        removed = redact(self._run / LOG_FOLDER, sessions)
        files = [self._run / SESSIONS_FOLDER / f"{session}.jsonl" for session in sorted(sessions)]
        there = [file for file in files if file.exists()]
        for file in there:
            file.unlink()
        ends = self._run / ENDS_FILE
        if ends.exists():
            lines = (end | {"user": None} if end["session"] in sessions else end for end in read_lines(ends))
            put_file(ends, "".join(json.dumps(line) + "\n" for line in lines).encode())
        text = f"removed {removed} trajectories from the log, and {len(there)} conversations that had not ended\n"
        if (self._run / EXPORTED).exists():
            text += f"{self._run / EXPORTED} was exported before: remove it, or export it again\n"
        return text

    def _read(self) -> Iterator[tuple[str, tuple[str, str | None]]]:
        for end in _lines(self._run / ENDS_FILE):
            yield end["session"], (end["key"], end.get("user"))
        for file in sorted((self._run / SESSIONS_FOLDER).glob("*.jsonl")):
            for record in _lines(file):
                if record["kind"] == "session":
                    yield record["session"], (record["key"], record["user"])


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    return read_lines(file) if file.exists() else iter(())
