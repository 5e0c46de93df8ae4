"""The chats of failed groups, on disk, for people who want to know why they failed: `goaly.journal` shows them.

`RUN/failed/TICKET.SAMPLE.jsonl` has the records of one episode's session. Nothing of it is ever trained.
"""

import asyncio
import json
import logging
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from goaly.base.atomic_files import put_file
from goaly.rollout.running_episodes import RunningEpisode

logger = logging.getLogger(__name__)

FAILED_FOLDER = "failed"
MOST_KEPT = 1000
"""Episodes that the folder has at most: the newest."""
NAME = re.compile(r"\d+\.\d+\.jsonl")


class FailedEpisodes:
    """The folder of a run's failed episodes."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, "failed episodes")  # its own: episodes may block all others

    async def keep(self, ticket: int, episodes: Sequence[RunningEpisode]) -> None:
        """Write what these episodes of a failed group have said, each with its own error if it has one."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._keep, ticket, episodes)

    def _keep(self, ticket: int, episodes: Sequence[RunningEpisode]) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for episode in episodes:
                if episode.session is not None and episode.session.turns:
                    records = [*episode.session.records(), {"kind": "failed", "why": episode.why}]
                    lines = "".join(json.dumps(record) + "\n" for record in records)
                    put_file(self._folder / f"{ticket}.{episode.sample_index}.jsonl", lines.encode())
            files = [file for file in self._folder.iterdir() if NAME.fullmatch(file.name)]
            for file in sorted(files, key=lambda file: tuple(map(int, file.stem.split("."))))[:-MOST_KEPT]:
                file.unlink(missing_ok=True)  # another worker may do the same
        except OSError as error:  # such as a full disk
            logger.warning("failed episodes of group %d are not kept: %s", ticket, error)
