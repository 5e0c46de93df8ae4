"""The folder of a run as the journal reads it: also of a run that another machine made, or that is under way.

Nothing here writes into the folder, or checks settings that reading does not need.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from goaly.agents.session_files import SESSIONS_FOLDER
from goaly.backlog.settings import BacklogSettings
from goaly.base.config import RUN_CONFIG
from goaly.base.config.run_file import run_sections, run_values
from goaly.base.errors import ConfigError
from goaly.journal.run_log import LOG_FOLDER
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.reward.settings import AdvantageSettings
from goaly.rollout.failed_episodes import FAILED_FOLDER


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The facts in a run folder about its episodes, beside its log."""

    path: Path
    settings: Mapping[str, Any]
    """The content of its config."""

    @classmethod
    def of(cls, path: Path) -> "RunFolder":
        """The folder at this path; ConfigError if it is not that of a run with a log."""
        for needed in (path / RUN_CONFIG, path / LOG_FOLDER / "durable"):
            if not needed.exists():
                raise ConfigError([f"{path}: must be the folder of a run with a log; it has no {needed.name}"])
        return cls(path, run_values(path, "model"))

    @property
    def log(self) -> Path:
        """The folder of the log."""
        return self.path / LOG_FOLDER

    @property
    def backlog(self) -> BacklogSettings:
        """The settings of the queue."""
        return self._section("backlog", BacklogSettings)

    @property
    def advantages(self) -> AdvantageSettings | None:
        """How the run computes advantages; None if that function cannot be imported here."""
        settings = self._section("advantages", AdvantageSettings)
        try:
            _ = settings.needs  # imports it
        except ValueError:
            return None
        return settings

    def tokenizer(self) -> ChatTokenizer:
        """The run's own tokenizer; of the model's folder, or of the policy that the run has saved."""
        model = Path(self.settings["model"]["path"])
        for folder in (model, *self._policies()):
            if (folder / "tokenizer.json").is_file():
                return ChatTokenizer(folder)
        raise ConfigError([f"model.path={model}: has no tokenizer.json, which is needed to read the run's tokens"])

    def sessions(self, ticket: int, *, failed: bool = False) -> list[tuple[int, Path]]:
        """The sessions of this ticket, which is under way or has `failed`: the number of the sample, and the file with
        its records."""
        files = (self.path / (FAILED_FOLDER if failed else SESSIONS_FOLDER)).glob(f"{ticket}.*.jsonl")
        return sorted((int(file.name.split(".")[1]), file) for file in files)

    def _policies(self) -> Iterator[Path]:
        yield self.path / "policy"
        yield from sorted((self.path / "policies").glob("*"), reverse=True)

    def _section(self, name: str, schema: type) -> Any:
        return run_sections(self.settings, {name: schema})[name]
