"""Sends metrics to Weights & Biases, with the names of `metrics.jsonl` and the policy version as the x-axis.

W&B's own step must never decrease, but an evaluation may end after newer steps. So each record has its
`policy_version`, which W&B uses as the step of all metrics.

Nothing here ends a run or keeps it waiting: a thread makes all calls of W&B. A failure there, or a W&B that is too
slow, costs records in W&B and one warning; `metrics.jsonl` has them all. All starts of a run are one run of W&B: its id
is in the run folder.
"""

import logging
import os
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from goaly.base.telemetry.settings import WandbSettings

logger = logging.getLogger(__name__)

MOST_WAITING = 10_000
"""Records that wait for W&B; further ones are lost."""
START_SECONDS = 30.0
"""Longest wait for W&B's server when the run starts."""
UNANSWERED_SECONDS = 4.0
"""Longest wait at the end of a run that W&B's server has not answered yet."""
FINISH_SECONDS = 8.0
"""Longest time for uploading what is left at the end of a run."""
ID_FILE = Path("wandb") / "goaly_run_id"


class WandbRun:
    """A run of W&B."""

    def __init__(self, run_dir: Path, settings: WandbSettings):
        self._run_dir = run_dir
        self._settings = settings
        self._records: SimpleQueue[dict[str, float] | None] = SimpleQueue()
        self._gave_up = False
        self._failed = False
        self._answered = threading.Event()
        self._library: Any = None
        self._thread = threading.Thread(target=self._send, name="wandb", daemon=True)
        self._thread.start()

    def log(self, policy_version: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step or an evaluation."""
        if self._records.qsize() >= MOST_WAITING:
            self._give_up(f"{MOST_WAITING} records wait for it")
        elif not self._gave_up:
            numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
            self._records.put({"policy_version": policy_version, **numbers})

    def close(self, *, failed: bool = False) -> None:
        """Send what is left, and finish the run there. `failed`: whether W&B should show it as failed."""
        self._failed = failed
        self._records.put(None)
        if not self._answered.wait(UNANSWERED_SECONDS):
            self._give_up(f"its server did not answer until {UNANSWERED_SECONDS:.0f} s after the run's end")
        else:
            self._thread.join(FINISH_SECONDS + 2)
            if self._thread.is_alive():
                self._give_up(f"it did not finish within {FINISH_SECONDS + 2:.0f} s")
        if self._gave_up:
            self._end_process()

    def _send(self) -> None:
        try:
            run = self._start()
            self._answered.set()
            while (record := self._records.get()) is not None:  # unblocked by `log` and `close`
                run.log(record)
            run.finish(exit_code=int(self._failed))
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")
        finally:
            self._answered.set()

    def _start(self) -> Any:
        import wandb

        mode: Any = self._settings.mode or os.environ.get("WANDB_MODE") or "online"
        quiet = wandb.Settings(silent=True, console="off")  # it neither prints nor captures what others print
        self._library = wandb.setup(quiet)
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            raise RuntimeError("no API key: run `wandb login`, set WANDB_API_KEY, or use telemetry.wandb.mode=offline")
        run = wandb.init(
            project=self._settings.project,
            entity=self._settings.entity,
            name=self._settings.name or self._run_dir.resolve().name,
            id=self._run_id(),
            resume="allow",
            dir=self._run_dir,
            mode=mode,
            config=_resolved_config(self._run_dir),
            settings=wandb.Settings(
                silent=True,
                console="off",
                init_timeout=START_SECONDS,
                finish_timeout=FINISH_SECONDS,
                finish_timeout_raises=True,
            ),
        )
        run.define_metric("policy_version")
        run.define_metric("*", step_metric="policy_version")
        return run

    def _run_id(self) -> str:
        """The id of this run in W&B, made at the run's first start."""
        file = self._run_dir / ID_FILE
        known = file.read_text().strip() if file.exists() else ""
        if not known:
            known = secrets.token_hex(4)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(known + "\n")
        return known

    def _end_process(self) -> None:
        """Kill W&B's own process. At exit W&B would wait until that has given the server up, too."""
        connection = getattr(self._library, "_connection", None)
        if connection is not None and connection._proc is not None:
            connection._cleanup()  # removes the exit handler that waits for the process
            connection._proc._process.kill()

    def _give_up(self, why: str) -> None:
        if not self._gave_up:
            self._gave_up = True
            logger.warning("Weights & Biases gets no more metrics: %s; metrics.jsonl has all of them", why)


def _resolved_config(run_dir: Path) -> dict[str, Any]:
    import yaml

    file = run_dir / "config.yaml"
    return yaml.safe_load(file.read_text()) if file.exists() else {}
