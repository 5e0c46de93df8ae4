"""The base of the actors of trained models: their state goes into checkpoints while they go on training.

`rank_thread.py` does the work. It is another file because supervised runs use it without Monarch.
"""

from pathlib import Path
from typing import Any

from monarch.actor import Actor

from goaly.base.actors import concurrent_endpoint
from goaly.train.rank_thread import RankThread


class ModelActor(Actor):
    """One rank of a model whose state goes into checkpoints."""

    _thread: RankThread[Any]

    @concurrent_endpoint
    async def stage(self) -> int:
        """Copy this rank's state for a checkpoint, and return its version. Once all ranks have, steps may go on."""
        return await self._thread.stage()

    @concurrent_endpoint
    async def write(self, folder: str | Path) -> None:
        """Write what all ranks have staged to this folder, while steps go on. Returns once the files are synced."""
        await self._thread.write(Path(folder))
