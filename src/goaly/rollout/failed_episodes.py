"""What the chats of failed groups have said, on disk, for people who want to know why: `goaly.journal` shows it.

`RUN/failed/TICKET.SAMPLE.jsonl` has the records of one episode's session. Nothing of it is ever trained.

Invariants
    FE-1  The folder has the newest `MOST_KEPT` episodes at most.
"""

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path

from goaly.rollout.running import RunningEpisode

logger = logging.getLogger(__name__)

FAILED_FOLDER = "failed"
MOST_KEPT = 1000
NAME = re.compile(r"\d+\.\d+\.jsonl")


class FailedEpisodes:
    """The folder of a run's failed episodes."""

    def __init__(self, folder: Path):
        self._folder = folder

    def keep(self, ticket: int, episodes: Sequence[RunningEpisode]) -> None:
        """Write what these episodes of a failed group have said, each with its own error if it has one."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for episode in episodes:
                if episode.session is not None and episode.session.turns:
                    records = [*episode.session.records(), {"kind": "failed", "why": episode.why}]
                    file = self._folder / f"{ticket}.{episode.sample_index}.jsonl"
                    file.write_text("".join(json.dumps(record) + "\n" for record in records))
            files = [file for file in self._folder.iterdir() if NAME.fullmatch(file.name)]
            for file in sorted(files, key=_place)[:-MOST_KEPT]:  # FE-1
                file.unlink(missing_ok=True)  # another worker may do the same
        except OSError as error:  # such as a full disk
            logger.warning("failed episodes of group %d are not kept: %s", ticket, error)


def _place(file: Path) -> tuple[int, ...]:
    return tuple(map(int, file.stem.split(".")))
