"""GRPO of a coding agent: it works on repositories in sandboxes, and hidden tests grade its patch. START HERE.

    python -m apps.coding.main --config configs/coding/qwen3_8b.yaml

An episode is one attempt at a task: the agent gets a sandbox with the task's repository, works there until it submits
or a limit ends it, and its changes are graded in another sandbox, which it has never seen. The two loops are those of
`apps/grpo/main.py`.
"""

from __future__ import annotations

from apps.grpo.main import grpo
from goaly.base.config import Loaded, run_cli
from goaly.base.errors import ConfigError
from goaly.plan.run_config import RunConfig


def main(loaded: Loaded[RunConfig]) -> int:
    """Train the coding agent of this config."""
    from goaly.coding.episode import CodingEpisode  # `--help` does not wait for torch
    from goaly.run.launch import launch

    config = loaded.config
    if config.coding is None:
        raise ConfigError(["coding=null: must be a section, because this script runs its agent; `{}` has the defaults"])
    return launch(loaded, CodingEpisode(config.coding, config.sandbox), grpo, coding=True)


if __name__ == "__main__":
    run_cli(main, RunConfig, prog="python -m apps.coding.main", description="GRPO of a coding agent.")
