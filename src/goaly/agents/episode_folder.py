"""The folder of one episode of an agent's program.

    FOLDER/work   the working folder, empty at the start; verifiers find it as `prompt.metadata["episode_folder"]`
    FOLDER/home   HOME: `prompt.json` is what the program also reads from its standard input, `tmp` is TMPDIR

A folder that is not kept is gone when its episode has been scored, also if that failed or was cancelled, and when the
worker dies while the program runs.
"""

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from goaly.environments.guardian import remove
from goaly.prompts.prompt import Prompt

logger = logging.getLogger(__name__)

EPISODE_FOLDER = "episode_folder"
"""Key of a prompt's metadata that names the working folder to a verifier."""
PROMPT_FILE = "prompt.json"
OTHER_HOMES = (
    "CLAUDE_CONFIG_DIR",
    "CODEX_HOME",
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
    "XDG_DATA_HOME",
    "XDG_STATE_HOME",
)
"""Variables of a user's own that would lead a program to another home."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFolder:
    """A folder that exists."""

    path: Path
    is_kept: bool
    """Whether it stays after its episode."""

    @property
    def work(self) -> Path:
        """The working folder of the program."""
        return self.path / "work"

    @property
    def home(self) -> Path:
        """The HOME of the program."""
        return self.path / "home"

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment variables that name its parts."""
        own = {"HOME": self.home, "TMPDIR": self.home / "tmp", "PWD": self.work, "OLDPWD": Path.cwd()}
        return {name: str(folder) for name, folder in own.items()}

    def shown_to_verifier(self, prompt: Prompt) -> Prompt:
        """The prompt, with the working folder in its metadata."""
        return replace(prompt, metadata={**prompt.metadata, EPISODE_FOLDER: str(self.work)})


def _folder_of(name: str, kept_in: str | None) -> EpisodeFolder:
    parent = Path(tempfile.gettempdir() if kept_in is None else kept_in).absolute()
    digest = blake2b(name.encode(), digest_size=6).hexdigest()
    return EpisodeFolder(path=parent / f"goaly-{digest}", is_kept=kept_in is not None)


@asynccontextmanager
async def episode_folder(name: str, kept_in: str | None = None) -> AsyncIterator[EpisodeFolder]:
    """A new folder for the episode with this name, for as long as the block runs, or for good in the folder `kept_in`.

    An episode that begins again in another worker has the same path, so that its requests are the same, too.
    """
    folder = _folder_of(name, kept_in)
    await asyncio.to_thread(remove, str(folder.path))  # that of a worker that died
    folder.path.mkdir(mode=0o700, parents=True)
    try:
        for part in (folder.work, folder.home / "tmp"):
            part.mkdir(parents=True)
        yield folder
    finally:
        if not folder.is_kept:
            await asyncio.to_thread(remove, str(folder.path))
            if folder.path.exists():
                logger.warning("%s cannot be removed", folder.path)
