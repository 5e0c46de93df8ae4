"""What a run records about itself."""

from collections.abc import Iterator
from typing import Literal

from goaly.config.settings import Section, Settings


class TelemetrySettings(Settings):
    """Which records a run keeps in its folder, and how it shows its progress. `metrics.jsonl` is always written."""

    progress: Literal["auto", "live", "plain", "off"] = "auto"
    """Progress on the terminal: a live display, plain lines, or nothing; `auto` is `live` on a terminal, else
    `plain`."""
    tensorboard: bool = True
    """Write TensorBoard events beside `metrics.jsonl`."""
    trace: bool = True
    """Record the spans of all processes, and merge them into `trace.json` at the end."""
    journal: bool = True
    """Write every trajectory (text, rewards, versions) to the rollout journal."""
    journal_tokens: bool = False
    """Also write token ids to the journal: exact, but several times larger."""

    def _problems(self, at: Section) -> Iterator[str]:
        if not self.journal:
            yield from at.idle(f"{at}journal is false", "journal_tokens")
