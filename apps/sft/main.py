"""Supervised fine-tuning: imitate chats, completions, a task's demonstrations. START HERE: this file is the algorithm.

    python -m apps.sft.main --config configs/sft/tiny.yaml

The same command does nothing if its model exists. On several ranks: `torchrun --nproc-per-node 2 -m apps.sft.main …`.
"""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apps.sft.config import SftConfig
from apps.sft.ranks import is_first_rank, join_ranks, wait_for_all_ranks
from goaly.base.atomic_files import writing
from goaly.base.config import Loaded, run_cli, to_yaml
from goaly.models.settings import ModelSettings

if TYPE_CHECKING:
    from apps.sft.folder import SftFolder
    from goaly.prompts.supervised import RowStream
    from goaly.train.train_engine import TrainEngine
    from goaly.trajectory import PackedRows

INTERRUPTED = 130

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads would take time from other processes


def sft(config: SftConfig, folder: "SftFolder") -> dict[str, Any]:
    """Train and save the model; a summary."""
    from apps.sft.report import Report
    from goaly.losses.objective import Likelihood
    from goaly.prompts.supervised import row_stream
    from goaly.prompts.tokenizer import ChatTokenizer
    from goaly.train.train_engine import TrainEngine

    started = time.monotonic()
    model = starting_model(config, folder.run)
    rows = row_stream(config.data, ChatTokenizer(model.path, config.chat))
    engine = TrainEngine(model, config.trainer)
    likelihood = Likelihood()
    report = Report(config, folder)
    resume(folder, engine, rows)
    metrics = {}
    while engine.policy_version < config.steps:
        batch = rows.next()
        metrics = engine.train_step(share(batch, engine.dp_rank, config.trainer.fsdp), likelihood)
        report.step(engine.policy_version, batch, metrics)
        if config.checkpoint_every and engine.policy_version % config.checkpoint_every == 0:
            folder.save_checkpoint({"engine": engine.state_dict(), "rows": rows.state_dict()})
    with writing(f"output={config.output}"):
        engine.save_hf(folder.model)
    report.close()
    seconds = round(time.monotonic() - started, 1)
    return {"steps": engine.policy_version, "loss": metrics.get("loss"), "documents": rows.position, "seconds": seconds}


def starting_model(config: SftConfig, run: Path) -> ModelSettings:
    """The model that training starts from. If the config describes a tiny one, it is made first."""
    if config.model is not None:
        return config.model
    from goaly.models.tiny_model import write_tiny_model

    assert config.tiny is not None
    folder = run / "initial"
    if is_first_rank():
        write_tiny_model(folder, config.tiny)
    wait_for_all_ranks()
    return ModelSettings(path=str(folder))


def resume(folder: "SftFolder", engine: "TrainEngine", rows: "RowStream") -> None:
    """Continue from this config's checkpoint if an interrupted run left one."""
    state = folder.checkpoint()
    if state is not None:
        engine.load_state_dict(state["engine"])
        rows.load_state_dict(state["rows"])


def share(batch: "PackedRows", dp_rank: int, dp_ranks: int) -> "PackedRows":
    """The rows of a batch that this rank trains."""
    return replace(batch, rows=batch.rows[dp_rank::dp_ranks])


def main(loaded: Loaded[SftConfig]) -> int:
    """Train the model of this config, unless it exists."""
    config = loaded.config
    if loaded.dry_run:
        sys.stdout.write(to_yaml(config))
        return 0
    from apps.sft.folder import SftFolder

    folder = SftFolder(config)
    if folder.is_done:
        sys.stdout.write(f"{folder.model} is there already, made by this config\n")
        return 0
    join_ranks(config)
    if is_first_rank():
        with writing(f"output={config.output}"):
            folder.prepare()
    wait_for_all_ranks()
    try:
        summary = sft(config, folder)
    except KeyboardInterrupt:
        sys.stderr.write("stopped; the same command continues from the last checkpoint\n")
        return INTERRUPTED
    if is_first_rank():
        folder.finish(summary)
        sys.stdout.write(f"{folder.model}: {summary['steps']} steps, {summary['seconds']:.0f} s\n")
    return 0


if __name__ == "__main__":
    run_cli(main, SftConfig, prog="python -m apps.sft.main", description="Supervised fine-tuning.")
