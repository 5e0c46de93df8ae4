"""Settings of a run's metrics, traces and progress display."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Literal

from goaly.base.config.settings import Section, Settings


class WandbSettings(Settings):
    """Weights & Biases, for users who follow runs there. It needs the extra `wandb`, and an API key (`wandb login` or
    WANDB_API_KEY) unless the mode is offline. A run goes on if it fails."""

    project: str = "goaly"
    """Project of the run."""
    entity: str | None = None
    """User or team of the project; null is the account's default."""
    name: str | None = None
    """Name of the run; null is the name of the run folder."""
    mode: Literal["online", "offline"] | None = None
    """`offline` only writes to `wandb/` in the run folder, for `wandb sync`; null is WANDB_MODE, else online."""


class TelemetrySettings(Settings):
    """Which records a run keeps in its folder, and how it shows its progress. `metrics.jsonl` is always written."""

    progress: Literal["auto", "live", "plain", "off"] = "auto"
    """Progress on the terminal: a live display, plain lines, or nothing; `auto` is `live` on a terminal, else
    `plain`."""
    tensorboard: bool = True
    """Write TensorBoard events beside `metrics.jsonl`."""
    wandb: WandbSettings | None = None
    """Also send metrics and evaluations to Weights & Biases, under the same names; null does not. `wandb: {}` has the
    defaults."""
    trace: bool = True
    """Record the spans of all processes, and merge them into `trace.json` at the end."""

    def _problems(self, at: Section) -> Iterator[str]:
        if self.wandb is not None and getattr(find_spec("wandb"), "origin", None) is None:  # its run folders have none
            yield f"{at}wandb: needs the package wandb, which is not installed: pip install 'goaly[wandb]'"
