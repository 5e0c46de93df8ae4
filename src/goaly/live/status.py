"""The status of live traffic: a file that the worker replaces each second, and its text for people."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from goaly.base.errors import ConfigError
from goaly.live.gate_status import gate_text

STATUS_FILE = "status.json"
OLD_SECONDS = 10.0
"""A status that is older than this says what was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStatus:
    """The work of each loop, and the numbers of turns that wait for it."""

    at: float
    address: str
    serves: bool
    """Whether a generator answers."""
    answered: int
    """Requests since the worker began."""
    version: int
    """The newest policy version that has answered."""
    sessions: int
    stages: Mapping[str, int]
    recorded: int
    ended: Mapping[str, int]
    left_out: Mapping[str, int]
    """Answers that were served and not recorded, since the worker began."""
    counts: Mapping[str, int]
    collecting: str
    judging: str
    judged: int
    training: str
    trained_at: float | None
    """When a batch was last seen to be trained."""

    def text(self, now: float) -> str:
        """The status as lines."""
        age = now - self.at
        trained = "no batch yet" if self.trained_at is None else f"last batch {now - self.trained_at:.0f} s ago"
        lines = [
            f"serve    {'answers' if self.serves else 'waits for a generator'} at {self.address}: "
            f"{self.answered} requests, policy version {self.version}",
            f"collect  {self.collecting}: {self.sessions} sessions, {self.recorded} turns; {_shown(self.stages)}",
            f"judge    {self.judging}; {self.judged} judged",
            f"train    {self.training}; {trained}",
            f"ended    {_shown(self.ended)}",
            f"left out {_shown(self.left_out)}",
        ]
        if self.counts:
            lines.append(f"counts   {_shown(self.counts)}")
        if age > OLD_SECONDS:
            lines.insert(0, f"no news for {age:.0f} s: the run has ended, or its worker is being replaced")
        return "\n".join(lines)


def write_status(folder: Path, status: LiveStatus) -> None:
    """Replace the status in this folder; a full disk keeps the old one."""
    staging = folder / f"{STATUS_FILE}.new"
    try:
        staging.write_text(json.dumps(asdict(status)))
        staging.replace(folder / STATUS_FILE)
    except OSError:  # the loops go on
        staging.unlink(missing_ok=True)


def status_text(run_dir: Path) -> str:
    """The state of this run's loops as text; ConfigError if it serves no live traffic."""
    file = run_dir / "live" / STATUS_FILE
    if not file.exists():
        raise ConfigError([f"{run_dir}: has no {file.name}, must be the folder of a run of apps.live.main"])
    text, gate = LiveStatus(**json.loads(file.read_text())).text(time.time()), gate_text(run_dir)
    return text if gate is None else f"{text}\n{gate}"


def _shown(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
