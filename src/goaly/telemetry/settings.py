"""What a run records about itself."""

from typing import Literal

from goaly.config.settings import settings


@settings
class TelemetrySettings:
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

    def problems(self, prefix: str) -> list[str]:
        """One line for each combination that cannot work. `prefix` is the section's path with its dot."""
        if self.journal_tokens and not self.journal:
            return [f"{prefix}journal_tokens=true: has no effect, {prefix}journal is false"]
        return []
