"""The files of a supervised run: the model's folder with its mark, and the run's own folder beside it.

A folder with the mark of a config is whole, and made by that config: its run needs no second time. A folder that no
supervised run made is never overwritten. A checkpoint is whole or absent, and goes on only under the config that wrote
it.
"""

import json
import os
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from apps.sft.config import SftConfig
from goaly.base.config import to_yaml
from goaly.base.errors import ConfigError
from goaly.base.telemetry.weights_and_biases import ID_FILE

MARK = "sft.json"
CHECKPOINT = "checkpoint.pt"


class SftFolder:
    """The folders of one config."""

    def __init__(self, config: SftConfig):
        self.model = Path(config.output)
        self.run = self.model.with_name(f"{self.model.name}.run")
        self._config = config
        self._fingerprint = fingerprint(config)
        ours = (self.model / MARK).is_file() or (self.run / "config.yaml").is_file()
        if self.model.exists() and any(self.model.iterdir()) and not ours:
            raise ConfigError([f"output={config.output}: holds something that no supervised run made"])

    @property
    def is_done(self) -> bool:
        """Whether this very config has made the model."""
        mark = self.model / MARK
        return mark.is_file() and json.loads(mark.read_text())["fingerprint"] == self._fingerprint

    def prepare(self) -> None:
        """Make the run's folder, with the resolved config in it; what another config left there goes."""
        self.run.mkdir(parents=True, exist_ok=True)
        if self.checkpoint() is None:
            for name in ("metrics.jsonl", CHECKPOINT, ID_FILE):
                (self.run / name).unlink(missing_ok=True)
        (self.run / "config.yaml").write_text(to_yaml(self._config))

    def finish(self, summary: dict[str, Any]) -> None:
        """Mark the model's folder as made, and drop the checkpoint."""
        _replace(self.model / MARK, json.dumps({"fingerprint": self._fingerprint, **summary}, indent=2) + "\n")
        (self.run / CHECKPOINT).unlink(missing_ok=True)

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Write a checkpoint in place of the one before."""
        staged = self.run / f".{CHECKPOINT}.{os.getpid()}"
        torch.save({"fingerprint": self._fingerprint, **state}, staged)
        staged.replace(self.run / CHECKPOINT)

    def checkpoint(self) -> dict[str, Any] | None:
        """The checkpoint of this config, if there is one."""
        path = self.run / CHECKPOINT
        if not path.is_file():
            return None
        state = torch.load(path, weights_only=False)
        return state if state["fingerprint"] == self._fingerprint else None


def fingerprint(config: SftConfig) -> str:
    """A digest of the settings on which the model depends, without those of display, saving and threads."""
    content = asdict(config)
    for name in ("output", "telemetry", "checkpoint_every"):
        del content[name]
    del content["trainer"]["threads"]
    return blake2b(json.dumps(content, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _replace(path: Path, text: str) -> None:
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    staged.write_text(text)
    staged.replace(path)
