"""What a run records about itself."""

from dataclasses import dataclass
from typing import Literal

from goaly.configuration.schema import KnownWords


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySettings(KnownWords):
    """Which records a run keeps in its folder, and how it shows its progress. `metrics.jsonl` is always written."""

    progress: Literal["auto", "live", "plain", "off"] = "auto"
    """Progress on the terminal: a live display, plain lines, nothing; `auto` is live where there is a terminal."""
    tensorboard: bool = True
    """Write TensorBoard events beside `metrics.jsonl`."""
    trace: bool = True
    """Record the spans of all processes, and merge them into `trace.json` at the end."""
    journal: bool = True
    """Write every trajectory (text, rewards, versions) to the rollout journal."""
    journal_tokens: bool = False
    """Also write token ids into the journal: exact, but several times larger."""

    def problems(self, prefix: str) -> list[str]:
        """What can't work, a line each. `prefix` is the section's dotted path with its dot, such as `telemetry.`."""
        if self.journal_tokens and not self.journal:
            return [f"{prefix}journal_tokens=true: nothing would be written with {prefix}journal=false"]
        return []
