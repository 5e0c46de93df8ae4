"""Settings of checkpoints."""

from goaly.base.config.settings import NonNegativeFloat, NonNegativeInt, PositiveInt, Settings


class CheckpointSettings(Settings):
    """Checkpoints of the trainer, the critic and a refreshed reference, from which a run can be resumed."""

    every: PositiveInt | None = 50
    """Training steps between two checkpoints. A resumed run trains again the steps since the newest one, which takes no
    generation. null: only at the end of the run and on SIGTERM."""
    keep: PositiveInt = 2
    """Newest checkpoints that stay on disk. More than one lets a run go on if the newest is damaged."""
    keep_log: bool = True
    """Keep the whole log, which grows by 17 bytes for each token. false: delete the part before the oldest checkpoint
    kept; `python -m goaly.replay` and `python -m goaly.journal` then begin there."""
    restarts: NonNegativeInt = 3
    """Largest number of deaths in a row, without a training step in between, after which a role's processes are
    replaced or the run resumes by itself. At the next one the run ends; `--resume` continues it. 0: the run ends at the
    first death of any process but a generator's."""
    grace_seconds: NonNegativeFloat = 30.0
    """Time that a run has after SIGTERM to finish its step and write a checkpoint; then it is stopped without one. Set
    it below the time that your scheduler waits before it kills the job."""
